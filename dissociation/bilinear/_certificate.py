"""Exact robustness of one-layer bilinear networks: the nearest input of another class."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dissociation._core.checks import check_finite, fail, is_traced
from dissociation._core.linalg import finite_part, product
from dissociation._core.results import Result
from dissociation._core.validation import validated
from dissociation.bilinear._forms import (
    Spectrum,
    biases_of,
    check_on_inputs,
    compact_forms,
    widened,
)
from dissociation.models._bilinear import BilinearNetwork

BISECTIONS = 60


class Margins(Result):
    """Margins q(x) = logit_first - logit_second of all pairs of classes, each in its eigenbasis."""

    values: Float[Array, "pairs r"]  # eigenvalues of the quadratic part
    directions: Float[Array, "pairs r d"]  # orthonormal eigenvectors in input space
    linear: Float[Array, "pairs r"]  # half of the linear part along them
    offset: Float[Array, " pairs"]
    # error bounds of quadratic part, half of the linear part, and offset
    rounding: Float[Array, "pairs 3"]
    table: Int[Array, "classes classes"]  # pair by classes; the diagonal is unused


class _Factors(NamedTuple):
    """Coefficients of a margin sum_k s_k (w_k . z + b_k)(v_k . z + c_k) + 2 h . z.

    A size bounds the summands of its coefficient before they cancel.
    """

    w: Float[Array, "m d"]
    v: Float[Array, "m d"]
    b: Float[Array, " m"]
    c: Float[Array, " m"]
    s: Float[Array, " m"]
    h: Float[Array, " d"]
    w_size: Float[Array, " m"]  # norms of rows
    v_size: Float[Array, " m"]
    s_size: Float[Array, " m"]  # absolute values
    h_size: Float[Array, " d"]


class DistanceCertificate(Result):
    """Distance from an input to another class.

    Attributes:
        radius: Certified radius: no input of another class is nearer. 0 if the input is
            misclassified, or may be within rounding; infinite if there is no other class; NaN for
            NaN logits or a traced label that is not a class.
        step: Step to the nearest input of another class, as computed, [d]; zero if there is none.
        rival: Class at this input.
        radii: Certified distance to the boundary with every class, infinite for the label,
            [classes].
        allowance: Norm of `step` minus `radius`, which covers rounding; constant under derivatives.
            Infinite if a rival cannot be ruled out.
    """

    radius: Float[Array, ""]
    step: Float[Array, " d"]
    rival: Int[Array, ""]
    radii: Float[Array, " classes"]
    allowance: Float[Array, ""]


@validated
def margins(source: BilinearNetwork | Spectrum) -> Margins:
    """Return the margins between all classes, by one eigendecomposition per pair.

    Args:
        source: A network of one layer, or a (truncated) spectrum with `space="input"`. Its numbers
            are taken as exact.

    Returns:
        The margins, for `certified_radius` of many inputs.

    Raises:
        ValueError: If the network has several layers or a gate, the spectrum has another or no
            space, or there is one class only.
    """
    if isinstance(source, Spectrum):
        check_on_inputs("source", source)
        classes = source.values.shape[0]
        margin_of = _from_components(source)
    else:
        source = widened(source)
        classes = source.head.shape[0]
        margin_of = _from_network(source)
    if classes < 2:
        fail("source", "have at least two classes", classes)

    first, second = np.triu_indices(classes, 1)
    pairs = np.arange(len(first))
    table = np.zeros((classes, classes), np.int32)
    table[first, second] = pairs
    table[second, first] = pairs
    # One pair at a time bounds the memory of the eigendecompositions.
    indices = (jnp.asarray(first), jnp.asarray(second))
    arrays = jax.lax.map(lambda pair: margin_of(*pair), indices)
    values, directions, linear, offset, rounding = arrays
    return Margins(values, directions, linear, offset, rounding, jnp.asarray(table))


def _from_network(model: BilinearNetwork) -> Callable[[Array, Array], tuple[Array, ...]]:
    """Return a function from two classes to the fields of their margin, by `_in_eigenbasis`."""
    if len(model.layers) != 1:
        fail("source", "have one layer: more make no quadratic form", len(model.layers))
    forms, lift = compact_forms(model, None, 0, "input")
    embed = model.embed
    size = forms.shape[1] - (forms.shape[1] > min(embed.shape))
    lift = lift[: embed.shape[1], :size]

    layer = model.layers[0]
    w = product(layer.left, embed)
    v = product(layer.right, embed)
    b, c = biases_of(layer)
    squared_lengths = jnp.sum(embed**2, 1)[:, None]
    w_size = jnp.sqrt(product(layer.left**2, squared_lengths)[:, 0])
    v_size = jnp.sqrt(product(layer.right**2, squared_lengths)[:, 0])

    def margin_of(first: Array, second: Array) -> tuple[Array, ...]:
        s = model.head[first] - model.head[second]
        s_size = jnp.abs(model.head[first]) + jnp.abs(model.head[second])
        h = jnp.zeros(embed.shape[1], embed.dtype)
        h_size = h
        if model.residual:
            h = 0.5 * product(s[None], embed)[0]
            h_size = 0.5 * product(s_size[None], jnp.abs(embed))[0]
        factors = _Factors(w, v, b, c, s, h, w_size, v_size, s_size, h_size)
        return _in_eigenbasis(forms[first] - forms[second], size, lift, factors)

    return margin_of


def _from_components(spectrum: Spectrum) -> Callable[[Array, Array], tuple[Array, ...]]:
    """Return a function from two classes to the fields of their margin, by `_in_eigenbasis`."""
    width = spectrum.vectors.shape[2] - spectrum.constant

    def margin_of(first: Array, second: Array) -> tuple[Array, ...]:
        vectors = jnp.concatenate([spectrum.vectors[first], spectrum.vectors[second]])
        s = jnp.concatenate([spectrum.values[first], -spectrum.values[second]])
        w = vectors[:, :width]
        lift, root = jnp.linalg.qr(w.T)
        # The constant coordinate is orthogonal to inputs and needs no factorisation.
        coordinates = jnp.concatenate([root, vectors[:, width:].T])
        form = product(coordinates * s[None], coordinates.T)

        no_size = jnp.zeros_like(s)
        b = vectors[:, width] if spectrum.constant else no_size
        h = jnp.zeros(width, w.dtype)
        factors = _Factors(w, w, b, b, s, h, no_size, no_size, jnp.abs(s), h)
        return _in_eigenbasis(form, root.shape[0], lift, factors)

    return margin_of


def _in_eigenbasis(form: Array, size: int, lift: Array, factors: _Factors) -> tuple[Array, ...]:
    """Return the fields of a margin up to `rounding`.

    `form` has `size` coordinates, or one more for a constant. `lift` [d, size] maps coordinates
    to inputs.
    """
    form, undefined = finite_part(form)
    values, vectors = jnp.linalg.eigh(form[:size, :size])
    form = jnp.pad(form, (0, size + 1 - form.shape[0]))
    slopes = form[:size, size:]
    offset = form[size, size]
    directions = product(lift, vectors).T
    linear = product(vectors.T, slopes)[:, 0]
    rounding = _bound_rounding(factors, values, directions, linear)
    return values + undefined, directions, linear, offset, rounding


def _bound_rounding(factors: _Factors, values: Array, directions: Array, linear: Array) -> Array:
    """Return error bounds [3] of quadratic part, half linear part and constant.

    References:
        Higham (2002), Accuracy and stability of numerical algorithms, chapter 3.
    """
    f, values, directions, linear = jax.lax.stop_gradient((factors, values, directions, linear))
    eps = jnp.finfo(values.dtype).eps
    eigenvectors = directions.T

    def symmetric(w: Array, v: Array, weighted_w: Array, weighted_v: Array) -> Array:
        return 0.5 * (product(w.T, weighted_v) + product(v.T, weighted_w))

    # Products, sums and the eigendecomposition are measured together: the matrix is applied to the
    # eigenvectors once more, factor by factor (Parlett, 1998, The symmetric eigenvalue problem,
    # section 4.5).
    s = f.s[:, None]
    weighted_w = s * product(f.w, eigenvectors)
    weighted_v = s * product(f.v, eigenvectors)
    image = symmetric(f.w, f.v, weighted_w, weighted_v)
    residual = jnp.linalg.norm(image - eigenvectors * values[None])
    gram = product(directions, eigenvectors)
    skew = jnp.linalg.norm(gram - jnp.eye(values.shape[0], dtype=values.dtype))

    # The norm of a matrix without negative entries is at most its largest row sum.
    abs_w = jnp.abs(f.w)
    abs_v = jnp.abs(f.v)
    s_size = f.s_size[:, None]
    ones = jnp.ones((abs_w.shape[1], 1), abs_w.dtype)
    weighted_w = s_size * product(abs_w, ones)
    weighted_v = s_size * product(abs_v, ones)
    summands = jnp.max(symmetric(abs_w, abs_v, weighted_w, weighted_v))
    w_norm = jnp.linalg.norm(abs_w, axis=1)
    v_norm = jnp.linalg.norm(abs_v, axis=1)
    squares = (f.w_size * v_norm) ** 2 + (w_norm * f.v_size) ** 2
    rows = jnp.sqrt(jnp.sum(f.s_size**2 * squares))
    # Few numbers may agree by chance, so the rounding of single operations is added.
    largest = jnp.max(jnp.abs(values))
    quadratic = 2 * (residual + largest * skew) + eps * (summands + rows)

    exact = symmetric(f.w, f.v, s * f.b[:, None], s * f.c[:, None])[:, 0]
    computed = product(eigenvectors, linear[:, None])[:, 0]
    residual = jnp.linalg.norm(exact + f.h - computed)
    abs_b = jnp.abs(f.b)[:, None]
    abs_c = jnp.abs(f.c)[:, None]
    slopes = symmetric(abs_w, abs_v, s_size * abs_b, s_size * abs_c)[:, 0]
    summands = jnp.linalg.norm(slopes + f.h_size)
    rows = jnp.linalg.norm(f.s_size * (f.w_size * abs_c[:, 0] + f.v_size * abs_b[:, 0]))
    half_linear = 2 * residual + eps * (summands + rows)
    constant = (2 + values.shape[0] ** 0.5) * jnp.sum(s_size * abs_b * abs_c)
    return jnp.stack([quadratic, half_linear, eps * constant])


@validated
def certified_radius(
    source: Margins, x: Float[Array | np.ndarray, " d"], label: int | Int[Array | np.ndarray, ""]
) -> DistanceCertificate:
    """Return the largest ball around an input without another class, and the point where it ends.

    Args:
        source: From `margins`.
        x: One finite input, [d].
        label: Class of the input.

    Returns:
        The certificate, for the network in exact arithmetic. Use float64 if the allowance is large:
        when large numbers cancel in the logits, or when the distance depends on an eigenvalue near
        zero.

    References:
        Conn, Gould and Toint (2000), Trust-region methods, chapter 7; Boyd and Vandenberghe (2004),
        appendix B.
    """
    classes = source.table.shape[0]
    if len(x) != source.directions.shape[2]:
        fail("x", f"have shape [{source.directions.shape[2]}]", x.shape)
    check_finite("x", x)
    if not is_traced(label) and not 0 <= int(label) < classes:
        fail("label", f"be a class from 0 to {classes - 1}", label)
    return _certified_radius(source, jnp.asarray(x), jnp.asarray(label))


@jax.jit
def _certified_radius(source: Margins, image: Array, label: Array) -> DistanceCertificate:
    """Return the certificate of one input."""
    classes = source.table.shape[0]
    rivals = jnp.arange(classes)
    rows = source.table[label]
    sign = jnp.where(label < rivals, 1.0, -1.0).astype(image.dtype)[:, None]

    directions = source.directions.reshape(-1, image.shape[0])
    coordinates = product(directions, image[:, None])
    coordinates = coordinates.reshape(source.values.shape)[rows]
    values = sign * source.values[rows]
    linear = sign * source.linear[rows]
    slopes = values * coordinates + linear
    margin = jnp.sum(coordinates * (slopes + linear), 1) + sign[:, 0] * source.offset[rows]
    errors = _errors(source, image, rows, coordinates, values, linear)

    # The margin of the label to itself is zero: its step has no derivative, so other numbers
    # replace it.
    is_label = rivals == label
    safe_slopes = jnp.where(is_label[:, None], 1.0, slopes)
    safe_margin = jnp.where(is_label, 1.0, margin)
    steps = jax.vmap(_nearest)(values, safe_slopes, safe_margin, errors[2])
    lengths = jnp.where(is_label, jnp.inf, jnp.linalg.norm(steps, axis=1))

    is_full = source.values.shape[1] == image.shape[0]
    certify = jax.vmap(partial(_certified, is_full=is_full))
    certified = certify(values, slopes, margin, errors, lengths)
    radii = jnp.where(is_label, jnp.inf, certified)
    is_class = (label >= 0) & (label < classes)
    radius = jnp.where(is_class, jnp.min(radii), jnp.nan)

    nearest = jnp.argmin(lengths)
    distance = lengths[nearest]
    step = jnp.where(jnp.isinf(distance), 0.0, steps[nearest])
    step = product(step[None], source.directions[rows[nearest]])[0]
    allowance = jnp.where(jnp.isinf(radius), 0.0, distance - radius)
    return DistanceCertificate(radius, step, nearest, radii, jax.lax.stop_gradient(allowance))


def _errors(
    source: Margins, image: Array, rows: Array, coordinates: Array, values: Array, linear: Array
) -> tuple[Array, Array, Array]:
    """Return error bounds of margins at an input, of half their gradients, and of their curvature.

    Each bound has an entry for every class.
    """
    coordinates, values, linear, length = jax.lax.stop_gradient(
        (coordinates, values, linear, jnp.linalg.norm(image))
    )
    eps = jnp.finfo(values.dtype).eps
    quadratic, slope, constant = jax.lax.stop_gradient(source.rounding[rows]).T
    # Rounding of coordinates along eigenvectors, which are sums over d products, and of sums over r
    # terms.
    of_coordinate = eps * image.shape[0] ** 0.5 * length
    of_sum = eps * (3 + values.shape[1] ** 0.5)
    sizes = jnp.abs(values * coordinates) + jnp.abs(linear)
    size = jnp.linalg.norm(sizes, axis=1)
    terms = 2 * jnp.sum(jnp.abs(coordinates) * sizes, 1) + jnp.abs(source.offset[rows])
    at_input = quadratic * length**2 + 2 * slope * length + constant
    at_input += 2 * of_coordinate * size + of_sum * terms
    largest = jnp.max(jnp.abs(values), 1)
    gradient = quadratic * length + slope + largest * of_coordinate + eps * size
    return at_input, gradient, quadratic


def _path(
    values: Array, slopes: Array, start: Array, base: Array
) -> tuple[Callable, Callable, Array]:
    """Return functions from a logit to the multiplier and to the step, and the largest logit.

    The multiplier runs from 0 to -1 / `base`.
    """
    # At the root 1 / m is near the curvature, or near slope^2 / start if the margin is almost
    # linear.
    limits = jnp.finfo(values.dtype)
    scale = jnp.where(base < 0, -base, jnp.max(jnp.abs(values)))
    unit = jnp.maximum(scale, jnp.sum(slopes**2) / jnp.maximum(start, limits.tiny))
    unit = jnp.clip(unit, limits.tiny**0.5, limits.max)

    # m = u / (w unit - u base) with u = 1 - w: from 0 to its largest, fine at both ends. No term of
    # 1 + m a is negative, so nothing cancels.
    def multiplier(logit: Array) -> Array:
        w = jax.nn.sigmoid(-logit)
        u = jax.nn.sigmoid(logit)
        return u / (w * unit - u * base)

    def step(logit: Array) -> Array:
        w = jax.nn.sigmoid(-logit)
        u = jax.nn.sigmoid(logit)
        return -u * slopes / (w * unit + u * jnp.maximum(values - base, 0.0))

    edge = -2 * np.log(float(limits.eps))
    return multiplier, step, jnp.asarray(edge, values.dtype)


def _bisect(margin: Callable[[Array], Array], edge: Array) -> tuple[Array, Array]:
    """Return logits below and above the root of a falling margin, from -`edge` to `edge`."""

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends  # the margin is positive at `low`
        middle = 0.5 * (low + high)
        is_positive = margin(middle) > 0
        return jnp.where(is_positive, middle, low), jnp.where(is_positive, high, middle)

    return jax.lax.stop_gradient(jax.lax.fori_loop(0, BISECTIONS, halve, (-edge, edge)))


def _square_root(square: Array) -> Array:
    """Return the square root of positive numbers, and 0 with a zero derivative of others."""
    is_positive = square > 0
    safe = jnp.where(is_positive, square, 1.0)
    return jnp.where(is_positive, jnp.sqrt(safe), 0.0)


def _nearest(values: Array, slopes: Array, start: Array, doubt: Array) -> Array:
    """Return the shortest y [r] with q = start + sum (2 slopes y + values y^2) <= 0, or infinity.

    `doubt`: Rounding of the lowest of `values`.
    """
    # The margin is quadratic, so this trust-region problem has no duality gap: y = -m g / (1 + m a)
    # with eigenvalues a, slopes g and a multiplier m. As q falls in m while 1 + m min(a) >= 0,
    # bisection finds its root.
    lowest = jnp.argmin(values)
    bottom = values[lowest]
    # A lowest eigenvalue that is negative only within rounding counts as zero.
    is_curved = bottom < -doubt
    _, step, edge = _path(values, slopes, start, jnp.where(is_curved, bottom, 0.0))

    def margin(y: Array) -> Array:
        return start + jnp.sum(y * (2 * slopes + values * y))

    def margin_at(logit: Array) -> Array:
        return margin(step(logit))

    _, logit = _bisect(margin_at, edge)
    is_reached = margin_at(edge) <= 0
    # The derivative of the root is that of one step of Newton's method.
    value, fall = jax.jvp(margin_at, (logit,), (jnp.ones_like(logit),))
    fall = jax.lax.stop_gradient(jnp.where(is_reached & (fall < 0), fall, -jnp.inf))
    y = step(logit - (value - jax.lax.stop_gradient(value)) / fall)

    # The hard case: q is positive up to the largest m. The remaining way is along the lowest
    # eigenvector, to the nearer of the two crossings.
    height = jnp.maximum(margin(y), 0.0)
    tilt = slopes[lowest] + bottom * y[lowest]
    root = _square_root(tilt**2 - jnp.minimum(bottom, 0.0) * height)
    sign = jnp.where(tilt > 0, -1.0, 1.0)
    further = sign * height / jnp.where(root > 0, jnp.abs(tilt) + root, 1.0)
    crossing = jnp.where(is_curved, y.at[lowest].add(further), jnp.inf)
    y = jnp.where(is_reached, y, crossing)
    return jnp.where(start <= 0, 0.0, y)


def _certified(
    values: Array,
    slopes: Array,
    start: Array,
    errors: tuple[Array, Array, Array],
    norm: Array,
    *,
    is_full: bool,
) -> Array:
    """Return a lower bound on the norm of the shortest y of `_nearest`."""
    size = jnp.max(jnp.abs(values))
    slope = jnp.linalg.norm(slopes)
    safe_start = jnp.where(start > 0, start, 1.0)
    steepness = slope + jnp.sqrt(slope**2 + size * safe_start)
    is_steep = steepness > 0
    order = jnp.where(is_steep, safe_start / jnp.where(is_steep, steepness, 1.0), 1.0)
    is_usable = jnp.isfinite(norm) & (norm > 0)
    distance = jax.lax.stop_gradient(jnp.where(is_usable, norm, order))

    # The true margin is at least q - e_0 - 2 e_1 |y| - e_2 |y|^2. As 2 |y| <= t + |y|^2 / t for all
    # t, tight at t = |y|, it is at least q - (e_0 + e_1 t) - (e_1 / t + e_2) |y|^2, with t the
    # distance.
    at_input, gradient, curvature = errors
    lowered = start - (at_input + gradient * distance)
    is_outside = lowered <= 0
    lowered = jnp.where(is_outside, 1.0, lowered)
    bend = gradient / distance + curvature
    values = values - bend
    # Directions outside of the eigenvectors have no curvature but that of the errors.
    bottom = jnp.minimum(jnp.min(values), jnp.inf if is_full else -bend)
    base = jnp.minimum(bottom, 0.0)
    multiplier, step, edge = _path(values, slopes, lowered, base)
    rounding = jnp.finfo(values.dtype).eps * (8 + values.shape[0] ** 0.5)

    def margin(y: Array) -> Array:
        sizes = jnp.abs(y) * (2 * jnp.abs(slopes) + jnp.abs(values * y))
        size = jax.lax.stop_gradient(lowered + jnp.sum(sizes))
        return lowered + jnp.sum(y * (2 * slopes + values * y)) - rounding * size

    def margin_at(logit: Array) -> Array:
        return margin(step(logit))

    logit, _ = _bisect(margin_at, edge)
    # For any multiplier m the dual value |y|^2 + m q(y) is at most the squared distance: rounding
    # of m does no harm.
    m, y = jax.lax.stop_gradient((multiplier(logit), step(logit)))
    # The dual value is stationary in y, and in m unless m ends at -1 / bottom with a positive
    # margin.
    value = margin(y)
    height = jnp.maximum(value, 0.0)
    end = jax.lax.stop_gradient(jnp.where(base < 0, m**2 * height, 0.0))
    squared = jnp.sum(y**2) + m * value + end * (bottom - jax.lax.stop_gradient(bottom))
    radius = _square_root(squared) * (1 - rounding)
    radius = jnp.where(jnp.isnan(squared), jnp.nan, radius)
    is_unbounded = (base == 0) & (margin_at(edge) > 0)
    radius = jnp.where(is_unbounded, jnp.inf, radius)
    return jnp.where(is_outside, 0.0, radius)


@validated
def certified_accuracy(
    radii: Float[Array | np.ndarray, " n"], levels: Float[Array | np.ndarray, " k"]
) -> Float[Array, " k"]:
    """Return the share of inputs that no perturbation of a given norm can misclassify.

    Args:
        radii: `DistanceCertificate.radius` of every input, 0 for misclassified ones.
        levels: Norms.

    Returns:
        Descending numbers from 0 to 1; NaN if a radius or the level is NaN.
    """
    radii = jnp.asarray(radii)
    levels = jnp.asarray(levels)
    shares = jnp.mean(radii[None] > levels[:, None], 1, dtype=radii.dtype)
    is_undefined = jnp.any(jnp.isnan(radii)) | jnp.isnan(levels)
    return jnp.where(is_undefined, jnp.nan, shares)
