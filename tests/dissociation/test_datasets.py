from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation._core.keys import named_key
from dissociation.data import NAMES, Dataset, glyph_data, load
from dissociation.data import _datasets as datasets
from dissociation.recipes import train_compression

FIELDS = ("train_images", "train_labels", "test_images", "test_labels")


@pytest.fixture
def parts():
    rng = np.random.default_rng(0)
    images = rng.random((8, 4), dtype=np.float32)
    labels = np.eye(3, dtype=np.float32)[np.arange(8) % 3]
    return {
        "train_images": images[:5], "train_labels": labels[:5],
        "test_images": images[5:], "test_labels": labels[5:],
    }  # fmt: skip


@pytest.fixture
def fake_mnist(monkeypatch):
    """A stand-in of 60 training and 10 test images, whose pixels say which image they are."""
    calls = []

    def mnist_data(permute_train=False, *, folder=None):
        calls.append((permute_train, folder))
        images, labels = (
            np.arange(60, dtype=np.float32)[:, None] * np.ones((1, 784), np.float32),
            np.eye(10),
        )
        labels = labels.astype(np.float32)[np.arange(60) % 10]
        return images, labels, 100 + images[:10], labels[:10]

    monkeypatch.setattr(datasets, "mnist_data", mnist_data)
    return calls


def test_glyphs_by_name_are_the_glyphs(key, monkeypatch):
    data = load("glyphs", num_train=20, num_test=20, key=key)
    assert data.name == "glyphs"
    assert data.num_pixels == 784
    assert data.num_classes == 10
    for field, expected in zip(FIELDS, glyph_data(20, 20, key=key), strict=True):
        assert np.array_equal(getattr(data, field), expected)
    default = load("glyphs", num_train=20, num_test=20)
    assert np.array_equal(default.train_images, glyph_data(20, 20, key=named_key("glyphs"))[0])
    assert not np.array_equal(default.train_images, data.train_images)
    asked = []
    arrays = tuple(getattr(data, field) for field in FIELDS)
    monkeypatch.setattr(datasets, "glyph_data", lambda *sizes, key: asked.append(sizes) or arrays)
    load("glyphs")
    assert asked == [(10_000, 2_000)]


def test_mnist_by_name_takes_the_leading_images(fake_mnist, tmp_path, monkeypatch):
    whole = load("mnist", folder=tmp_path)
    assert fake_mnist == [(False, tmp_path)]
    assert whole.name == "mnist"
    assert [len(getattr(whole, field)) for field in FIELDS] == [60, 60, 10, 10]
    part = load("mnist", num_train=7, num_test=3)
    for field, size in zip(FIELDS, (7, 7, 3, 3), strict=True):
        assert np.array_equal(getattr(part, field), getattr(whole, field)[:size])
    assert part.train_images.base is None  # the rest of the set can be freed
    with pytest.raises(ValueError, match="`num_train` must be at most 60"):
        load("mnist", num_train=61)
    monkeypatch.setattr(datasets, "mnist_data", Mock(side_effect=FileNotFoundError))
    with pytest.raises(FileNotFoundError):  # and is not replaced
        load("mnist", num_train=10, num_test=10)


@pytest.mark.parametrize("name", ["glyphs", "mnist"])
def test_names_and_sizes_are_checked(fake_mnist, name):
    assert name in NAMES
    with pytest.raises(ValueError, match="`num_train` must be at least 1"):
        load(name, num_train=0)
    with pytest.raises(ValueError, match="'glyphs', 'mnist'"):
        load(name.upper())


def test_own_data_are_accepted_and_pass_through_transformations(parts):
    data = Dataset("mine", **parts)
    assert (data.num_pixels, data.num_classes) == (4, 3)
    doubled = jax.jit(lambda d: jax.tree.map(lambda a: 2 * a, d))(data)
    assert doubled.name == "mine"
    assert np.array_equal(doubled.test_images, 2 * parts["test_images"])
    with pytest.raises(AttributeError):
        data.name = "other"
    with pytest.raises(ValueError, match="`name` must say"):
        Dataset("", **parts)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("test_labels", np.ones_like, "be integers .* or one-hot rows .*, got .* in row 0"),
        ("test_labels", lambda a: a[:2], r"have as many samples as `test_images` \(3\), got 2"),
        (
            "test_images",
            lambda a: a[:, :3],
            r"be .* \[m, d\], got shape \(.*, and \(.*, 4\) for `train_images`",
        ),
    ],
)
def test_own_data_are_checked(parts, field, change, message, unchecked):
    with pytest.raises(ValueError, match=f"`{field}` must {message}"):
        Dataset("mine", **{**parts, field: change(parts[field])})


@pytest.mark.parametrize("convert", [jnp.asarray, list, lambda labels: labels.astype(np.uint8)])
def test_labels_may_be_integers(parts, convert):
    """Classes count up to the largest of both splits; one-hot rows beside integers say how many there are."""
    given = parts | {
        "train_labels": convert(np.array([0, 1, 1, 0, 1])),
        "test_labels": convert(np.array([1, 2, 0])),
    }
    data = Dataset("mine", **given)
    np.testing.assert_array_equal(data.train_labels, np.eye(3)[[0, 1, 1, 0, 1]])
    np.testing.assert_array_equal(data.test_labels, np.eye(3)[[1, 2, 0]])
    mixed = Dataset("mine", **given | {"test_labels": np.eye(5)[[1, 2, 0]]})
    assert mixed.train_labels.shape == (5, 5)
    for wrong in (np.array([0, 1, -1]), np.array([0, 1])):
        with pytest.raises((TypeError, ValueError), match="`test_labels` must"):
            Dataset("mine", **given | {"test_labels": wrong})
    with pytest.raises(ValueError, match=r"have as many classes as `train_labels` \(4\), got 3"):
        Dataset("mine", **given | {"train_labels": [0, 1, 3, 0, 1], "test_labels": np.eye(3)})
    with pytest.raises(ValueError, match=r"have as many classes as `train_labels` \(5\), got 6"):
        Dataset("mine", **given | {"train_labels": np.eye(5), "test_labels": np.eye(6)[:3]})


@pytest.mark.parametrize("kind", [np.uint8, list])
def test_grey_levels_are_no_pixels_from_0_to_1(kind):
    levels = np.arange(784 * 3).reshape(3, 784) % 256
    levels, ones = ((x.tolist() if kind is list else x.astype(kind)) for x in (levels, levels % 2))
    message = (
        "must be numbers, for pixels from 0 to 1, got integers up to 255. Divide grey levels by 255"
    )
    for name, call in {
        "train_images": lambda x: (
            Dataset("mine", x, [0, 1, 1], np.ones((1, 784)), [1]).train_images
        ),
        "test_images": lambda x: Dataset("mine", np.ones((1, 784)), [1], x, [0, 1, 1]).test_images,
    }.items():
        with pytest.raises(ValueError, match=f"`{name}` {message}"):
            call(levels)
        assert call(ones).shape == (3, 784)
    with pytest.raises(ValueError, match=f"`images` {message}"):
        train_compression(levels, key=jax.random.key(0))
