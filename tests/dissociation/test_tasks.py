import jax
import jax.numpy as jnp
import numpy as np
import pytest
from words import refused

from dissociation.data import coarse_grained, rotated_quarters
from dissociation.data._tasks import coarse_labels

FACTORS = [0, 1, 2, 3, 2, 4, 2, 5, 2, 3]
"""Column of every digit's least prime factor."""


@pytest.mark.parametrize("num", [4, 11])
def test_every_image_is_there_once_and_turned_as_its_label_says(key, num):
    original = np.random.default_rng(1).permutation(9 * num).reshape(num, 9).astype(np.uint8)
    images, labels = rotated_quarters(original, key=key)
    assert (images.dtype, labels.dtype) == (jnp.uint8, jnp.float32)
    np.testing.assert_array_equal(
        images.reshape(num, 3, 3), rotated_quarters(original.reshape(num, 3, 3), key=key)[0]
    )
    turns = np.asarray(labels).argmax(axis=1)
    assert np.array_equal(np.eye(4)[turns], labels)
    back = np.stack(
        [np.rot90(i.reshape(3, 3), -k) for i, k in zip(np.asarray(images), turns, strict=True)]
    )
    found = [np.flatnonzero((original == b.reshape(-1)).all(axis=1)) for b in back]
    assert sorted(int(f[0]) for f in found if len(f) == 1) == list(range(num))
    counts = np.bincount(turns, minlength=4)
    assert counts.tolist() == [num // 4 + (k < num % 4) for k in range(4)]


def test_turn_is_independent_of_the_place_in_the_data_set():
    # The first image gets each turn equally often, and lands anywhere. Ink is in the upper left
    # corner alone.
    keys = jax.random.split(jax.random.key(5), 2000)
    corners = np.pad(np.arange(1.0, 9.0, dtype=np.float32)[:, None, None], ((0, 0), (0, 3), (0, 3)))

    def where_and_how(key):
        images, labels = rotated_quarters(corners, key=key)
        place = jnp.argmax((images == 1).any(axis=(1, 2)))
        return place, jnp.argmax(labels[place])

    places, turns = jax.jit(jax.vmap(where_and_how))(keys)
    table = np.histogram2d(places, turns, bins=(8, 4))[0]
    assert (
        np.sum((table - 2000 / 32) ** 2 / (2000 / 32)) < 61.1
    )  # chi-square, 31 degrees of freedom, p = 0.001


def test_coarse_classes_by_hand(key):
    coarse = coarse_labels(np.eye(10, dtype=np.float32))
    assert np.asarray(coarse).argmax(axis=1).tolist() == FACTORS
    fine = jax.nn.softmax(jax.random.normal(key, (7, 10)))
    assert np.allclose(coarse_labels(fine), fine @ coarse, atol=1e-6)


def test_coarse_grained_keeps_pairs_together(key):
    digits = np.arange(20) % 10
    images, labels = digits[:, None].astype(np.float32), np.eye(10, dtype=np.float32)[digits]
    kept_images, kept_labels = coarse_grained(images, labels)
    assert np.array_equal(kept_images, images)
    assert np.array_equal(kept_labels, coarse_labels(labels))
    mixed_images, mixed_labels = coarse_grained(images, labels, key=key)
    assert np.array_equal(np.sort(mixed_images[:, 0]), np.sort(digits))
    assert np.asarray(mixed_labels).argmax(axis=1).tolist() == [
        FACTORS[int(d)] for d in mixed_images[:, 0]
    ]


def test_wrong_use_says_what_is_wrong(key):
    refused(
        (
            lambda: rotated_quarters(np.zeros((8, 3, 5), np.float32), key=key),
            "`images` must be square",
        ),
        (
            lambda: rotated_quarters(np.zeros((3, 16), np.float32), key=key),
            "`images` must hold at least 4",
        ),
        (
            lambda: coarse_grained(np.zeros((4, 16)), np.eye(4)),
            r"`labels` must be .* \[n, 10\], got shape",
        ),
    )
