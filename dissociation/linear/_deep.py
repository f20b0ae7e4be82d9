"""Deep linear networks of least norm."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dissociation._core.checks import check_count, fail
from dissociation._core.linalg import product
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.linear._families import Residual, check_hidden, check_single, polar
from dissociation.linear._networks import LinearNetwork
from dissociation.linear._tasks import Task


@validated
def least_norm(task: Task, depth: int) -> Float[Array, ""]:
    """Return the least sum |W_i|^2 of a network of `depth` layers with map W*: depth * sum_k s_k^(2 / depth).

    References:
        Shang et al. (2020), Unified scalable equivalent formulations for Schatten quasi-norms.
    """
    check_single(task)
    check_count("depth", depth, minimum=1)
    return depth * jnp.sum(task.map_values ** (2 / depth))


@validated
def least_norm_network(task: Task, widths: Sequence[int], *, key: PRNGKey) -> LinearNetwork:
    """Return a random deep network of least norm with map W*, with equal singular values in all layers.

    W_1 = R_1 S^(1/l) V^T, W_i = R_i S^(1/l) R_(i-1)^T and W_l = U S^(1/l) R_(l-1)^T, with uniform orthonormal R_i.

    Args:
        task: Task.
        widths: Units of the hidden layers, at least `task.rank` each.
        key: Random key.

    Raises:
        ValueError: If a layer is too narrow.
    """
    check_single(task)
    for place, width in enumerate(widths):
        check_hidden(task, width, f"widths[{place}]")
    return _deep(task, tuple(widths), key)


@eqx.filter_jit
def _deep(task: Task, widths: tuple[int, ...], key: PRNGKey) -> LinearNetwork:
    keys = jax.random.split(key, max(len(widths), 1))
    shapes = [(width, task.rank) for width in widths]
    drawn = [polar(jax.random.normal(k, shape, task.x.dtype)) for k, shape in zip(keys, shapes, strict=False)]
    root = task.map_values[None] ** (1 / (len(widths) + 1))
    frames = [task.map_right, *drawn, task.map_left]
    return LinearNetwork(
        tuple(product(after * root, before.T) for before, after in zip(frames[:-1], frames[1:], strict=True))
    )


@validated
def deep_residual(task: Task, network: LinearNetwork) -> Residual:
    """Return the distance of a network of any depth from those of least norm with map W*.

    Raises:
        ValueError: If its map has another shape.
    """
    check_single(task)
    whole = network.map
    if whole.shape != task.best_map.shape:
        fail("network", f"have a map of shape {task.best_map.shape}", whole.shape)
    norm = sum(jnp.sum(weight**2) for weight in network.weights)
    missed = jnp.linalg.norm(whole - task.best_map) / jnp.linalg.norm(task.map_values)
    return Residual(missed, norm / least_norm(task, len(network.weights)) - 1)
