"""Hidden activities of a chosen form in linear networks that solve a task."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_known, check_positive, fail
from dissociation._core.validation import validated
from dissociation.linear._families import LinearNetwork, check_hidden
from dissociation.linear._tasks import Task, check_semidefinite


class Planted(NamedTuple):
    """Solution whose hidden activity is close to a pattern; see `plant`.

    Attributes:
        network: The network, a GLS.
        bound: Lower bound of |H - pattern| for activities in the inputs' span whose singular values
            in needed directions are not below `least` times the pattern's largest.
        distance: Distance |H - pattern| of this one.
    """

    network: LinearNetwork
    bound: Float[Array, ""]
    distance: Float[Array, ""]


@validated(finite=("pattern",))
def plant(
    task: Task, pattern: Float[Array | np.ndarray, "samples hidden"], *, least: float | int = 1e-2
) -> Planted:
    """Return a GLS with a chosen hidden activity.

    In directions O of the samples that the task needs, singular values of the activity are raised
    to `least` times the largest one of the pattern, because |W2| <= |Yh| / (least |pattern|). In
    other directions of the inputs' span, it keeps the largest hidden - rank components of the
    pattern: all, if `hidden` is at least the inputs' rank. Beyond the inputs' span it is zero.

    Args:
        task: Task.
        pattern: Activity [samples, hidden], with at least `task.rank` units.
        least: Least singular value in needed directions, as a fraction of the pattern's largest.

    References:
        Braun, Grant and Saxe (2025), section 3 and figure 5.
    """
    check_known("its rank is found on the host", pattern=pattern, task=task)
    target = np.asarray(pattern, float)
    check_hidden(task, target.shape[1], "pattern.shape[1]")
    if len(target) != len(task.x) or not target.any():
        fail(
            "pattern",
            f"have one row per sample ({len(task.x)}), and not be zero",
            f"shape {target.shape}",
        )
    check_positive("least", least)
    size = float(np.linalg.norm(target, 2))
    codes = np.asarray(task.target_right, float)
    samples = np.asarray(task.sample_basis, float)
    input_values = np.asarray(task.input_values, float)
    input_basis = np.asarray(task.input_basis, float)
    readout = np.asarray(task.target_left * task.target_values[None], float)

    # The largest components of the pattern in directions of samples that the task does not need.
    needed = target.T @ codes  # [hidden, rank]
    within = samples @ (samples.T @ target)
    left_vectors, values, right_vectors = np.linalg.svd(
        within - codes @ needed.T, full_matrices=False
    )
    is_significant = values > 1e-6 * size
    count = min(target.shape[1] - task.rank, int(np.sum(is_significant)))
    idle_rows = right_vectors[:count]
    idle = (left_vectors[:, :count] * values[:count]) @ idle_rows

    # W2 reads hidden directions without these components.
    frame, _ = np.linalg.qr(idle_rows.T, mode="complete")
    read = frame[:, count:]
    turned, sizes, rows = np.linalg.svd(read.T @ needed, full_matrices=False)
    turned = read @ turned
    raised = np.maximum(sizes, least * size)
    activity = idle + codes @ (needed + (turned * (raised - sizes)) @ rows).T
    first = activity.T @ (samples / input_values) @ input_basis.T
    second = readout @ (rows.T / raised) @ turned.T

    missing = np.maximum(least * size - np.linalg.svd(needed, compute_uv=False), 0.0)
    bound = np.sqrt(np.sum(missing**2) + np.sum((target - within) ** 2))
    distance = np.linalg.norm(activity - target)
    network = LinearNetwork((jnp.asarray(first, task.x.dtype), jnp.asarray(second, task.x.dtype)))
    return Planted(network, jnp.asarray(bound), jnp.asarray(distance))


@validated(finite=("rsm",))
def plant_rsm(
    task: Task,
    rsm: Float[Array | np.ndarray, "samples samples"],
    hidden: int,
    *,
    least: float | int = 1e-2,
) -> Planted:
    """Return a GLS whose hidden activities have chosen products H^T H.

    It is the result of `plant` for a root of the matrix.

    Args:
        task: Task.
        rsm: Symmetric positive semidefinite matrix over samples. Its part beyond the inputs' span
            is dropped.
        hidden: Hidden units, at least `task.rank`. Components beyond the largest `hidden` are
            dropped.
        least: As in `plant`.

    Returns:
        The network, with the bound and the distance of its activity from a root of the matrix, of
        `hidden` columns.
    """
    check_known("its eigenvalues are found on the host", rsm=rsm)
    check_hidden(task, hidden)
    matrix = np.asarray(rsm, float)
    if len(matrix) != len(task.x) or not matrix.any():
        fail("rsm", f"have shape {(len(task.x),) * 2}, and not be zero", matrix.shape)
    values, vectors = check_semidefinite("rsm", matrix)
    columns = vectors * np.sqrt(np.maximum(values, 0))
    largest = columns[:, ::-1][:, :hidden]
    num_missing = hidden - largest.shape[1]
    root = np.pad(largest, ((0, 0), (0, num_missing)))
    return plant(task, root.astype(task.x.dtype), least=least)
