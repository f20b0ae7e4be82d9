"""Exact robustness of one-layer bilinear networks: the nearest input of another class, in Euclidean distance."""

from collections.abc import Callable
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
    rounding: Float[
        Array, "pairs 3"
    ]  # error bounds of quadratic part, half of the linear part, and offset
    table: Int[Array, "classes classes"]  # pair by classes; the diagonal is unused


class _Factors(NamedTuple):
    """A margin sum_k w_k (l_k . z + b_k)(r_k . z + c_k) + 2 h . z, and sizes of its summands before they cancel."""

    left: Float[Array, "m d"]
    right: Float[Array, "m d"]
    left_bias: Float[Array, " m"]
    right_bias: Float[Array, " m"]
    weights: Float[Array, " m"]
    linear: Float[Array, " d"]
    left_size: Float[Array, " m"]  # norms of rows
    right_size: Float[Array, " m"]
    weight_size: Float[Array, " m"]  # absolute values
    linear_size: Float[Array, " d"]


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
        classes, make = source.values.shape[0], _from_components(source)
    else:
        source = widened(source)
        classes, make = source.head.shape[0], _from_network(source)
    if classes < 2:
        fail("source", "have at least two classes", classes)
    first, second = np.triu_indices(classes, 1)
    table = np.zeros((classes, classes), np.int32)
    table[first, second] = table[second, first] = np.arange(len(first))
    # One pair at a time bounds the memory of the eigendecompositions.
    values, directions, linear, offset, rounding = jax.lax.map(
        lambda pair: make(*pair), (jnp.asarray(first), jnp.asarray(second))
    )
    return Margins(values, directions, linear, offset, rounding, jnp.asarray(table))


def _from_network(model: BilinearNetwork) -> Callable[[Array, Array], tuple[Array, ...]]:
    if len(model.layers) != 1:
        fail("source", "have one layer: more make no quadratic form", len(model.layers))
    forms, lift = compact_forms(model, None, 0, "input")
    size = forms.shape[1] - (forms.shape[1] > min(model.embed.shape))
    lift = lift[: model.embed.shape[1], :size]
    layer, lengths = model.layers[0], jnp.sum(model.embed**2, 1)[:, None]
    biases = biases_of(layer)
    left, right = (product(weights, model.embed) for weights in (layer.left, layer.right))
    left_size, right_size = (
        jnp.sqrt(product(weights**2, lengths)[:, 0]) for weights in (layer.left, layer.right)
    )

    def make(first: Array, second: Array) -> tuple[Array, ...]:
        weights = model.head[first] - model.head[second]
        size_of = jnp.abs(model.head[first]) + jnp.abs(model.head[second])
        linear = linear_size = jnp.zeros(model.embed.shape[1], model.embed.dtype)
        if model.residual:
            linear = 0.5 * product(weights[None], model.embed)[0]
            linear_size = 0.5 * product(size_of[None], jnp.abs(model.embed))[0]
        factors = _Factors(
            left, right, *biases, weights, linear, left_size, right_size, size_of, linear_size
        )
        return _in_eigenbasis(forms[first] - forms[second], size, lift, factors)

    return make


def _from_components(spectrum: Spectrum) -> Callable[[Array, Array], tuple[Array, ...]]:
    width = spectrum.vectors.shape[2] - spectrum.constant

    def make(first: Array, second: Array) -> tuple[Array, ...]:
        rows = jnp.concatenate([spectrum.vectors[first], spectrum.vectors[second]])
        weights = jnp.concatenate([spectrum.values[first], -spectrum.values[second]])
        lift, root = jnp.linalg.qr(rows[:, :width].T)
        # The constant coordinate is orthogonal to inputs and needs no factorisation.
        inner = jnp.concatenate([root, rows[:, width:].T])
        bias = rows[:, width] if spectrum.constant else jnp.zeros_like(weights)
        none, size, rows = jnp.zeros(width, rows.dtype), jnp.zeros_like(weights), rows[:, :width]
        factors = _Factors(
            rows, rows, bias, bias, weights, none, size, size, jnp.abs(weights), none
        )
        return _in_eigenbasis(product(inner * weights[None], inner.T), root.shape[0], lift, factors)

    return make


def _in_eigenbasis(form: Array, size: int, lift: Array, factors: _Factors) -> tuple[Array, ...]:
    """Return a form on `size` coordinates, or one more for a constant, in its eigenbasis; `lift`: [d, size]."""
    form, undefined = finite_part(form)
    values, vectors = jnp.linalg.eigh(form[:size, :size])
    form = jnp.pad(form, (0, size + 1 - form.shape[0]))
    slopes, offset = form[:size, size:], form[size, size]
    directions, linear = product(lift, vectors).T, product(vectors.T, slopes)[:, 0]
    return (
        values + undefined,
        directions,
        linear,
        offset,
        _bound_rounding(factors, values, directions, linear),
    )


def _bound_rounding(factors: _Factors, values: Array, directions: Array, linear: Array) -> Array:
    """Return error bounds [3] of quadratic part, half linear part and constant (Higham, 2002, chapter 3)."""
    f, values, directions, linear = jax.lax.stop_gradient((factors, values, directions, linear))
    eps = jnp.finfo(values.dtype).eps
    left, right = jnp.abs(f.left), jnp.abs(f.right)
    turned = directions.T

    def symmetric(a: Array, b: Array, weighted_a: Array, weighted_b: Array) -> Array:
        return 0.5 * (product(a.T, weighted_b) + product(b.T, weighted_a))

    weights = f.weights[:, None]
    image = symmetric(
        f.left, f.right, weights * product(f.left, turned), weights * product(f.right, turned)
    )
    # Products, sums and the eigendecomposition are measured together: the matrix is applied to the
    # eigenvectors once more, factor by factor (Parlett, 1998, The symmetric eigenvalue problem,
    # section 4.5).
    residual = jnp.linalg.norm(image - turned * values[None])
    skew = jnp.linalg.norm(
        product(directions, turned) - jnp.eye(values.shape[0], dtype=values.dtype)
    )
    # The norm of a matrix without negative entries is at most its largest row sum.
    sizes = f.weight_size[:, None]
    ones = jnp.ones((left.shape[1], 1), left.dtype)
    summands = jnp.max(
        symmetric(left, right, sizes * product(left, ones), sizes * product(right, ones))
    )
    norms = [jnp.linalg.norm(rows, axis=1) for rows in (left, right)]
    rows = jnp.sqrt(
        jnp.sum(f.weight_size**2 * ((f.left_size * norms[1]) ** 2 + (norms[0] * f.right_size) ** 2))
    )
    # Few numbers may agree by chance, so the rounding of single operations is added.
    quadratic = 2 * (residual + jnp.max(jnp.abs(values)) * skew) + eps * (summands + rows)

    biases = [jnp.abs(bias)[:, None] for bias in (f.left_bias, f.right_bias)]
    exact = symmetric(
        f.left, f.right, weights * f.left_bias[:, None], weights * f.right_bias[:, None]
    )[:, 0]
    off = jnp.linalg.norm(exact + f.linear - product(turned, linear[:, None])[:, 0])
    summands = jnp.linalg.norm(
        symmetric(left, right, sizes * biases[0], sizes * biases[1])[:, 0] + f.linear_size
    )
    rows = jnp.linalg.norm(
        f.weight_size * (f.left_size * biases[1][:, 0] + f.right_size * biases[0][:, 0])
    )
    constant = (2 + values.shape[0] ** 0.5) * jnp.sum(sizes * biases[0] * biases[1])
    return jnp.stack([quadratic, 2 * off + eps * (summands + rows), eps * constant])


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
    classes = source.table.shape[0]
    rivals = jnp.arange(classes)
    rows = source.table[label]
    sign = jnp.where(label < rivals, 1.0, -1.0).astype(image.dtype)[:, None]
    along = product(source.directions.reshape(-1, image.shape[0]), image[:, None]).reshape(
        source.values.shape
    )
    values, linear, along = sign * source.values[rows], sign * source.linear[rows], along[rows]
    slopes = values * along + linear
    margin = jnp.sum(along * (slopes + linear), 1) + sign[:, 0] * source.offset[rows]
    errors = _errors(source, image, rows, along, values, linear)
    # The margin of the label to itself is zero: its step has no derivative, so other numbers
    # replace it.
    same = rivals == label
    steps = jax.vmap(_nearest)(
        values, jnp.where(same[:, None], 1.0, slopes), jnp.where(same, 1.0, margin), errors[2]
    )
    lengths = jnp.where(same, jnp.inf, jnp.linalg.norm(steps, axis=1))
    full = source.values.shape[1] == image.shape[0]
    certified = jax.vmap(lambda *parts: _certified(*parts, full=full))(
        values, slopes, margin, errors, lengths
    )
    radii = jnp.where(rivals == label, jnp.inf, certified)
    nearest = jnp.argmin(lengths)
    met = jnp.where(jnp.isinf(lengths[nearest]), 0.0, steps[nearest])
    step = product(met[None], source.directions[rows[nearest]])[0]
    radius = jnp.where((label >= 0) & (label < classes), jnp.min(radii), jnp.nan)
    allowance = jnp.where(jnp.isinf(radius), 0.0, lengths[nearest] - radius)
    return DistanceCertificate(radius, step, nearest, radii, jax.lax.stop_gradient(allowance))


def _errors(
    source: Margins, image: Array, rows: Array, along: Array, values: Array, linear: Array
) -> tuple[Array, Array, Array]:
    """Return error bounds, by class, of margins at an input, of half their gradients there, and of their curvature."""
    along, values, linear, length = jax.lax.stop_gradient(
        (along, values, linear, jnp.linalg.norm(image))
    )
    eps = jnp.finfo(values.dtype).eps
    quadratic, slope, constant = jax.lax.stop_gradient(source.rounding[rows]).T
    # Rounding of coordinates along eigenvectors, which are sums over d products, and of sums over r
    # terms.
    coordinate = eps * image.shape[0] ** 0.5 * length
    sums = eps * (3 + values.shape[1] ** 0.5)
    sizes = jnp.abs(values * along) + jnp.abs(linear)
    at_input = quadratic * length**2 + 2 * slope * length + constant
    at_input += 2 * coordinate * jnp.linalg.norm(sizes, axis=1) + sums * (
        2 * jnp.sum(jnp.abs(along) * sizes, 1) + jnp.abs(source.offset[rows])
    )
    largest = jnp.max(jnp.abs(values), 1)
    gradient = (
        quadratic * length + slope + largest * coordinate + eps * jnp.linalg.norm(sizes, axis=1)
    )
    return at_input, gradient, quadratic


def _path(
    values: Array, slopes: Array, start: Array, base: Array
) -> tuple[Callable, Callable, Array]:
    """Return functions from a place to the multiplier, from 0 to -1 / `base`, and to the step, and the last place."""
    # At the root 1 / m is near the curvature, or near slope^2 / start if the margin is almost
    # linear.
    limits = jnp.finfo(values.dtype)
    scale = jnp.where(base < 0, -base, jnp.max(jnp.abs(values)))
    unit = jnp.maximum(scale, jnp.sum(slopes**2) / jnp.maximum(start, limits.tiny))
    unit = jnp.clip(unit, limits.tiny**0.5, limits.max)

    # m = (1 - w) / (w unit - (1 - w) base): from 0 to its largest, fine at both ends. No term of 1
    # + m a is negative, so nothing cancels.
    def multiplier(place: Array) -> Array:
        return jax.nn.sigmoid(place) / (
            jax.nn.sigmoid(-place) * unit - jax.nn.sigmoid(place) * base
        )

    def step(place: Array) -> Array:
        w, rest = jax.nn.sigmoid(-place), jax.nn.sigmoid(place)
        return -rest * slopes / (w * unit + rest * jnp.maximum(values - base, 0.0))

    return multiplier, step, jnp.asarray(-2 * np.log(float(limits.eps)), values.dtype)


def _bisect(is_positive: Callable[[Array], Array], edge: Array) -> tuple[Array, Array]:
    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends  # the margin is positive at `low`
        middle = 0.5 * (low + high)
        positive = is_positive(middle)
        return jnp.where(positive, middle, low), jnp.where(positive, high, middle)

    return jax.lax.stop_gradient(jax.lax.fori_loop(0, BISECTIONS, halve, (-edge, edge)))


def _nearest(values: Array, slopes: Array, start: Array, doubt: Array) -> Array:
    """Return the shortest y with q = start + sum (2 slopes y + values y^2) <= 0; infinite if there is none."""
    # The margin is quadratic, so this trust-region problem has no duality gap: y = -m g / (1 + m a)
    # with eigenvalues a, slopes g and a multiplier m. As q falls in m while 1 + m min(a) >= 0,
    # bisection finds its root.
    lowest = jnp.argmin(values)
    bottom = values[lowest]
    # A lowest eigenvalue that is negative only within rounding counts as zero.
    curved = bottom < -doubt
    _, step, edge = _path(values, slopes, start, jnp.where(curved, bottom, 0.0))

    def margin(y: Array) -> Array:
        return start + jnp.sum(y * (2 * slopes + values * y))

    place = _bisect(lambda place: margin(step(place)) > 0, edge)[1]
    reached = margin(step(edge)) <= 0
    # The derivative of the root is that of one step of Newton's method.
    value, fall = jax.jvp(lambda place: margin(step(place)), (place,), (jnp.ones_like(place),))
    fall = jax.lax.stop_gradient(jnp.where(reached & (fall < 0), fall, -jnp.inf))
    y = step(place - (value - jax.lax.stop_gradient(value)) / fall)
    # The hard case: q is positive up to the largest m. The rest of the way is along the lowest
    # eigenvector, to the nearer of the two crossings.
    rest, tilt = jnp.maximum(margin(y), 0.0), slopes[lowest] + bottom * y[lowest]
    square = tilt**2 - jnp.minimum(bottom, 0.0) * rest
    root = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
    further = jnp.where(tilt > 0, -1.0, 1.0) * rest / jnp.where(root > 0, jnp.abs(tilt) + root, 1.0)
    y = jnp.where(reached, y, jnp.where(curved, y.at[lowest].add(further), jnp.inf))
    return jnp.where(start <= 0, 0.0, y)


def _certified(
    values: Array,
    slopes: Array,
    start: Array,
    errors: tuple[Array, Array, Array],
    norm: Array,
    *,
    full: bool,
) -> Array:
    """Return a lower bound on the norm of the shortest y with start + sum (2 slopes y + values y^2) <= 0."""
    size, slope = jnp.max(jnp.abs(values)), jnp.linalg.norm(slopes)
    positive = jnp.where(start > 0, start, 1.0)
    steepness = slope + jnp.sqrt(slope**2 + size * positive)
    order = jnp.where(steepness > 0, positive / jnp.where(steepness > 0, steepness, 1.0), 1.0)
    distance = jax.lax.stop_gradient(jnp.where(jnp.isfinite(norm) & (norm > 0), norm, order))
    # The true margin is at least q - e_0 - 2 e_1 |y| - e_2 |y|^2. As 2 |y| <= t + |y|^2 / t for all
    # t, tight at t = |y|, it is at least q - (e_0 + e_1 t) - (e_1 / t + e_2) |y|^2, with t the
    # distance.
    at_input, gradient, curvature = errors
    lowered = start - (at_input + gradient * distance)
    outside = lowered <= 0
    lowered = jnp.where(outside, 1.0, lowered)
    bend = gradient / distance + curvature
    values = values - bend
    # Directions outside of the eigenvectors have no curvature but that of the errors.
    bottom = jnp.minimum(jnp.min(values), jnp.inf if full else -bend)
    base = jnp.minimum(bottom, 0.0)
    multiplier, step, edge = _path(values, slopes, lowered, base)
    rounding = jnp.finfo(values.dtype).eps * (8 + values.shape[0] ** 0.5)

    def margin(y: Array) -> Array:
        sizes = lowered + jnp.sum(jnp.abs(y) * (2 * jnp.abs(slopes) + jnp.abs(values * y)))
        return (
            lowered
            + jnp.sum(y * (2 * slopes + values * y))
            - rounding * jax.lax.stop_gradient(sizes)
        )

    place = _bisect(lambda place: margin(step(place)) > 0, edge)[0]
    # For any multiplier m the dual value |y|^2 + m q(y) is at most the squared distance: rounding
    # of m does no harm.
    m, y = jax.lax.stop_gradient((multiplier(place), step(place)))
    # The dual value is stationary in y, and in m unless m ends at -1 / bottom with a positive
    # margin.
    value = margin(y)
    end = jax.lax.stop_gradient(jnp.where(base < 0, m**2 * jnp.maximum(value, 0.0), 0.0))
    squared = jnp.sum(y**2) + m * value + end * (bottom - jax.lax.stop_gradient(bottom))
    radius = jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1.0)), 0.0) * (
        1 - rounding
    )
    radius = jnp.where(jnp.isnan(squared), jnp.nan, radius)
    return jnp.where(
        outside, 0.0, jnp.where((base == 0) & (margin(step(edge)) > 0), jnp.inf, radius)
    )


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
    radii, levels = jnp.asarray(radii), jnp.asarray(levels)
    shares = jnp.mean(radii[None] > levels[:, None], 1, dtype=radii.dtype)
    return jnp.where(jnp.any(jnp.isnan(radii)) | jnp.isnan(levels), jnp.nan, shares)
