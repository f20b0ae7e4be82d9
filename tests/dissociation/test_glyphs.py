from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.path
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from words import refused

from dissociation.data import Variation, draw_glyphs, glyph_data
from dissociation.data import _glyphs as glyphs
from dissociation.data._glyphs import BORDER, FONTS, SIDE, _orders, draw_glyph, glyph_templates

STILL = Variation(*(0.0 for _ in Variation._fields))


@pytest.fixture(scope="module")
def data():
    return glyph_data(key=jax.random.key(7))


def off_border(border=BORDER):
    mask = np.zeros((SIDE, SIDE), bool)
    mask[border : SIDE - border, border : SIDE - border] = True
    return mask.reshape(-1)


def test_distances_are_exact_and_their_signs_agree_with_matplotlib():
    square = np.array([[-3.0, -3], [3, -3], [3, 3], [-3, 3], [-3, -3]])
    points = np.array([[0, 0], [2, 0.5], [5, 1], [6, 7], [-3.5, 0], [0, -10]])
    found = glyphs._signed_distance([square], points[:, :1], points[:, 1:])
    assert np.allclose(found, [3, 1, -2, -5, -0.5, -7], atol=1e-12)
    outer = np.array([[-5.0, -4], [5, -5], [4, 5], [-4, 4], [-5, -4]])
    hole = np.array([[-2.0, -2], [-2, 2], [2, 2], [2, -2], [-2, -2]])  # wound the other way
    points = np.random.default_rng(3).uniform(-6, 6, (500, 2))
    found = glyphs._signed_distance([outer, hole], points[:, :1], points[:, 1:]) > 0
    inside = [matplotlib.path.Path(p).contains_points(points) for p in (outer, hole)]
    assert np.array_equal(found, inside[0] & ~inside[1])


def test_templates_are_fixed_shared_and_centred():
    templates = glyph_templates()
    assert glyph_templates() is templates
    assert templates.shape == (len(FONTS), 10, 57, 57)
    with pytest.raises(ValueError, match="read-only"):
        templates[0] = 0
    ink = templates > 0
    rows = ink.any(axis=3)
    # 20 pixels high, two samples per pixel, centred on sample 28.
    first, last = rows.argmax(axis=2), 56 - rows[:, :, ::-1].argmax(axis=2)
    assert np.all(np.abs(first + last - 56) <= 1)
    assert np.all(np.abs(last - first - 39) <= 1)


def test_images_are_upright():
    draw = partial(draw_glyphs, labels=np.arange(10), key=jax.random.key(0), variation=STILL)
    images = np.asarray(jax.jit(jax.vmap(lambda font: draw(font[None])))(glyph_templates()))
    images = images.reshape(-1, 10, SIDE, SIDE)
    line = np.arange(SIDE) - 13.5
    down, right = images.sum(axis=3) @ line, images.sum(axis=2) @ line
    assert np.all(down[:, 7] < 0)  # the bar of a 7 is on top
    assert np.all(down[:, 6] > down[:, 9])  # a 6 has its bowl below the 9's
    assert np.all(right[:, 6] < right[:, 9])  # and its stem on the other side


def test_one_effect_at_a_time():
    # A disc of radius 6 shows what each number does in closed form.
    line = np.linspace(-SIDE / 2, SIDE / 2, 57)
    disc = (6 - np.hypot(*np.meshgrid(line, line))).astype(np.float32)
    templates = jnp.broadcast_to(disc, (1, 10, 57, 57))
    keys = jax.random.split(jax.random.key(1), 300)
    draw_all = jax.jit(jax.vmap(lambda k, v: draw_glyph(templates, 0, k, v), in_axes=(0, None)))

    def draw(**changes):
        return np.asarray(draw_all(keys, STILL._replace(**changes)))

    still = draw()
    area = still.sum(axis=1)
    assert np.allclose(area, np.pi * 36, rtol=5e-3)
    assert np.allclose(draw(rotation=1.0), still, atol=0.05)
    radius = np.sqrt(draw(weight=1.0).sum(axis=1) / np.pi)
    assert 5.7 < radius.min() < radius.max() - 1.2 < 7.05 - 1.2
    fade = draw(fade=0.5).max(axis=1)
    assert 0.5 <= fade.min() < fade.max() - 0.45 <= 0.55
    blurred = draw(blur=4.0)
    grey = np.mean((blurred > 0.02) & (blurred < 0.98), axis=1)
    assert grey.max() > 2 * np.mean((still > 0.02) & (still < 0.98))
    x = np.tile(np.arange(SIDE) - 13.5, SIDE)
    shifted = draw(shift=3.0)
    centre = shifted @ x / shifted.sum(axis=1)
    assert np.all(np.abs(centre) < 3.05)
    assert abs(centre.std() - 3 / np.sqrt(3)) < 4 * 3 / np.sqrt(3) * np.sqrt(
        0.2 / 300
    )  # uniform in [-3, 3]
    scaled = draw(log_scale=0.2)
    width = scaled @ x**2 / scaled.sum(axis=1)
    assert np.all((np.sqrt(width) / 3 > 0.8) & (np.sqrt(width) / 3 < 1.25))
    noise = (draw(noise=0.1) - still)[:, off_border()]
    paper = noise[:, still[0][off_border()] == 0]
    assert np.mean(paper > 0) == pytest.approx(0.5, abs=0.01)
    assert np.sqrt(np.mean(paper**2)) == pytest.approx(0.1 / np.sqrt(2), rel=0.02)


def test_elastic_map_is_smooth_and_of_unit_size():
    line = jnp.arange(SIDE) - 13.5
    centres = jnp.stack(jnp.meshgrid(line, line), axis=-1).reshape(-1, 2)
    draws = jax.random.normal(jax.random.key(2), (1000, 9, 2))
    maps = np.asarray(jax.vmap(lambda d: glyphs._elastic(d, centres))(draws))
    assert np.mean(maps**2) == pytest.approx(1, abs=0.05)
    assert (
        np.sqrt(np.mean(np.diff(maps.reshape(-1, SIDE, SIDE, 2), axis=1) ** 2)) < 0.15
    )  # strokes bend, not break


def test_variation_is_differentiable(key):
    @jax.jit
    def ink(weight):
        return draw_glyph(
            jnp.asarray(glyph_templates()), 5, key, STILL._replace(weight=weight)
        ).sum()

    slope = (ink(0.55) - ink(0.45)) / 0.1
    assert abs(slope) > 0
    assert jax.grad(ink)(0.5) == pytest.approx(float(slope), rel=0.1)


def test_form_range_and_border(data):
    train, train_labels, test, test_labels = data
    assert [a.shape for a in data] == [(10_000, 784), (10_000, 10), (2_000, 784), (2_000, 10)]
    assert all(
        isinstance(a, np.ndarray) and a.flags.writeable and a.dtype == np.float32 for a in data
    )
    for images in (train, test):
        assert images.min() == 0
        assert 0.9 < images.max() <= 1
        assert np.all(images[:, ~off_border()] == 0)
        assert np.all(images[:, off_border()].max(axis=0) > 0)
    for labels in (train_labels, test_labels):
        assert np.all(labels.sum(axis=1) == 1)
        assert np.all(labels.sum(axis=0) == len(labels) / 10)
    order = train_labels.argmax(axis=1)
    assert (
        abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.15
    )  # blocks of ten repel a little: -1/9 in a block


def test_null_space_is_the_border(data):
    for images in (data[0], data[2]):
        gram = images.astype(np.float64).T @ images
        values = np.linalg.eigvalsh(gram)
        assert np.sum(values <= 1e-10 * values[-1]) == 208 == SIDE**2 - (SIDE - 2 * BORDER) ** 2
        assert values[208] > 1e-6 * values[-1]  # and nothing comes close to the cut


def test_linear_classifier_is_neither_lost_nor_perfect(data):
    train, train_labels, test, test_labels = data
    model = LogisticRegression(C=0.02, max_iter=200, tol=1e-2)
    score = model.fit(train[:4000], train_labels[:4000].argmax(1)).score(
        test, test_labels.argmax(1)
    )
    assert 0.82 < score < 0.93


def test_same_key_same_data_and_prefixes(data, key):
    small = glyph_data(95, 10, key=jax.random.key(7))
    again = glyph_data(95, 10, key=jax.random.PRNGKey(7))
    other = glyph_data(95, 10, key=jax.random.key(8))
    for one, two, leading in zip(small, again, data, strict=True):
        assert np.array_equal(one, two)
        assert np.allclose(one, leading[: len(one)], atol=1e-4)
    assert not np.allclose(small[0], other[0], atol=0.1)
    assert not np.array_equal(small[1], other[1])
    assert not np.allclose(small[0][:10], small[2], atol=0.1)  # test draws are not training draws


def test_labels_are_balanced_in_every_ten(key):
    labels = np.argmax(glyph_data(95, 10, key=key)[1], -1)
    for block in labels[:90].reshape(-1, 10):
        assert sorted(block) == list(range(10))
    assert len(set(labels[90:])) == 5
    first = np.asarray(_orders(jax.random.split(key, 2000)))[:, 0]
    assert (
        np.sum((np.bincount(first, minlength=10) - 200) ** 2 / 200) < 27.9
    )  # chi-square, 9 degrees, p = .001


def test_wrong_use_says_what_is_wrong(key):
    templates = glyph_templates()
    refused(
        (
            lambda: draw_glyphs(templates, np.array([3, 10]), key=key),
            "`labels` must lie between 0 and 9",
        ),
        (
            lambda: draw_glyphs(templates, np.array([3]), key=key, border=14),
            "`border` must be at most 13",
        ),
    )
