"""The rewrites of `neurons` and `symmetry` on a whole `eqx.nn.MLP`, of any depth, with biases or without.

Each takes one model and returns one model; stacked members are mapped over with `bmap` or `eqx.filter_vmap`. Hidden
layers are counted as lists are: `layer=0` is the first, between `model.layers[0]` and `model.layers[1]`, and `layer=-1`
the last.
"""

import copy
from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Real

from dissociation.checks import fail
from dissociation.types import PRNGKey, Scalar
from dissociation.validation import validated
from dissociation.weights.neurons import (
    add_phantom_zero_neurons,
    add_random_zero_neurons,
    duplicate_neurons,
    scale_neurons,
)
from dissociation.weights.symmetry import permute_neurons, perturb_in_null_space

Rewrite = Callable[[Array, Array], tuple[Array, Array]]
Module = TypeVar("Module", bound=eqx.Module)


@validated
def rewrite_mlp(model: eqx.nn.MLP, rewrite: Rewrite, *, layer: int = -1) -> eqx.nn.MLP:
    """Applies a rewrite of matrices to one hidden layer of a perceptron.

    Args:
        model: The perceptron.
        rewrite: `(w_in [hidden, inputs], w_out [outputs, hidden]) -> (w_in, w_out)`, with as many hidden neurons as it
            likes. If the layer has a bias, it is the last column of `w_in`: the weight of an input that is always 1.
        layer: Which hidden layer.

    Returns:
        The model with the two layers around the hidden one replaced. Their numbers of features follow; `width_size`
        does where all hidden layers are of one width again, and otherwise stays what it was.

    Raises:
        TypeError: If `model` is no `eqx.nn.MLP`, or its layers are no `eqx.nn.Linear`.
        ValueError: If there is no such hidden layer, the model is stacked, scans over its layers, or has parameters in
            its activation, which belong to single neurons.

    Example:
        >>> import equinox as eqx, jax
        >>> model = eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(0))
        >>> rewrite_mlp(model, lambda w_in, w_out: (w_in[::-1], w_out[:, ::-1])).layers[1].weight.shape
        (4, 4)
    """
    index = _hidden_index(model, layer)
    incoming, outgoing = model.layers[index], model.layers[index + 1]
    w_in = jnp.asarray(incoming.weight)
    if incoming.bias is not None:
        w_in = jnp.concatenate([w_in, incoming.bias[:, None]], axis=1)
    w_in, w_out = rewrite(w_in, jnp.asarray(outgoing.weight))
    hidden = w_in.shape[0]
    bias = None
    if incoming.bias is not None:
        w_in, bias = w_in[:, :-1], w_in[:, -1]

    layers = list(model.layers)
    layers[index] = _replaced(incoming, weight=w_in, bias=bias, out_features=hidden)
    layers[index + 1] = _replaced(outgoing, weight=w_out, in_features=hidden)
    widths = {linear.weight.shape[0] for linear in layers[:-1]}
    width = widths.pop() if len(widths) == 1 else model.width_size
    return _replaced(model, layers=tuple(layers), width_size=width)


@validated
def scale_mlp(
    model: eqx.nn.MLP,
    scale_factor: Real[ArrayLike, "..."] = 0.1,
    *,
    layer: int = -1,
    assume_homogeneous: bool = False,
) -> eqx.nn.MLP:
    """Scales the incoming weights and the bias of a hidden layer by a > 0 and its outgoing weights by 1 / a.

    Args:
        model: A perceptron whose activation is positively homogeneous, which is tried out on numbers of either sign and
            of sizes from 1e-15 to 1e15.
        scale_factor: The factor a, or a vector of one per hidden neuron. May be traced.
        layer: Which hidden layer.
        assume_homogeneous: Whether to leave out the trial of the activation.

    Returns:
        A model of the same function.

    Raises:
        TypeError: As `rewrite_mlp`.
        ValueError: As `rewrite_mlp` and `scale_neurons`, and if the activation is not positively homogeneous.
    """
    _hidden_index(model, layer)
    if not assume_homogeneous and not _is_homogeneous(model.activation):
        fail(
            "model",
            "have a positively homogeneous activation, f(a x) = a f(x), for scaling to keep its function",
            model.activation,
            "ReLU, leaky ReLU and the identity are; pass assume_homogeneous=True to scale all the same",
        )
    return rewrite_mlp(model, lambda w_in, w_out: scale_neurons(w_in, w_out, scale_factor), layer=layer)


@validated
def duplicate_mlp(model: eqx.nn.MLP, duplicate_multiplier: float | int = 1.2, *, layer: int = -1) -> eqx.nn.MLP:
    """Repeats the neurons of a hidden layer, biases with them, and shares out their outgoing weights.

    Args:
        model: The perceptron.
        duplicate_multiplier: See `duplicate_neurons`. A plain number: it sets shapes.
        layer: Which hidden layer.

    Returns:
        A wider model of the same function.

    Raises:
        TypeError: As `rewrite_mlp` and `duplicate_neurons`.
        ValueError: As `rewrite_mlp` and `duplicate_neurons`.
    """
    return rewrite_mlp(model, lambda w_in, w_out: duplicate_neurons(w_in, w_out, duplicate_multiplier), layer=layer)


@validated
def add_random_zero_to_mlp(
    model: eqx.nn.MLP,
    num_zero_groups: int = 3,
    neurons_per_group: int = 4,
    *,
    key: PRNGKey,
    layer: int = -1,
    incoming_std: Scalar = 1.0,
    outgoing_std: Scalar | None = None,
) -> eqx.nn.MLP:
    """Appends groups of neurons that cancel out to a hidden layer; their biases are drawn like incoming weights.

    Args:
        model: The perceptron.
        num_zero_groups: How many groups.
        neurons_per_group: How many neurons in each.
        key: A PRNG key of either kind.
        layer: Which hidden layer.
        incoming_std: Standard deviation of the incoming weights and biases.
        outgoing_std: Standard deviation of the outgoing weights of groups of several; None is that of the layer.

    Returns:
        A wider model of the same function.

    Raises:
        TypeError: As `rewrite_mlp` and `add_random_zero_neurons`.
        ValueError: As `rewrite_mlp` and `add_random_zero_neurons`.
    """

    def rewrite(w_in: Array, w_out: Array) -> tuple[Array, Array]:
        stds = {"incoming_std": incoming_std, "outgoing_std": outgoing_std}
        return add_random_zero_neurons(w_in, w_out, num_zero_groups, neurons_per_group, key=key, **stds)

    return rewrite_mlp(model, rewrite, layer=layer)


@validated(finite=("inputs", "pattern"), empty=("pattern",))
def add_phantom_zero_to_mlp(
    model: eqx.nn.MLP,
    inputs: Float[Array | np.ndarray, "batch ..."],
    pattern: Float[Array | np.ndarray, "batch new"],
    *,
    layer: int = -1,
    rtol: Scalar | None = None,
) -> eqx.nn.MLP:
    """Appends neurons without effect to a hidden layer, whose preactivations show a pattern on inputs of the model.

    Args:
        model: The perceptron.
        inputs: Examples as the model takes them; they are carried forward to the layer.
        pattern: The preactivations wanted of the new neurons, one column each.
        layer: Which hidden layer.
        rtol: See `add_phantom_zero_neurons`.

    Returns:
        A wider model of the same function. Where the layer has biases, those of the new neurons serve the pattern too.

    Raises:
        TypeError: As `rewrite_mlp`.
        ValueError: As `rewrite_mlp` and `add_phantom_zero_neurons`.
    """
    index = _hidden_index(model, layer)
    seen = jnp.asarray(inputs)
    features = model.layers[0].in_features
    if features != "scalar" and seen.shape[1:] != (features,):
        fail("inputs", f"be examples of shape ({features},), as the model takes them", f"shape {seen.shape}")
    with jax.default_matmul_precision("highest"):
        for linear in model.layers[:index]:
            seen = jax.vmap(jax.vmap(model.activation))(jax.vmap(linear)(seen))
    seen = seen.reshape(len(seen), -1)
    if model.layers[index].bias is not None:
        seen = jnp.concatenate([seen, jnp.ones_like(seen, shape=(len(seen), 1))], axis=1)
    return rewrite_mlp(
        model, lambda w_in, w_out: add_phantom_zero_neurons(w_in, w_out, seen, pattern, rtol=rtol), layer=layer
    )


@validated
def permute_mlp(
    model: eqx.nn.MLP,
    permutation: Int[Array | np.ndarray, " hidden"] | None = None,
    *,
    key: PRNGKey | None = None,
    layer: int = -1,
) -> eqx.nn.MLP:
    """Puts the neurons of a hidden layer in another order.

    Args:
        model: The perceptron.
        permutation: Neuron `permutation[i]` comes to place i.
        key: Draws the permutation where none is given.
        layer: Which hidden layer.

    Returns:
        A model of the same function.

    Raises:
        TypeError: As `rewrite_mlp`.
        ValueError: As `rewrite_mlp` and `permute_neurons`.
    """
    return rewrite_mlp(model, lambda w_in, w_out: permute_neurons(w_in, w_out, permutation, key=key), layer=layer)


@validated(empty=("basis",))
def perturb_mlp_in_null_space(
    model: eqx.nn.MLP,
    basis: Float[Array | np.ndarray, "null ..."],
    scale: Scalar,
    *,
    key: PRNGKey,
) -> eqx.nn.MLP:
    """Adds Gaussian noise to the first layer, in input directions that no sample has.

    Args:
        model: The perceptron, of any depth and activation.
        basis: Orthonormal directions, from `null_basis` on the samples whose outputs are to stay.
        scale: Standard deviation of the noise along each direction. May be traced.
        key: A PRNG key of either kind.

    Returns:
        A model of the same function on those samples.

    Raises:
        TypeError: If `model` is no `eqx.nn.MLP`, or its layers are no `eqx.nn.Linear`.
        ValueError: If the model is stacked, or as `perturb_in_null_space`.
    """
    _check_mlp(model)
    _check_linear(model, 0)
    weight = perturb_in_null_space(model.layers[0].weight, basis, scale, key=key)
    return eqx.tree_at(lambda m: m.layers[0].weight, model, weight)


def _check_linear(model: eqx.nn.MLP, index: int) -> None:
    """Raises unless layer `index` is a linear layer of one member."""
    linear = model.layers[index]
    if not isinstance(linear, eqx.nn.Linear):
        raise TypeError(f"`model.layers[{index}]` must be an eqx.nn.Linear, got {type(linear).__name__}.")
    if linear.weight.ndim != 2:
        advice = "Map over stacked members with bmap or eqx.filter_vmap"
        fail("model", f"be one member, with layers[{index}].weight [outputs, inputs]", linear.weight.shape, advice)


def _check_mlp(model: eqx.nn.MLP) -> None:
    """Raises unless `model` is a perceptron."""
    if not isinstance(model, eqx.nn.MLP):
        raise TypeError(f"`model` must be an eqx.nn.MLP, got {type(model).__name__}.")


def _hidden_index(model: eqx.nn.MLP, layer: int) -> int:
    """The hidden layer that `layer` names, counted from the first, if it can be rewritten."""
    _check_mlp(model)
    if model.scan:
        fail("model", "keep its layers apart, and not scan over them", "scan=True", "Build it with scan=False")
    depth = len(model.layers) - 1
    if not -depth <= layer < depth:
        fail("layer", f"name one of the {depth} hidden layers", layer)
    index = layer % depth
    _check_linear(model, index)
    _check_linear(model, index + 1)
    if any(eqx.is_array(leaf) for leaf in jax.tree.leaves(model.activation)):
        fail("model", "have an activation without parameters (they belong to single neurons)", model.activation)
    return index


def _is_homogeneous(activation: Callable[[Array], Array]) -> bool:
    """Whether f(a) = a f(1) and f(-a) = a f(-1) for sizes a from 1e-15 to 1e15, and f(0) = 0.

    A positively homogeneous function of one number is no more than its values at 1 and -1.
    """
    # Known numbers, also where a caller is being traced.
    with jax.ensure_compile_time_eval():
        sizes = jnp.asarray(np.concatenate([[0.0], 1.7 * 10.0 ** np.arange(-15, 16)]), float)
        values = jax.vmap(activation)(jnp.concatenate([sizes, -sizes]))
        ends = jax.vmap(activation)(jnp.asarray([1.0, -1.0]))
        wanted = jnp.concatenate([sizes * ends[0], sizes * ends[1]])
        return bool(jnp.allclose(values, wanted, rtol=1e-5, atol=0))


def _replaced(module: Module, **fields: object) -> Module:
    """A copy with other fields, static ones too, which `eqx.tree_at` does not reach."""
    new = copy.copy(module)
    for name, value in fields.items():
        object.__setattr__(new, name, value)
    return new
