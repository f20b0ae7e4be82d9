"""Hidden activities of a chosen form in linear networks that solve a task."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_positive, fail
from dissociation._core.linalg import product
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from dissociation.linear._families import check_hidden
from dissociation.linear._networks import LinearNetwork
from dissociation.linear._tasks import Task


class Planted(NamedTuple):
    """Solution whose hidden activity is as close to a pattern as it can be; see `plant`.

    Attributes:
        network: The network, a GLS.
        bound: Lower bound of |H - pattern| for activities in the inputs' span whose singular values in needed
            directions are not below `least`.
        distance: Distance |H - pattern| of this one.
    """

    network: LinearNetwork
    bound: Float[Array, ""]
    distance: Float[Array, ""]


@validated(finite=("pattern",))
def plant(task: Task, pattern: Float[Array | np.ndarray, "samples hidden"], *, least: Scalar = 1e-2) -> Planted:
    """Return a GLS with a chosen hidden activity.

    In directions O of the samples that the task needs, singular values of the activity are raised to `least` times the
    largest one of the pattern, because |W2| <= |Yh| / least. In other directions of the inputs' span, the activity
    keeps the largest hidden - rank components of the pattern: all, if `hidden` is at least the inputs' rank. Beyond
    the inputs' span it is zero.

    Args:
        task: Task.
        pattern: Activity [samples, hidden], with at least `task.rank` units.
        least: Least singular value in needed directions, as a fraction of the pattern's largest.

    Raises:
        ValueError: If there are too few hidden units, another number of samples, or `least` is not positive.

    References:
        Braun, Grant and Saxe (2025), section 3 and figure 5.
    """
    target = jnp.asarray(pattern)
    if len(target) != len(task.x):
        fail("pattern", f"have one row per sample ({len(task.x)})", target.shape)
    check_hidden(task, target.shape[1])
    check_positive("least", least)
    return _plant(task, target, jnp.asarray(least, target.dtype))


@eqx.filter_jit
def _plant(task: Task, target: Array, least: Array) -> Planted:
    hidden, rank = target.shape[1], task.rank
    codes = task.target_right
    needed = product(target.T, codes)  # [hidden, rank]
    within = product(task.sample_basis, product(task.sample_basis.T, target))
    free = within - product(codes, needed.T)  # [samples, hidden]
    left, values, right = jnp.linalg.svd(free, full_matrices=False)
    count = min(hidden - rank, task.irrelevant.shape[1])
    kept = product(left[:, :count] * values[None, :count], right[:count])
    # W2 reads hidden directions without the kept part. A complete basis keeps small columns orthogonal to it.
    apart = jnp.linalg.qr(right[:count].T, mode="complete")[0][:, count:]
    turned, sizes, rows = jnp.linalg.svd(product(apart.T, needed), full_matrices=False)
    turned = product(apart, turned)
    floor = least * jnp.linalg.norm(target, 2)
    raised = jnp.maximum(sizes, floor)
    lifted = needed + product(turned * (raised - sizes)[None], rows)
    activity = kept + product(codes, lifted.T)
    first = product(activity.T, product(task.sample_basis / task.input_values[None], task.input_basis.T))
    second = product(task.target_left * task.target_values[None], product(rows.T / raised[None], turned.T))
    missing = jnp.maximum(floor - jnp.linalg.svd(needed, compute_uv=False), 0.0)
    bound = jnp.sqrt(jnp.sum(missing**2) + jnp.sum((target - within) ** 2))
    return Planted(LinearNetwork((first, second)), bound, jnp.linalg.norm(activity - target))


@validated(finite=("rsm",))
def plant_rsm(
    task: Task, rsm: Float[Array | np.ndarray, "samples samples"], hidden: int, *, least: Scalar = 1e-2
) -> Planted:
    """Return a GLS whose hidden activities have chosen products H^T H, by `plant` of a root of the matrix.

    Args:
        task: Task.
        rsm: Symmetric positive semidefinite matrix over samples. Its part beyond the inputs' span is dropped.
        hidden: Hidden units. Components beyond the largest `hidden` are dropped.
        least: As in `plant`.

    Raises:
        ValueError: If the matrix is not symmetric and positive semidefinite, or has another size.
    """
    given = np.asarray(rsm, float)
    if given.shape != (len(task.x),) * 2:
        fail("rsm", f"have shape {(len(task.x),) * 2}", given.shape)
    values, vectors = np.linalg.eigh(0.5 * (given + given.T))
    size = float(np.abs(values).max())
    slack = 1e-5 * size
    if np.abs(given - given.T).max() > slack or values[0] < -slack:
        fail("rsm", "be symmetric and positive semidefinite", f"a least eigenvalue of {values[0]:.3g}")
    chosen = np.argsort(-values)[:hidden]
    root = np.zeros((len(given), hidden))
    root[:, : len(chosen)] = vectors[:, chosen] * np.sqrt(np.maximum(values[chosen], 0))
    return plant(task, root.astype(task.x.dtype), least=least)
