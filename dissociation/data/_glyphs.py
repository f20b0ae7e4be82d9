"""Digits drawn by code, in place of MNIST without download."""

from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from jaxtyping import Array, Float, Int, Real
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from dissociation._core.checks import check_classes, check_count
from dissociation._core.types import PRNGKey, PRNGKeys
from dissociation._core.validation import validated

SIDE = 28
"""Pixels along a side of an image, as in MNIST."""

NUM_CLASSES = 10

BORDER = 2
"""Number of dark rows and columns on each side of an image."""

# System fonts differ between machines. Sans obliques are left out: they are slanted upright fonts,
# and slant varies.
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic",
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta",
    "cmr10", "cmb10", "cmti10", "cmss10", "cmtt10",
)  # fmt: skip
"""File names of fonts in matplotlib's own folder."""

_SAMPLES = 57  # Grid points along a side of a distance field: two per pixel, ends included.
_SPACING = SIDE / (_SAMPLES - 1)
_BLOCK = 512  # Grid points whose distances are computed at once.
_HEIGHT = 20.0  # Height of every undistorted digit in pixels.
_MODES = 3  # Cosine modes per axis in the elastic map, the constant one (a shift) left out.
_BATCH = 1000  # Images drawn at once: 60 000 would need gigabytes of temporaries.


class Variation(NamedTuple):
    """Variation of the images of one digit; values may be traced. Zeros give the font's shape.

    Attributes:
        rotation: Largest angle, in radians, to either side.
        shear: Largest slant, horizontal shift per height.
        log_scale: Largest logarithm of the independent factors that stretch width and height.
        shift: Largest displacement along each axis, in pixels.
        elastic: Root mean square displacement of the elastic map along each axis, in pixels.
        weight: Largest thickening of a stroke's edge, in pixels, four times the largest thinning.
        blur: Largest increase of the width of a stroke's edge from 1, in pixels.
        fade: Largest reduction of the ink from 1.
        noise: Standard deviation of noise on pixels inside the border, before clipping to [0, 1].
    """

    rotation: float | int | Real[Array, ""] = 0.12
    shear: float | int | Real[Array, ""] = 0.15
    log_scale: float | int | Real[Array, ""] = 0.08
    shift: float | int | Real[Array, ""] = 2.75
    elastic: float | int | Real[Array, ""] = 0.4
    weight: float | int | Real[Array, ""] = 1.4
    blur: float | int | Real[Array, ""] = 2.0
    fade: float | int | Real[Array, ""] = 0.15
    noise: float | int | Real[Array, ""] = 0.05


def _signed_distance(polygons: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the distances of points (x, y) [p, 1] to the outline, positive inside."""
    start = np.concatenate([polygon[:-1] for polygon in polygons]).T[:, None, :]
    edge = np.concatenate([np.diff(polygon, axis=0) for polygon in polygons]).T[:, None, :]
    square_length = np.sum(edge**2, axis=0)
    has_length = square_length[0] > 0
    start_x, start_y = start[:, :, has_length]
    edge_x, edge_y = edge[:, :, has_length]

    from_x = x - start_x
    from_y = y - start_y
    projection = (from_x * edge_x + from_y * edge_y) / square_length[:, has_length]
    along = np.clip(projection, 0, 1)
    gap_x = from_x - along * edge_x
    gap_y = from_y - along * edge_y
    square_distance = (gap_x**2 + gap_y**2).min(axis=1)

    # A ray to the right crosses an edge upwards (+1) where the point lies left of it, downwards
    # (-1) right of it.
    is_left = edge_x * from_y > edge_y * from_x
    is_start_below = from_y >= 0
    is_end_above = from_y < edge_y
    num_upwards = (is_start_below & is_end_above & is_left).sum(axis=1)
    num_downwards = (~is_start_below & ~is_end_above & ~is_left).sum(axis=1)
    return np.sqrt(square_distance) * np.where(num_upwards != num_downwards, 1, -1)


@lru_cache(maxsize=1)
def glyph_templates() -> Float[np.ndarray, "fonts 10 side side"]:
    """Return signed distance fields of the digits of all fonts.

    Digits are 20 pixels high and centred by their bounding boxes.
    """
    # On a distance field, a stroke's weight is an offset, and its blur the width of a ramp.
    line = np.arange(_SAMPLES) * _SPACING - SIDE / 2
    # Rows run down the image, and the fonts' second coordinate up.
    x, y = np.meshgrid(line, -line, indexing="xy")
    x = x.reshape(-1, 1)
    y = y.reshape(-1, 1)
    distances = np.empty(_SAMPLES**2)
    blocks = [slice(first, first + _BLOCK) for first in range(0, _SAMPLES**2, _BLOCK)]
    fields = np.empty((len(FONTS), NUM_CLASSES, _SAMPLES, _SAMPLES), np.float32)
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    for i, font in enumerate(FONTS):
        properties = FontProperties(fname=str(folder / f"{font}.ttf"))
        for digit in range(NUM_CLASSES):
            polygons = TextPath((0, 0), str(digit), size=100, prop=properties).to_polygons()
            corners = np.concatenate(polygons)
            low = corners.min(axis=0)
            high = corners.max(axis=0)
            scale = _HEIGHT / (high[1] - low[1])
            centred = [(polygon - (low + high) / 2) * scale for polygon in polygons]
            # Blocks of points keep all temporaries in a core's cache.
            for points in blocks:
                distances[points] = _signed_distance(centred, x[points], y[points])
            fields[i, digit] = distances.reshape(_SAMPLES, _SAMPLES)
    fields.flags.writeable = False
    return fields


def _affine(draws: Float[Array, "4"], variation: Variation) -> Float[Array, "2 2"]:
    """Return a rotation after a slant after a stretch of each axis, from draws in [-1, 1]."""
    angle = draws[0] * variation.rotation
    slant = draws[1] * variation.shear
    width = jnp.exp(draws[2] * variation.log_scale)
    height = jnp.exp(draws[3] * variation.log_scale)
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    rotation = jnp.stack([cos, -sin, sin, cos]).reshape(2, 2)
    stretch = jnp.stack([width, slant * height, jnp.zeros_like(height), height])
    return rotation @ stretch.reshape(2, 2)


def _elastic(
    draws: Float[Array, "modes 2"], centres: Float[Array, "pixels 2"]
) -> Float[Array, "pixels 2"]:
    """Return a smooth displacement: cosine modes with amplitudes over the squared wave number."""
    order = jnp.arange(_MODES, dtype=centres.dtype)
    phases = jnp.pi * (centres[:, :, None] / SIDE + 0.5)
    waves = jnp.cos(phases * order[None, None, :])
    modes = waves[:, 0, :, None] * waves[:, 1, None, :]
    modes = modes.reshape(-1, _MODES**2)
    squares = (order[:, None] ** 2 + order[None, :] ** 2).reshape(-1)
    # Without the constant mode, a shift, and with mean square one over draws and pixels along each
    # axis.
    decay = jnp.where(squares > 0, 1 / jnp.maximum(squares, 1), 0)
    mean_square = jnp.sum(decay**2 * jnp.mean(modes**2, axis=0))
    decay = decay / jnp.sqrt(mean_square)
    return modes @ (draws * decay[:, None])


def draw_glyph(
    templates: Float[Array, "fonts 10 samples samples"],
    label: Int[Array, ""] | int,
    key: PRNGKey,
    variation: Variation,
    border: int = BORDER,
) -> Float[Array, " pixels"]:
    """Draw one digit in a random font.

    Pixel `x` reads the distance field `f` at `u(x) = A (x + e(x) - t)`, with a random matrix `A`,
    smooth displacement `e` and shift `t`. Its value is `clip(ink * clip((f(u(x)) + weight) / blur +
    1/2, 0, 1) + noise, 0, 1)`.
    """
    dtype = templates.dtype
    uniform_key, normal_key = jax.random.split(key)
    font, weight, blur, fade, *signed = jax.random.uniform(uniform_key, (10,), dtype)
    signed = 2 * jnp.stack(signed) - 1
    normals = jax.random.normal(normal_key, (SIDE**2 + 2 * _MODES**2,), dtype)
    grain, amplitudes = jnp.split(normals, [SIDE**2])

    line = jnp.arange(SIDE, dtype=dtype) - (SIDE - 1) / 2
    centres = jnp.stack(jnp.meshgrid(line, line, indexing="xy"), axis=-1).reshape(-1, 2)
    displacement = _elastic(amplitudes.reshape(-1, 2), centres)
    shifted = centres + variation.elastic * displacement - variation.shift * signed[None, :2]
    source = shifted @ _affine(signed[2:], variation).T

    num_fonts, _, _, samples = templates.shape
    # In low precision the product can round up to the number of fonts.
    font = jnp.minimum((font * num_fonts).astype(int), num_fonts - 1)
    column, row = (source.T / SIDE + 0.5) * (samples - 1)
    distance = jax.scipy.ndimage.map_coordinates(
        templates[font, label], [row, column], order=1, mode="nearest"
    )

    weight = variation.weight * (1.25 * weight - 0.25)
    ramp = (distance + weight) / (1 + variation.blur * blur) + 0.5
    ink = (1 - variation.fade * fade) * jnp.clip(ramp, 0, 1)
    image = jnp.clip(ink + variation.noise * grain, 0, 1)
    is_inside = jnp.max(jnp.abs(centres), axis=1) < SIDE / 2 - border
    return jnp.where(is_inside, image, 0).astype(dtype)


@validated(finite=("templates",))
def draw_glyphs(
    templates: Float[Array | np.ndarray, "fonts 10 samples samples"],
    labels: Int[Array | np.ndarray, " n"],
    *,
    key: PRNGKey,
    variation: Variation | None = None,
    border: int = BORDER,
    batch_size: int = _BATCH,
) -> Float[Array, "n pixels"]:
    """Return images [n, 784] in [0, 1] of a digit for every label.

    Image i depends only on `fold_in(key, i)` and label i.

    Args:
        templates: Signed distance fields in pixels, from `glyph_templates`.
        labels: Digits, 0 to 9.
        key: Random key of fonts and variations.
        variation: Variation of the images, by default `Variation()`.
        border: Number of zero rows and columns on each side.
        batch_size: Number of images drawn at once, at least 1. It affects memory only.
    """
    check_count("batch_size", batch_size, minimum=1)
    check_count("border", border, maximum=SIDE // 2 - 1)
    check_classes("labels", labels, NUM_CLASSES)
    if variation is None:
        variation = Variation()
    labels = jnp.asarray(labels)
    keys = _fold_in_all(key, labels.shape[0])
    return _draw_each(jnp.asarray(templates), labels, keys, variation, border, batch_size)


def _fold_in_all(key: PRNGKey, num: int) -> PRNGKeys:
    """Return keys for the numbers below `num`, equal for any larger `num`."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num))


def _draw_each(
    templates: Float[Array, "fonts 10 samples samples"],
    labels: Int[Array, " n"],
    keys: PRNGKeys,
    variation: Variation,
    border: int,
    batch_size: int,
) -> Float[Array, "n pixels"]:
    """Draw one image per label and key, at most `batch_size` at once."""

    def draw(label_and_key):
        label, glyph_key = label_and_key
        return draw_glyph(templates, label, glyph_key, variation, border)

    # Batches have one size, the last one padded, because a smaller one would compile a second
    # program.
    num = labels.shape[0]
    if num <= batch_size:
        return jax.vmap(draw)((labels, keys))
    num_batches = -(-num // batch_size)
    size = -(-num // num_batches)
    rows = jnp.minimum(jnp.arange(num_batches * size), num - 1)
    return jax.lax.map(draw, (labels[rows], keys[rows]), batch_size=size)[:num]


def _orders(keys: PRNGKeys) -> Int[Array, "n 10"]:
    return jax.vmap(lambda k: jax.random.permutation(k, NUM_CLASSES))(keys)


@partial(jax.jit, static_argnames=("num_train", "num_test"))
def _draw_splits(
    templates: Float[Array, "fonts 10 samples samples"],
    num_train: int,
    num_test: int,
    key: PRNGKey,
    variation: Variation,
) -> tuple[Float[Array, "n pixels"], Float[Array, "n 10"]]:
    """Return images and one-hot labels of both splits, training first."""
    num_orders = []
    order_keys = []
    keys = []
    for split, num in enumerate((num_train, num_test)):
        label_key, image_key = jax.random.split(jax.random.fold_in(key, split))
        num_orders.append(-(-num // NUM_CLASSES))
        order_keys.append(_fold_in_all(label_key, num_orders[-1]))
        keys.append(_fold_in_all(image_key, num))

    # One map draws both splits, so that it compiles once.
    orders = _orders(jnp.concatenate(order_keys))
    train_labels, test_labels = jnp.split(orders, num_orders[:1])
    train_labels = train_labels.reshape(-1)[:num_train]
    test_labels = test_labels.reshape(-1)[:num_test]
    labels = jnp.concatenate([train_labels, test_labels])
    images = _draw_each(templates, labels, jnp.concatenate(keys), variation, BORDER, _BATCH)
    return images, jax.nn.one_hot(labels, NUM_CLASSES, dtype=images.dtype)


@validated
def glyph_data(
    num_train: int = 10_000,
    num_test: int = 2_000,
    *,
    key: PRNGKey,
    variation: Variation | None = None,
) -> tuple[
    Float[np.ndarray, "train 784"],
    Float[np.ndarray, "train 10"],
    Float[np.ndarray, "test 784"],
    Float[np.ndarray, "test 10"],
]:
    """Draw a training and a test set of digits, in the form of `mnist_data`.

    Both sets have the same fonts and variation, with independent draws. Labels are balanced and in
    random order. With the same key a smaller set is the beginning of a larger one. The null space
    of at least 576 images is exactly the 208 pixels of the outer two rows and columns, which are
    zero.

    Args:
        num_train: Training images, at least 1.
        num_test: Test images, at least 1.
        key: Random key of labels and images.
        variation: Variation of the images, by default `Variation()`.

    Returns:
        `(train_images, train_labels, test_images, test_labels)`, float32 NumPy arrays: images [n,
        784] in [0, 1], one-hot labels [n, 10].
    """
    check_count("num_train", num_train, minimum=1)
    check_count("num_test", num_test, minimum=1)
    if variation is None:
        variation = Variation()
    templates = jnp.asarray(glyph_templates())
    arrays = _draw_splits(templates, num_train, num_test, key, variation)
    images, labels = jax.device_get(arrays)
    splits = images[:num_train], labels[:num_train], images[num_train:], labels[num_train:]
    return tuple(array.copy() for array in splits)  # writable, as MNIST's are
