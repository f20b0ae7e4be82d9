"""Exact robustness of one-layer bilinear networks: the nearest input of another class, in Euclidean distance.

The margin between two classes is a quadratic q, so the nearest point with q <= 0 solves a trust-region problem, without
a duality gap. A certificate lowers the margin by a bound on all that rounding may have done to it
(`_rounding.bound_rounding`, and the evaluation at the input), and takes the dual value |y|^2 + m q(y) of the lowered
margin, which for any multiplier m is no more than the squared distance.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dissociation._core.checks import check_finite, fail, is_traced
from dissociation._core.linalg import finite_part, product
from dissociation._core.results import Result
from dissociation._core.validation import validated
from dissociation.bilinear._forms import Spectrum, biases_of, check_on_inputs, compact_forms, widened
from dissociation.bilinear._rounding import Factors, bound_rounding
from dissociation.models._bilinear import BilinearNetwork

BISECTIONS = 60


class Margins(Result):
    """Every pair of classes' margin q(x) = logit_first - logit_second, in its own eigenbasis.

    Attributes:
        values: Eigenvalues of the quadratic part, [pairs, r].
        directions: Orthonormal eigenvectors among inputs, [pairs, r, d].
        linear: Half of the linear part along them, [pairs, r].
        offset: [pairs].
        rounding: Bounds on the errors of the quadratic part, of half the linear part and of the constant, [pairs, 3].
        table: For every ordered pair of classes its number, [classes, classes]; the diagonal is unused.
    """

    values: Float[Array, "pairs r"]
    directions: Float[Array, "pairs r d"]
    linear: Float[Array, "pairs r"]
    offset: Float[Array, " pairs"]
    rounding: Float[Array, "pairs 3"]
    table: Int[Array, "classes classes"]


class DistanceCertificate(Result):
    """Distance from an input to another class.

    Attributes:
        radius: Certified: no input of another class is nearer. 0 if the input is misclassified, or may be within
            rounding; infinite if there is no other class; NaN if a logit is, or a traced label is no class.
        step: To the nearest input of another class as far as it could be computed, [d]; zero where there is none.
        rival: The class met there.
        radii: Certified distance to the boundary with every class, infinite for the label itself: [classes].
        allowance: By how much `radius` falls short of the norm of `step`: what rounding may have added to that.
            A constant to derivatives; infinite if a rival can only not be ruled out.
    """

    radius: Float[Array, ""]
    step: Float[Array, " d"]
    rival: Int[Array, ""]
    radii: Float[Array, " classes"]
    allowance: Float[Array, ""]


@validated
def margins(source: BilinearNetwork | Spectrum) -> Margins:
    """The margins between all classes, one eigendecomposition for each pair.

    Args:
        source: A network of one layer, or a (truncated) spectrum with `space="input"`. Its numbers are taken as exact.

    Returns:
        The margins, for `certified_radius` of many inputs.

    Raises:
        ValueError: If the network has several layers or a gate, the spectrum is in another space or in one that is not
            given, or there is one class only.
    """
    if isinstance(source, Spectrum):
        check_on_inputs("source", source, known=True)
        classes, make = source.values.shape[0], _from_components(source)
    else:
        source = widened(source)
        classes, make = source.head.shape[0], _from_network(source)
    if classes < 2:
        fail("source", "have at least two classes", classes)
    first, second = np.triu_indices(classes, 1)
    table = np.zeros((classes, classes), np.int32)
    table[first, second] = table[second, first] = np.arange(len(first))
    pairs = (jnp.asarray(first), jnp.asarray(second))
    values, directions, linear, offset, rounding = jax.lax.map(lambda pair: make(*pair), pairs)
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
    left_size, right_size = (jnp.sqrt(product(weights**2, lengths)[:, 0]) for weights in (layer.left, layer.right))

    def make(first: Array, second: Array) -> tuple[Array, ...]:
        weights = model.head[first] - model.head[second]
        size_of = jnp.abs(model.head[first]) + jnp.abs(model.head[second])
        linear = linear_size = jnp.zeros(model.embed.shape[1], model.embed.dtype)
        if model.residual:
            linear = 0.5 * product(weights[None], model.embed)[0]
            linear_size = 0.5 * product(size_of[None], jnp.abs(model.embed))[0]
        factors = Factors(left, right, *biases, weights, linear, left_size, right_size, size_of, linear_size)
        return _in_eigenbasis(forms[first] - forms[second], size, lift, factors)

    return make


def _from_components(spectrum: Spectrum) -> Callable[[Array, Array], tuple[Array, ...]]:
    width = spectrum.vectors.shape[2] - spectrum.constant

    def make(first: Array, second: Array) -> tuple[Array, ...]:
        rows = jnp.concatenate([spectrum.vectors[first], spectrum.vectors[second]])
        weights = jnp.concatenate([spectrum.values[first], -spectrum.values[second]])
        lift, root = jnp.linalg.qr(rows[:, :width].T)
        inner = jnp.concatenate([root, rows[:, width:].T])  # the constant coordinate is its own
        bias = rows[:, width] if spectrum.constant else jnp.zeros_like(weights)
        none, size = jnp.zeros(width, rows.dtype), jnp.zeros_like(weights)
        factors = Factors(
            rows[:, :width], rows[:, :width], bias, bias, weights, none, size, size, jnp.abs(weights), none
        )
        return _in_eigenbasis(product(inner * weights[None], inner.T), root.shape[0], lift, factors)

    return make


def _in_eigenbasis(form: Array, size: int, lift: Array, factors: Factors) -> tuple[Array, ...]:
    """Return a form on `size` coordinates, or one more for a constant, in its eigenbasis; `lift`: [d, size]."""
    form, undefined = finite_part(form)
    values, vectors = jnp.linalg.eigh(form[:size, :size])
    zero = jnp.zeros(size, form.dtype)
    slopes, offset = (form[:size, size], form[size, size]) if form.shape[0] > size else (zero, zero[0])
    directions, linear = product(lift, vectors).T, product(vectors.T, slopes[:, None])[:, 0]
    return values + undefined, directions, linear, offset, bound_rounding(factors, values, directions, linear)


@validated
def certified_radius(
    source: Margins, x: Float[Array | np.ndarray, " d"], label: int | Int[Array | np.ndarray, ""]
) -> DistanceCertificate:
    """The largest ball around an input in which the class stays, and the point where it ends.

    Args:
        source: From `margins`.
        x: One input, finite.
        label: Its class.

    Returns:
        The certificate, for the network in exact arithmetic. The allowance is large where numbers far above the margin
        cancel in the logits, and where the distance hangs on an eigenvalue near zero: float64 has more to show there.

    Raises:
        ValueError: If x has another width or is not finite, or the label is no class.

    References:
        Conn, Gould and Toint (2000), Trust-region methods, chapter 7; Boyd and Vandenberghe (2004), appendix B.
    """
    classes = source.table.shape[0]
    if np.shape(x) != (source.directions.shape[2],):
        fail("x", f"have shape [{source.directions.shape[2]}]", np.shape(x))
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
    along = product(source.directions.reshape(-1, image.shape[0]), image[:, None]).reshape(source.values.shape)
    values, linear, along = sign * source.values[rows], sign * source.linear[rows], along[rows]
    slopes = values * along + linear
    margin = jnp.sum(along * (slopes + linear), 1) + sign[:, 0] * source.offset[rows]
    errors = _errors(source, image, rows, along, values, linear)
    # The label's own margin is zero everywhere, where a step has no derivative: another stands in.
    same = rivals == label
    steps = jax.vmap(_nearest)(values, jnp.where(same[:, None], 1.0, slopes), jnp.where(same, 1.0, margin), errors[2])
    lengths = jnp.where(same, jnp.inf, jnp.linalg.norm(steps, axis=1))
    full = source.values.shape[1] == image.shape[0]
    certified = jax.vmap(lambda *parts: _certified(*parts, full=full))(values, slopes, margin, errors, lengths)
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
    """Return bounds on the errors of margins at an input, of half their gradients there, and of their curvature."""
    along, values, linear, length = jax.lax.stop_gradient((along, values, linear, jnp.linalg.norm(image)))
    eps = jnp.finfo(values.dtype).eps
    quadratic, slope, constant = jax.lax.stop_gradient(source.rounding[rows]).T
    # Of coordinates along eigenvectors, sums over d products, and of sums over r terms.
    coordinate = eps * image.shape[0] ** 0.5 * length
    sums = eps * (3 + values.shape[1] ** 0.5)
    sizes = jnp.abs(values * along) + jnp.abs(linear)
    at_input = quadratic * length**2 + 2 * slope * length + constant
    at_input += 2 * coordinate * jnp.linalg.norm(sizes, axis=1) + sums * (
        2 * jnp.sum(jnp.abs(along) * sizes, 1) + jnp.abs(source.offset[rows])
    )
    largest = jnp.max(jnp.abs(values), 1)
    gradient = quadratic * length + slope + largest * coordinate + eps * jnp.linalg.norm(sizes, axis=1)
    return at_input, gradient, quadratic


def _path(values: Array, slopes: Array, start: Array, base: Array) -> tuple[Callable, Callable, Array]:
    """Return the multiplier and the step at a place, and the ends of the places; multipliers up to 1 / |base|."""
    # The root lies at 1 / m near the curvature, or near slope^2 / start where the margin is all but linear.
    limits = jnp.finfo(values.dtype)
    scale = jnp.where(base < 0, -base, jnp.max(jnp.abs(values)))
    unit = jnp.maximum(scale, jnp.sum(slopes**2) / jnp.maximum(start, limits.tiny))
    unit = jnp.clip(unit, limits.tiny**0.5, limits.max)

    # m = (1 - w) / (w unit - (1 - w) base): from 0 to its largest, fine at both ends. No term of 1 + m a is negative,
    # so nothing cancels.
    def multiplier(place: Array) -> Array:
        return jax.nn.sigmoid(place) / (jax.nn.sigmoid(-place) * unit - jax.nn.sigmoid(place) * base)

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
    """Return the shortest y with q = start + sum (2 slopes y + values y^2) <= 0; infinite if there is none.

    With eigenvalues a_i and slopes g_i, y_i = -m g_i / (1 + m a_i), 1 + m min(a) >= 0, where q falls in the multiplier
    m, whose root is found by bisection. In the hard case q stays positive up to the largest m; the rest of the way is a
    step along the eigenvector of min(a). A lowest value that is negative within `doubt` counts as zero.
    """
    lowest = jnp.argmin(values)
    bottom = values[lowest]
    curved = bottom < -doubt
    _, step, edge = _path(values, slopes, start, jnp.where(curved, bottom, 0.0))

    def margin(y: Array) -> Array:
        return start + jnp.sum(y * (2 * slopes + values * y))

    place = _bisect(lambda place: margin(step(place)) > 0, edge)[1]
    reached = margin(step(edge)) <= 0
    # The root's derivative is that of one step of Newton's method.
    value, fall = jax.jvp(lambda place: margin(step(place)), (place,), (jnp.ones_like(place),))
    fall = jax.lax.stop_gradient(jnp.where(reached & (fall < 0), fall, -jnp.inf))
    y = step(place - (value - jax.lax.stop_gradient(value)) / fall)
    # The hard case: the rest of the way along the lowest eigenvector, to the nearer of the two crossings.
    rest, tilt = jnp.maximum(margin(y), 0.0), slopes[lowest] + bottom * y[lowest]
    square = tilt**2 - jnp.minimum(bottom, 0.0) * rest
    root = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
    further = jnp.where(tilt > 0, -1.0, 1.0) * rest / jnp.where(root > 0, jnp.abs(tilt) + root, 1.0)
    y = jnp.where(reached, y, jnp.where(curved, y.at[lowest].add(further), jnp.inf))
    return jnp.where(start <= 0, 0.0, y)


def _certified(
    values: Array, slopes: Array, start: Array, errors: tuple[Array, Array, Array], norm: Array, *, full: bool
) -> Array:
    """Return a lower bound on the norm of the shortest y with start + sum (2 slopes y + values y^2) <= 0.

    The true margin is at least the one given, minus `errors` at the input, in the slope and in the curvature e:

        q - e_0 - 2 e_1 |y| - e_2 |y|^2 >= q - (e_0 + e_1 t) - (e_1 / t + e_2) |y|^2     for any t > 0,

    taken at the distance `norm`, or of its order. Unless the eigenvectors are `full`, some directions have no other
    curvature than the last term.
    """
    size, slope = jnp.max(jnp.abs(values)), jnp.linalg.norm(slopes)
    positive = jnp.where(start > 0, start, 1.0)
    steepness = slope + jnp.sqrt(slope**2 + size * positive)
    order = jnp.where(steepness > 0, positive / jnp.where(steepness > 0, steepness, 1.0), 1.0)
    distance = jax.lax.stop_gradient(jnp.where(jnp.isfinite(norm) & (norm > 0), norm, order))
    at_input, gradient, curvature = errors
    lowered = start - (at_input + gradient * distance)
    outside = lowered <= 0
    lowered = jnp.where(outside, 1.0, lowered)
    bend = gradient / distance + curvature
    values = values - bend
    bottom = jnp.minimum(jnp.min(values), jnp.inf if full else -bend)
    base = jnp.minimum(bottom, 0.0)
    multiplier, step, edge = _path(values, slopes, lowered, base)
    rounding = jnp.finfo(values.dtype).eps * (8 + values.shape[0] ** 0.5)

    def margin(y: Array) -> Array:
        sizes = lowered + jnp.sum(jnp.abs(y) * (2 * jnp.abs(slopes) + jnp.abs(values * y)))
        return lowered + jnp.sum(y * (2 * slopes + values * y)) - rounding * jax.lax.stop_gradient(sizes)

    place = _bisect(lambda place: margin(step(place)) > 0, edge)[0]
    m, y = jax.lax.stop_gradient((multiplier(place), step(place)))
    # The dual value is stationary in y, and in m too unless that ends at -1 / bottom with the margin still positive.
    value = margin(y)
    end = jax.lax.stop_gradient(jnp.where(base < 0, m**2 * jnp.maximum(value, 0.0), 0.0))
    squared = jnp.sum(y**2) + m * value + end * (bottom - jax.lax.stop_gradient(bottom))
    radius = jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1.0)), 0.0) * (1 - rounding)
    radius = jnp.where(jnp.isnan(squared), jnp.nan, radius)
    return jnp.where(outside, 0.0, jnp.where((base == 0) & (margin(step(edge)) > 0), jnp.inf, radius))


@validated
def certified_accuracy(
    radii: Float[Array | np.ndarray, " n"], levels: Float[Array | np.ndarray, " k"]
) -> Float[Array, " k"]:
    """Share of inputs that no perturbation of a given norm can misclassify.

    Args:
        radii: `DistanceCertificate.radius` of every input, 0 for misclassified ones.
        levels: Norms.

    Returns:
        Falling numbers from 0 to 1; NaN if a radius or the level is.
    """
    radii, levels = jnp.asarray(radii), jnp.asarray(levels)
    shares = jnp.mean(radii[None] > levels[:, None], 1, dtype=radii.dtype)
    return jnp.where(jnp.any(jnp.isnan(radii)) | jnp.isnan(levels), jnp.nan, shares)
