"""Exact robustness of one-layer bilinear networks: the nearest input of another class, in Euclidean distance.

The margin between two classes is a quadratic q of the input, so the nearest point with q <= 0 solves a trust-region
problem. In the eigenbasis of its matrix, with eigenvalues a_i, slopes g_i and q_0 at the input, a step y has the length
|y| and

    q(y) = q_0 + sum_i (2 g_i y_i + a_i y_i^2),      y_i = -m g_i / (1 + m a_i),      1 + m min(a) >= 0,

where q falls in the multiplier m, whose root is found by bisection. In the hard case q stays positive up to the
largest m; the rest of the way is a step along the eigenvector of min(a). One quadratic constraint leaves no duality
gap, so this is the global optimum.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dissociation.checks import fail
from dissociation.linalg import product
from dissociation.models.bilinear import BilinearNetwork
from dissociation.spectral.forms import Spectrum, compact_forms

BISECTIONS = 60


class Margins(eqx.Module):
    """Every pair of classes' margin q(x) = logit_first - logit_second, in its own eigenbasis.

    Attributes:
        values: Eigenvalues of the quadratic part, [pairs, r].
        directions: Orthonormal eigenvectors among inputs, [pairs, r, d].
        linear: Half of the linear part along them, [pairs, r].
        offset: [pairs].
        table: For every ordered pair of classes its number, [classes, classes]; the diagonal is unused.
    """

    values: Float[Array, "pairs r"]
    directions: Float[Array, "pairs r d"]
    linear: Float[Array, "pairs r"]
    offset: Float[Array, " pairs"]
    table: Int[Array, "classes classes"]


class Certificate(eqx.Module):
    """How far an input is from another class.

    Attributes:
        radius: Distance to the nearest input of another class; 0 if the input is misclassified, infinite if there is
            none.
        step: To that input, [d]; zero where the radius is 0 or infinite.
        rival: The class met there.
        radii: Distance to the boundary with every class, infinite for the label itself: [classes].
    """

    radius: Float[Array, ""]
    step: Float[Array, " d"]
    rival: Int[Array, ""]
    radii: Float[Array, " classes"]


def margins(source: BilinearNetwork | Spectrum) -> Margins:
    """The margins between all classes, one eigendecomposition for each pair.

    Args:
        source: A network of one layer, or a (truncated) spectrum on inputs.

    Returns:
        The margins, for `certified_radius` of many inputs.

    Raises:
        ValueError: If the network has several layers or a gate, or there is one class only.
    """
    classes = source.values.shape[0] if isinstance(source, Spectrum) else source.head.shape[0]
    if classes < 2:
        fail("source", "have at least two classes", classes)
    first, second = np.triu_indices(classes, 1)
    table = np.zeros((classes, classes), np.int32)
    table[first, second] = table[second, first] = np.arange(len(first))
    if isinstance(source, Spectrum):
        parts = jax.lax.map(lambda pair: _from_components(source, *pair), (jnp.asarray(first), jnp.asarray(second)))
    else:
        if len(source.layers) != 1:
            fail("source", "have one layer: more make no quadratic form", len(source.layers))
        forms, lift = compact_forms(source, None, 0, "input")
        constant = forms.shape[1] > min(source.embed.shape)
        size = forms.shape[1] - constant
        lift = lift[: source.embed.shape[1], :size]
        parts = jax.lax.map(
            lambda pair: _in_eigenbasis(forms[pair[0]] - forms[pair[1]], size, lift),
            (jnp.asarray(first), jnp.asarray(second)),
        )
    values, directions, linear, offset = parts
    return Margins(values, directions, linear, offset, jnp.asarray(table))


def _in_eigenbasis(form: Array, size: int, lift: Array) -> tuple[Array, Array, Array, Array]:
    """Of a form on r coordinates, and the constant where there is one more than `size`; `lift` is [d, r]."""
    values, vectors = jnp.linalg.eigh(form[:size, :size])
    zero = jnp.zeros(size, form.dtype)
    slopes, offset = (form[:size, size], form[size, size]) if form.shape[0] > size else (zero, zero[0])
    return values, product(lift, vectors).T, product(vectors.T, slopes[:, None])[:, 0], offset


def _from_components(spectrum: Spectrum, first: Array, second: Array) -> tuple[Array, Array, Array, Array]:
    width = spectrum.vectors.shape[2] - spectrum.constant
    rows = jnp.concatenate([spectrum.vectors[first], spectrum.vectors[second]])
    weights = jnp.concatenate([spectrum.values[first], -spectrum.values[second]])
    lift, root = jnp.linalg.qr(rows[:, :width].T)
    inner = jnp.concatenate([root, rows[:, width:].T])  # the constant coordinate is its own
    form = product(inner * weights[None], inner.T)
    return _in_eigenbasis(form, root.shape[0], lift)


def certified_radius(
    source: Margins, x: Float[Array | np.ndarray, " d"], label: int | Int[Array | np.ndarray, ""]
) -> Certificate:
    """The largest ball around an input in which the class stays, and the point where it ends.

    Args:
        source: From `margins`.
        x: One input.
        label: Its class.

    Returns:
        The certificate. In float32 a radius is good to about the rounding of the logits over the margin's slope.

    Raises:
        ValueError: If x has another width.

    References:
        Conn, Gould and Toint (2000), Trust-region methods, chapter 7; Boyd and Vandenberghe (2004), appendix B.
    """
    if np.shape(x) != (source.directions.shape[2],):
        fail("x", f"have shape [{source.directions.shape[2]}]", np.shape(x))
    image, label = jnp.asarray(x), jnp.asarray(label)
    rivals = jnp.arange(source.table.shape[0])
    own, sign = source.table[label], jnp.where(label < rivals, 1.0, -1.0).astype(image.dtype)
    along = product(source.directions.reshape(-1, image.shape[0]), image[:, None]).reshape(source.values.shape)
    slopes = source.values * along + source.linear
    margin = jnp.sum(along * (slopes + source.linear), 1) + source.offset
    solve = jax.vmap(_nearest)
    steps = solve(sign[:, None] * source.values[own], sign[:, None] * slopes[own], sign * margin[own])
    radii = jnp.where(rivals == label, jnp.inf, jnp.linalg.norm(steps, axis=1))
    nearest = jnp.argmin(radii)
    radius, step = radii[nearest], steps[nearest]
    step = jnp.where(jnp.isfinite(radius), product(step[None], source.directions[own[nearest]])[0], 0.0)
    return Certificate(radius, step, nearest, radii)


def _nearest(values: Array, slopes: Array, start: Array) -> Array:
    """The shortest y with start + sum (2 slopes y + values y^2) <= 0; infinite if there is none."""
    lowest = jnp.argmin(values)
    bottom, scale = values[lowest], jnp.max(jnp.abs(values))
    curved = bottom < -values.shape[0] * jnp.finfo(values.dtype).eps * scale
    base = jnp.where(curved, bottom, 0.0)
    # The root lies at 1 / m near the curvature, or near slope^2 / start where the margin is all but linear.
    limits = jnp.finfo(values.dtype)
    unit = jnp.maximum(jnp.where(curved, -bottom, scale), jnp.sum(slopes**2) / jnp.maximum(start, limits.tiny))
    unit = jnp.clip(unit, limits.tiny**0.5, limits.max)

    def step(place: Array) -> Array:
        # m = (1 - w) / (w unit - (1 - w) base): from 0 to its largest, fine at both ends. No term of 1 + m a is
        # negative, so nothing cancels.
        w, rest = jax.nn.sigmoid(-place), jax.nn.sigmoid(place)
        return -rest * slopes / (w * unit + rest * jnp.maximum(values - base, 0.0))

    def margin(y: Array) -> Array:
        return start + jnp.sum(y * (2 * slopes + values * y))

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends  # the margin is positive at `low`
        middle = 0.5 * (low + high)
        positive = margin(step(middle)) > 0
        return jnp.where(positive, middle, low), jnp.where(positive, high, middle)

    edge = jnp.asarray(-2 * np.log(float(jnp.finfo(values.dtype).eps)), values.dtype)
    _, high = jax.lax.fori_loop(0, BISECTIONS, halve, (-edge, edge))
    reached = margin(step(edge)) <= 0
    y = step(high)
    # The hard case: the rest of the way along the lowest eigenvector, to the nearer of the two crossings.
    rest, tilt = jnp.maximum(margin(y), 0.0), slopes[lowest] + bottom * y[lowest]
    root = jnp.sqrt(tilt**2 - jnp.minimum(bottom, 0.0) * rest)
    further = jnp.where(tilt > 0, -1.0, 1.0) * rest / jnp.where(root > 0, jnp.abs(tilt) + root, 1.0)
    hard = y.at[lowest].add(further)
    y = jnp.where(reached, y, jnp.where(curved, hard, jnp.inf))
    return jnp.where(start > 0, y, 0.0)


def certified_accuracy(
    radii: Float[Array | np.ndarray, " n"], levels: Float[Array | np.ndarray, " k"]
) -> Float[Array, " k"]:
    """Share of inputs that no perturbation of a given norm can misclassify.

    Args:
        radii: `Certificate.radius` of every input, 0 for misclassified ones.
        levels: Norms.

    Returns:
        Falling numbers from 0 to 1.
    """
    return jnp.mean(jnp.asarray(radii)[None] > jnp.asarray(levels)[:, None], 1)
