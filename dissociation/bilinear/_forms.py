"""Bilinear layers as quadratic forms, and their eigenvectors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, fail
from dissociation._core.linalg import product
from dissociation._core.validation import validated
from dissociation.models._bilinear import BilinearLayer, BilinearNetwork

ORDERS = ("magnitude", "positive", "negative")
"""Descending |eigenvalue|, descending eigenvalue, ascending eigenvalue."""

SPACES = ("input", "hidden")
"""Space of the eigenvectors: inputs of the network, or inputs of the layer."""


class Spectrum(eqx.Module):
    """Eigenvalues and eigenvectors of quadratic forms, one per output; a function of one example.

    Attributes:
        values: Eigenvalues in the chosen order, [outputs, components].
        vectors: Orthonormal eigenvectors, [outputs, components, d], or d + 1 with `constant`.
        constant: True if the last coordinate belongs to an appended 1.
        space: Space of the eigenvectors, one of `SPACES`, or None if unknown. Certificates and
            masks need "input".
    """

    values: Float[Array, "outputs components"]
    vectors: Float[Array, "outputs components d"]
    constant: bool = eqx.field(static=True)
    space: str | None = eqx.field(static=True, default=None)

    def __call__(self, x: Float[Array | np.ndarray, " d"]) -> Float[Array, " outputs"]:
        """Return sum_i lambda_i (v_i . x)^2 of every output."""
        examples = jnp.asarray(x)[None]
        return jnp.sum(contributions(self, examples)[0], 1)


@validated(finite=("directions",))
def interaction_tensor(
    model: BilinearNetwork,
    directions: Float[Array | np.ndarray, "outputs o"] | None = None,
    *,
    layer: int = -1,
    space: str = "input",
) -> Float[Array, "outputs d d"]:
    """Return the symmetric matrices of a layer's quadratic forms.

    Along an output direction u the layer is u . ((W z) * (V z)) = z^T B_u z, B_u the symmetric part
    of W^T diag(u) V. After an embedding z = E x the form on inputs is E^T B_u E. Biases and
    residual connections add a coordinate for a constant 1.

    Args:
        model: One network.
        directions: Output directions u of the layer; default: rows of the head, for the last layer.
        layer: Layer index, negative from the end.
        space: "input" (of the network, for the first layer only) or "hidden" (of the layer).

    Returns:
        One matrix per direction; the constant 1 is the last coordinate.

    Raises:
        ValueError: If the layer is gated, does not exist or is not the first for `space="input"`;
            if directions have another width, or are missing for a layer without a head.

    References:
        Pearce et al. (2024), eq. 2.
    """
    compact, lift = compact_forms(model, directions, layer, space)
    full = product(product(lift[None], compact), lift.T[None])
    return 0.5 * (full + full.swapaxes(1, 2))  # symmetric to the last bit


@validated(finite=("directions",))
def decompose(
    model: BilinearNetwork,
    directions: Float[Array | np.ndarray, "outputs o"] | None = None,
    *,
    layer: int = -1,
    space: str = "input",
    by: str = "magnitude",
) -> Spectrum:
    """Return eigenvalues and eigenvectors of a layer's quadratic forms.

    They are computed in the smaller of the layer's two spaces. On a CPU, stacked networks are
    fastest under one `jax.jit` of a `vmap`, with OpenBLAS on one thread (`use_all_cores`).

    Args:
        model: One network; map stacked ones by `equinox.filter_vmap`, or by `bmap` if memory is
            short.
        directions: As in `interaction_tensor`.
        layer: Layer index.
        space: "input" for eigenvectors among inputs of the network, "hidden" among inputs of the
            layer.
        by: Order of the components, one of `ORDERS`.

    Returns:
        The spectrum, with min(inputs, hidden) components and one more with a constant; others have
        eigenvalue zero.

    Raises:
        ValueError: As `interaction_tensor`, or if `by` is unknown.

    References:
        Pearce et al. (2024), section 3.
    """
    check_choice("by", by, ORDERS)
    compact, lift = compact_forms(model, directions, layer, space)
    values, vectors = jnp.linalg.eigh(compact)
    spectrum = Spectrum(values, vectors.swapaxes(1, 2), _has_constant(model, layer), space)
    importances = {"magnitude": jnp.abs(values), "positive": values, "negative": -values}
    # Reordered in the smaller space, as lifted vectors are large.
    spectrum = reorder(spectrum, importances[by])
    vectors = product(spectrum.vectors, lift.T)
    return Spectrum(spectrum.values, vectors, spectrum.constant, space)


def compact_forms(
    model: BilinearNetwork, directions: Array | np.ndarray | None, layer: int, space: str
) -> tuple[Array, Array]:
    """Return forms in the smaller space, and orthonormal columns that lift them to the full space.

    The forms have shape [outputs, r, r], the columns [d, r].
    """
    check_choice("space", space, SPACES)
    model = widened(model)
    index = _checked_index(model, layer, space)
    bilinear = model.layers[index]
    if directions is None:
        if index != len(model.layers) - 1:
            fail("directions", "be given for a layer that the head does not read", "None")
        directions = model.head
    u = jnp.asarray(directions)
    w = bilinear.left
    v = bilinear.right
    if u.shape[1] != w.shape[0]:
        fail("directions", f"have the layer's width ({w.shape[0]})", u.shape[1])

    residual = u
    if space == "input":
        # With E^T = P R and P orthonormal, the non-zero spectrum of E^T B E is that of R B R^T,
        # never larger than the layer.
        lift, root = jnp.linalg.qr(model.embed.T)
        w = product(w, root.T)
        v = product(v, root.T)
        if model.residual:
            residual = product(u, root.T)
    else:
        lift = jnp.eye(w.shape[1], dtype=w.dtype)

    if _has_constant(model, layer):
        b, c = biases_of(bilinear)
        w = jnp.concatenate([w, b[:, None]], 1)
        v = jnp.concatenate([v, c[:, None]], 1)
        lift = jnp.pad(lift, ((0, 1), (0, 1))).at[-1, -1].set(1.0)
    forms = product(w.T[None], u[:, :, None] * v[None])
    if model.residual:
        # A linear term is a product with the constant coordinate.
        forms = forms.at[:, -1, :-1].add(residual)
    return 0.5 * (forms + forms.swapaxes(1, 2)), lift


def _checked_index(model: BilinearNetwork, layer: int, space: str) -> int:
    """Return the index of `layer` from 0; raise unless the layer has quadratic forms on `space`."""
    num_layers = len(model.layers)
    if not -num_layers <= layer < num_layers:
        fail("layer", f"be one of the model's {num_layers}", layer)
    index = layer % num_layers
    gate = model.layers[index].gate
    if gate != "none":
        advice = "A gated layer is not a quadratic form"
        fail("model", "have layers without a gate", f"{gate!r}", advice)
    if space == "input" and index:
        fail("space", "be 'hidden' for every layer but the first", f"'input' for layer {index}")
    return index


def biases_of(layer: BilinearLayer) -> tuple[Array, Array]:
    """Return both biases of a layer, zeros if there are none."""
    zeros = jnp.zeros(layer.left.shape[0], layer.left.dtype)
    b = zeros if layer.left_bias is None else layer.left_bias
    c = zeros if layer.right_bias is None else layer.right_bias
    return b, c


def widened(model: BilinearNetwork) -> BilinearNetwork:
    """Return one network with weights in float32 at least."""
    if model.embed.ndim != 2:
        advice = "Map over members by `equinox.filter_vmap`"
        fail("model", "be one network", f"an embedding of shape {model.embed.shape}", advice)

    def widen(leaf: Array) -> Array:
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))

    return jax.tree.map(widen, model)


def _has_constant(model: BilinearNetwork, layer: int) -> bool:
    return model.residual or model.layers[layer].left_bias is not None


@validated(finite=("importance",))
def reorder(
    spectrum: Spectrum, importance: Float[Array | np.ndarray, "outputs components"]
) -> Spectrum:
    """Return a spectrum with components sorted by descending `importance`."""
    order = jnp.argsort(-jnp.asarray(importance), axis=1, stable=True)
    values = jnp.take_along_axis(spectrum.values, order, 1)
    vectors = jnp.take_along_axis(spectrum.vectors, order[:, :, None], 1)
    return Spectrum(values, vectors, spectrum.constant, spectrum.space)


@validated
def truncate(spectrum: Spectrum, num_components: int) -> Spectrum:
    """Return the spectrum of the leading components of every output: a network of this rank.

    Args:
        spectrum: From `decompose`, in any order.
        num_components: k, from 0 (all logits zero) to all.
    """
    check_single("spectrum", spectrum)
    count = check_count("num_components", num_components, maximum=spectrum.values.shape[1])
    values = spectrum.values[:, :count]
    vectors = spectrum.vectors[:, :count]
    return Spectrum(values, vectors, spectrum.constant, spectrum.space)


def check_single(name: str, spectrum: Spectrum) -> None:
    """Raise `ValueError` if a spectrum is stacked."""
    # The first axis of a stack would silently be taken for outputs.
    if spectrum.values.ndim != 2 or spectrum.vectors.ndim != 3:
        requirement = "be one spectrum, of values [outputs, components]"
        advice = "Map over stacked ones by `equinox.filter_vmap`"
        fail(name, requirement, f"shape {spectrum.values.shape}", advice)


def check_on_inputs(name: str, spectrum: Spectrum) -> None:
    """Raise `ValueError` if the spectrum's space is not "input"."""
    check_single(name, spectrum)
    if spectrum.space != "input":
        advice = 'Pass `space="input"` to `decompose`, or to `Spectrum` if its vectors are among '
        advice += "inputs"
        fail(name, 'be a spectrum with `space="input"`', f"space {spectrum.space!r}", advice)


@validated
def activations(
    spectrum: Spectrum, x: Float[Array | np.ndarray, "n d"]
) -> Float[Array, "n outputs components"]:
    """Return v_i . x of every component.

    x gets a last coordinate 1 if the network has a constant input.
    """
    check_single("spectrum", spectrum)
    width = spectrum.vectors.shape[2] - spectrum.constant
    if x.shape[1] != width:
        fail("x", f"have shape [n, {width}]", x.shape)
    outputs, components, _ = spectrum.vectors.shape
    vectors = spectrum.vectors[:, :, :width].reshape(-1, width)
    products = product(jnp.asarray(x), vectors.T)
    products = products.reshape(-1, outputs, components)
    if not spectrum.constant:
        return products
    return products + spectrum.vectors[None, :, :, width]


def contributions(
    spectrum: Spectrum, x: Float[Array | np.ndarray, "n d"]
) -> Float[Array, "n outputs components"]:
    """Return lambda_i (v_i . x)^2 of every component."""
    return spectrum.values[None] * activations(spectrum, x) ** 2


def mean_contribution(
    spectrum: Spectrum, x: Float[Array | np.ndarray, "n d"]
) -> Float[Array, "outputs components"]:
    """Return the mean of |lambda_i| (v_i . x)^2 over examples, an `importance` for `reorder`."""
    sizes = jnp.abs(contributions(spectrum, x))
    return jnp.mean(sizes, 0)


@validated
def truncated_outputs(
    spectrum: Spectrum, x: Float[Array | np.ndarray, "n d"]
) -> Float[Array, "n components_and_none outputs"]:
    """Return the outputs of the leading 0, 1, ... and of all components.

    Args:
        spectrum: Components in the order to keep them.
        x: Examples.
    """
    sums = jnp.cumsum(contributions(spectrum, x), 2)
    sums = jnp.pad(sums, ((0, 0), (0, 0), (1, 0)))
    return sums.swapaxes(1, 2)


@validated
def adversarial_mask(
    spectrum: Spectrum,
    output: int,
    component: int,
    *,
    against: int = 10,
    norm: float | Float[Array, ""] = 1.0,
) -> Float[Array, " d"]:
    """Return an image that excites one component and no other leading one of any output.

    The image is computed from weights alone: the component's row of the pseudo-inverse of the
    leading eigenvectors, at a given norm.

    Args:
        spectrum: Spectrum of a network without biases.
        output: Output of the component.
        component: Index of the component, below `against`.
        against: Leading components per output that are considered.
        norm: Euclidean norm of the mask.

    Raises:
        ValueError: If an index is out of range, or the spectrum has a constant coordinate or is not
            on inputs.

    References:
        Pearce et al. (2024), section 4.3.
    """
    check_on_inputs("spectrum", spectrum)
    outputs, components, width = spectrum.vectors.shape
    if spectrum.constant:
        requirement = "be of a network without biases or residual connection"
        fail("spectrum", requirement, "one with a constant coordinate")
    check_count("against", against, minimum=1, maximum=components)
    check_count("output", output, maximum=outputs - 1)
    check_count("component", component, maximum=against - 1)
    leading = spectrum.vectors[:, :against].reshape(-1, width)
    mask = jnp.linalg.pinv(leading)[:, output * against + component]
    return mask * (norm / jnp.linalg.norm(mask))
