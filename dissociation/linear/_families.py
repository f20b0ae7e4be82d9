"""Four families of two-layer linear networks that solve a task: membership, samples, walks, nearest networks."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, fail, is_traced
from dissociation._core.linalg import product
from dissociation._core.results import printed
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.linear._networks import LinearNetwork
from dissociation.linear._tasks import Task


class Residual(NamedTuple):
    """Distance of a network from a family's conditions; both are zero for its members.

    Attributes:
        map: |W2 W1 P - W*| / |W*|. P projects on the inputs' span in GLS and MRNS, and is the identity in LSS and MWNS.
        norm: Excess of the norm over its minimum, divided by it. Zero in GLS and LSS. It may be negative for networks
            that do not solve the task.
    """

    map: Float[Array, ""]
    norm: Float[Array, ""]

    __repr__ = printed


class Family(eqx.Module):
    """Family of two-layer linear networks that solve a task, one of `FAMILIES`.

    - GLS, general linear solutions: W2 W1 X = Yh.
    - LSS, least-squares solutions: W2 W1 = W*.
    - MRNS, minimum-representation-norm solutions: the GLS with the least |W1 X|^2 + |W2|^2 = 2 nuc(Yh).
    - MWNS, minimum-weight-norm solutions: the GLS with the least |W1|^2 + |W2|^2 = 2 nuc(W*).

    MWNS are LSS, and all are GLS.

    References:
        Braun, Grant and Saxe (2025), Not all solutions are created equal, section 3.
    """

    name: str = eqx.field(static=True)

    def __check_init__(self):
        check_choice("name", self.name, ("GLS", "LSS", *MINIMAL))

    @validated
    def sample(self, task: Task, hidden: int, *, spread: Scalar = 1.0, key: PRNGKey) -> LinearNetwork:
        """Return a random network.

        The frame R of MRNS and MWNS is uniform, and the weights of MRNS on unseen inputs are Gaussian. GLS and LSS
        have Gaussian parameters, which reach every solution up to a set of measure zero.

        Args:
            task: Task.
            hidden: Hidden units, at least `task.rank`.
            spread: Size of all other free parts relative to the task's own, 0 to 3. Rounding grows with it: in float32
                the largest residual of 500 GLS of rank 8 with 16 units was 2e-6 at 1, 4e-5 at 2 and 4e-3 at 3.
            key: Random key.

        Raises:
            ValueError: If there are fewer hidden units than the task's rank, or `spread` is not from 0 to 3.
        """
        check_hidden(task, hidden)
        _check_part("spread", spread, 3)
        return _sample(self.name, task, hidden, jnp.asarray(spread, task.x.dtype), key)

    @validated
    def walk(
        self, task: Task, hidden: int, num_steps: int, *, rate: Scalar = 0.05, spread: Scalar = 1.0, key: PRNGKey
    ) -> LinearNetwork:
        """Return a stationary random walk within the family, weights [steps, ...].

        Every free parameter g moves to (1 - rate) g + sqrt(1 - (1 - rate)^2) xi, from a draw of `sample`. In MRNS
        and MWNS only the frame R moves; weights of MRNS on unseen inputs stay.

        Args:
            task: Task.
            hidden: Hidden units.
            num_steps: Networks, the first included.
            rate: Fraction by which a parameter decays in a step, from 0 to 1. At 1 moving parameters are independent.
            spread: As in `sample`.
            key: Random key.

        Raises:
            ValueError: If there are fewer hidden units than the task's rank, or `rate` is not from 0 to 1. A traced
                rate is not checked.
        """
        check_hidden(task, hidden)
        check_count("num_steps", num_steps, minimum=1)
        _check_part("rate", rate, 1)
        _check_part("spread", spread, 3)
        rate, spread = (jnp.asarray(value, task.x.dtype) for value in (rate, spread))  # floats would be static
        return _walk(self.name, task, hidden, num_steps, rate, spread, key)

    @validated
    def residual(self, task: Task, network: LinearNetwork) -> Residual:
        """Return the distance of a network from the family's conditions.

        Raises:
            ValueError: If the network does not have two layers of the task's sizes.
        """
        check_network(task, network)
        return _residual(self.name, task, network)

    @validated
    def project(self, task: Task, network: LinearNetwork) -> LinearNetwork:
        """Return the nearest network of MRNS or MWNS; of GLS or LSS, the nearest one with the same first layer.

        Distances are Euclidean over all weights. In GLS and LSS weights are NaN if the first layer does not carry the
        inputs that the task needs, up to rounding.

        Raises:
            ValueError: If the network does not have two layers of the task's sizes, or too few hidden units.
        """
        check_width(task, network)
        return _project(self.name, task, network)

    @validated
    def rsm(self, task: Task) -> Float[Array, "samples samples"]:
        """Return the matrix H^T H of all networks of MRNS or MWNS, products of hidden activities.

        Raises:
            ValueError: If the family is GLS or LSS, in which the matrix is not unique, or `task` is a stack of tasks.
        """
        check_single(task)
        if self.name not in MINIMAL:
            fail("the family", f"be one of {', '.join(MINIMAL)}", self.name, "Other families have no unique matrix")
        if self.name == "MRNS":
            half = task.target_right * jnp.sqrt(task.target_values)[None]
        else:
            half = product(task.x, task.map_right) * jnp.sqrt(task.map_values)[None]
        return product(half, half.T)


MINIMAL = "MRNS", "MWNS"
GLS = Family("GLS")
"""General linear solutions."""
LSS = Family("LSS")
"""Least-squares solutions."""
MRNS = Family("MRNS")
"""Minimum-representation-norm solutions."""
MWNS = Family("MWNS")
"""Minimum-weight-norm solutions."""
FAMILIES: dict[str, Family] = {family.name: family for family in (GLS, LSS, MRNS, MWNS)}
"""Families of solutions by name."""


def _check_part(name: str, value: Scalar, most: int) -> None:
    if not is_traced(value) and not 0 <= float(value) <= most:
        fail(name, f"be from 0 to {most}", value)


def check_single(task: Task) -> None:
    """Raise if a task is a stack of tasks."""
    if task.x.ndim != 2:
        fail("task", "be one task", f"inputs of shape {task.x.shape}", "Map stacked tasks by `jax.vmap`")


def check_hidden(task: Task, hidden: int, name: str = "hidden") -> None:
    """Raise if hidden units are fewer than the task's rank."""
    check_single(task)
    check_count(name, hidden, minimum=1)
    if hidden < task.rank:
        fail(name, f"be at least the rank of the best map ({task.rank})", hidden)


def check_network(task: Task, network: LinearNetwork) -> int:
    """Return the number of hidden units, or raise if a network does not have two layers of the task's sizes."""
    check_single(task)
    shapes = [weight.shape for weight in network.weights]
    inputs, outputs, hidden = task.x.shape[1], task.y.shape[1], shapes[0][0] if shapes else 0
    if shapes != [(hidden, inputs), (outputs, hidden)]:
        fail("network", f"have weights [hidden, {inputs}] and [{outputs}, hidden]", shapes)
    return hidden


def check_width(task: Task, network: LinearNetwork) -> None:
    """Raise if a network does not have two layers of the task's sizes, or fewer hidden units than the task's rank."""
    hidden = check_network(task, network)
    if hidden < task.rank:
        fail("network", f"have at least {task.rank} hidden units, the rank of the best map", hidden)


def _parts(name: str, task: Task, hidden: int) -> dict[str, tuple[int, int, Array | float | None]]:
    """Return the rows and columns of free parameters, and squared norms of parts of the task's own weights."""
    rank, unseen = task.rank, task.unseen.shape[1]
    total = jnp.sum(task.map_values)
    parts: dict[str, tuple[int, int, Array | float | None]] = {"frame": (hidden, rank, None)}
    if name == "MRNS":
        parts["unseen"] = hidden, unseen, jnp.sum(task.target_values[:, None] * task.read_in**2)
    elif name != "MWNS":
        idle = task.irrelevant.shape[1] + (unseen if name == "LSS" else 0)
        parts |= {"skew": (rank, rank, 0.16 * rank**2), "beside": (hidden, idle, total)}
        parts |= {"mixing": (rank, hidden, float(rank)), "readout": (task.y.shape[-1], hidden, total)}
        parts |= {"unseen": (hidden, unseen, total)} if name == "GLS" else {}
    return parts


def _draw(name: str, task: Task, hidden: int, key: PRNGKey, count: int) -> Array:
    """Return Gaussian numbers, [count, free parameters]. One draw compiles several times faster than one per part."""
    size = sum(rows * columns for rows, columns, _ in _parts(name, task, hidden).values())
    return jax.random.normal(key, (count, size), task.x.dtype)


def _free(name: str, task: Task, hidden: int, spread: Scalar, drawn: Array) -> dict[str, Array]:
    """Return drawn parameters, scaled so that each part of the weights has about the norm of the task's own part."""
    free, end = {}, 0
    for part, (rows, columns, square) in _parts(name, task, hidden).items():
        end += rows * columns
        free[part] = drawn[end - rows * columns : end].reshape(rows, columns)
        if square is not None:
            free[part] *= jnp.asarray(spread * jnp.sqrt(square / max(rows * columns, 1)), drawn.dtype)
    return free


def polar(matrix: Array) -> Array:
    """Return the nearest matrix with orthonormal columns."""
    left, _, right = jnp.linalg.svd(matrix, full_matrices=False)
    return product(left, right)


def _frame_network(task: Task, frame: Array, name: str, unseen: Array | None = None) -> LinearNetwork:
    """Return the MRNS or MWNS with an orthonormal frame R, [hidden, rank]."""
    if name == "MWNS":
        root = jnp.sqrt(task.map_values)[None]
        return LinearNetwork((product(frame * root, task.map_right.T), product(task.map_left * root, frame.T)))
    root = jnp.sqrt(task.target_values)[None]
    first = product(frame * root, task.read_in)
    first = first if unseen is None else first + product(unseen, task.unseen.T)
    return LinearNetwork((first, product(task.target_left * root, frame.T)))


def _solution(name: str, task: Task, free: dict[str, Array]) -> LinearNetwork:
    """Return the network of free parameters.

    With R = polar(frame), a triangular L, Q = R L, and B orthogonal to R and to V, W1 = Q sqrt(S) V^T + (I + Q M) B and
    W2 = U sqrt(S) (L^-1 R^T - M (I - R R^T)) + G (I - E E^T), where E spans R and B.
    """
    frame = polar(free["frame"])
    if name in MINIMAL:
        return _frame_network(task, frame, name, free.get("unseen"))
    root = jnp.sqrt(task.map_values)[None]
    # Scaled so that its condition does not grow with the rank.
    skew = jnp.tril(free["skew"], -1) / task.rank**0.5 + jnp.diag(jnp.exp(jnp.diagonal(free["skew"])))
    basis = task.irrelevant if name == "GLS" else jnp.concatenate([task.irrelevant, task.unseen], 1)
    beside = free["beside"] - product(frame, product(frame.T, free["beside"]))
    beside = beside - product(frame, product(frame.T, beside))  # twice is enough
    turned = product(frame, skew)
    mixing = free["mixing"] - product(product(free["mixing"], frame), frame.T)
    beyond = beside + product(turned, product(mixing, beside))
    first = product(turned * root, task.map_right.T) + product(beyond, basis.T)
    if name == "GLS":
        first = first + product(free["unseen"], task.unseen.T)
    second = product(task.map_left * root, solve_triangular(skew, frame.T, lower=True) - mixing)
    if sum(part.shape[1] for part in (frame, beside)) < len(frame):
        # Columns of `beside` are scaled, so that small ones count.
        size = jnp.linalg.norm(beside, axis=0)
        used, _ = jnp.linalg.qr(jnp.concatenate([frame, beside / jnp.where(size > 0, size, 1.0)[None]], 1))
        readout = free["readout"] - product(product(free["readout"], used), used.T)
        second = second + readout - product(product(readout, used), used.T)
    return LinearNetwork((first, second))


@eqx.filter_jit
def _sample(name: str, task: Task, hidden: int, spread: Scalar, key: PRNGKey) -> LinearNetwork:
    return _solution(name, task, _free(name, task, hidden, spread, _draw(name, task, hidden, key, 1)[0]))


@eqx.filter_jit
def _walk(
    name: str, task: Task, hidden: int, num_steps: int, rate: Scalar, spread: Scalar, key: PRNGKey
) -> LinearNetwork:
    drawn = _draw(name, task, hidden, key, num_steps)
    moves = jnp.arange(drawn.shape[1]) < (hidden * task.rank if name in MINIMAL else drawn.shape[1])
    rates = jnp.where(moves, 1 - jnp.asarray(rate, drawn.dtype), 1.0)

    def step(now: Array, given: tuple[Array, Array]) -> tuple[Array, Array]:
        begins, new = given  # the first step is a draw
        kept = jnp.where(begins, 0.0, rates)
        moved = kept * now + jnp.sqrt(1 - kept**2) * new
        return moved, moved

    _, steps = lax.scan(step, jnp.zeros_like(drawn[0]), (jnp.arange(num_steps) == 0, drawn))
    return jax.vmap(lambda drawn: _solution(name, task, _free(name, task, hidden, spread, drawn)))(steps)


def _restricted(name: str, task: Task, weights: Array) -> Array:
    """Return the projection of the rows of a matrix on the inputs that a family binds."""
    if name in ("LSS", "MWNS"):
        return weights
    return product(product(weights, task.input_basis), task.input_basis.T)


def _norm_and_minimum(name: str, task: Task, network: LinearNetwork) -> tuple[Array, Array]:
    """Return the squared norm that a minimal family minimises, and its minimum."""
    first, second = network.weights
    measured = product(task.x, first.T) if name == "MRNS" else first
    values = task.target_values if name == "MRNS" else task.map_values
    return jnp.sum(measured**2) + jnp.sum(second**2), 2 * jnp.sum(values)


@eqx.filter_jit
def _residual(name: str, task: Task, network: LinearNetwork) -> Residual:
    wrong = _restricted(name, task, network.map) - task.best_map
    excess = jnp.zeros((), wrong.dtype)
    if name in MINIMAL:
        norm, minimum = _norm_and_minimum(name, task, network)
        excess = norm / minimum - 1
    return Residual(jnp.linalg.norm(wrong) / jnp.linalg.norm(task.map_values), excess)


@eqx.filter_jit
def _project(name: str, task: Task, network: LinearNetwork) -> LinearNetwork:
    first, second = network.weights
    if name == "MWNS":
        root = jnp.sqrt(task.map_values)[None]
        return _frame_network(
            task, polar(product(first, task.map_right * root) + product(second.T, task.map_left * root)), name
        )
    if name == "MRNS":
        root = jnp.sqrt(task.target_values)[None]
        read = product(first, task.read_in.T * root) + product(second.T, task.target_left * root)
        return _frame_network(task, polar(read), name, product(first, task.unseen))
    # Bases in place of projectors: unseen directions are cut exactly.
    basis = task.input_basis if name == "GLS" else jnp.eye(first.shape[1], dtype=first.dtype)
    left, values, right = jnp.linalg.svd(product(first, basis), full_matrices=False)
    cut = max(first.shape) * jnp.finfo(first.dtype).eps * jnp.linalg.norm(first)
    kept = values > cut
    needed = product(basis.T, task.map_right)
    carried = product(jnp.where(kept[:, None], right, 0.0), needed)
    least = jnp.min(values, where=kept, initial=jnp.inf)
    slack = 16 * jnp.finfo(first.dtype).eps * jnp.maximum(1.0, jnp.linalg.norm(first) / least)  # rounding of `right`
    slack = jnp.minimum(slack, jnp.finfo(first.dtype).eps ** 0.5)
    missing = jnp.linalg.norm(needed - product(right.T, carried)) > slack
    wrong = product(task.best_map - network.map, basis)
    inverse = jnp.where(kept, 1 / jnp.where(kept, values, 1.0), 0.0)
    change = product(product(wrong, right.T) * inverse[None], left.T)
    return LinearNetwork((first, second + jnp.where(missing, jnp.nan, change)))


class Placement(NamedTuple):
    """Distances of a network from four families; see `placement`.

    Attributes:
        distance: Distance over all weights from `Family.project`, divided by the network's norm, [families]. Those of
            GLS and LSS are of networks with the same first layer.
        residual: Residuals, [families].
    """

    distance: Float[Array, " families"]
    residual: Residual

    __repr__ = printed

    def axis_coordinates(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return the families' names, for `to_xarray`."""
        return {"families": ("families", np.array(list(FAMILIES)))}


@validated
def placement(task: Task, network: LinearNetwork) -> Placement:
    """Return how far a network is from the families of solutions, in the order of `FAMILIES`.

    Distances from GLS and LSS are NaN as long as the first layer does not carry the inputs that the task needs. During
    training of a network narrower than the inputs that is so until it converges.

    Raises:
        ValueError: As `Family.project`.
    """
    check_width(task, network)
    total = jnp.sqrt(sum(jnp.sum(weight**2) for weight in network.weights))
    distances, residuals = [], []
    for name in FAMILIES:
        nearest = _project(name, task, network)
        moved = [jnp.sum((a - b) ** 2) for a, b in zip(nearest.weights, network.weights, strict=True)]
        distances.append(jnp.sqrt(sum(moved)) / total)
        residuals.append(_residual(name, task, network))
    return Placement(jnp.stack(distances), jax.tree.map(lambda *parts: jnp.stack(parts), *residuals))
