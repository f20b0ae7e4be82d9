"""Families of linear networks that solve a task: samples, walks, nearest and deep networks."""

import itertools
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, fail, is_traced
from dissociation._core.linalg import product, scale_of
from dissociation._core.results import printed
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.linear._tasks import Task
from dissociation.models._layers import as_example


class LinearNetwork(eqx.Module):
    """Linear network W_l ... W_1 x for one example, without biases.

    Attributes:
        weights: Weights [outputs, inputs] of the layers, the first one first.
    """

    weights: tuple[Float[Array, "..."], ...]

    def __call__(self, x: Float[Array | np.ndarray, " inputs"]) -> Float[Array, " outputs"]:
        """Return the output."""
        x = as_example("x", x, self.weights[0].shape[-1])
        return reduce(lambda h, weight: weight @ h, self.weights, x)

    @property
    def map(self) -> Float[Array, "outputs inputs"]:
        """Return the matrix of the whole network."""
        shapes = [weight.shape for weight in self.weights]
        if not shapes or any(a[-2] != b[-1] for a, b in itertools.pairwise(shapes)):
            fail("weights", "be [outputs, inputs] of layers that follow each other", shapes)
        return reduce(lambda first, weight: product(weight, first), self.weights)

    def hidden(
        self, x: Float[Array | np.ndarray, "samples inputs"]
    ) -> Float[Array, "samples hidden"]:
        """Return the activity of the first hidden layer."""
        if x.shape[-1] != self.weights[0].shape[-1]:
            fail("x", f"have {self.weights[0].shape[-1]} columns, the network's inputs", x.shape)
        return product(jnp.asarray(x), self.weights[0].swapaxes(-1, -2))


class Residual(NamedTuple):
    """Distance of a network from a family's conditions; both are zero for its members.

    Attributes:
        map: |W2 W1 P - W*| / |W*|. P projects on the inputs' span in GLS and MRNS, and is the
            identity in LSS and MWNS.
        norm: Excess of the norm over its minimum, divided by it. Zero in GLS and LSS. It may be
            negative for networks that do not solve the task.
    """

    map: Float[Array, ""]
    norm: Float[Array, ""]

    __repr__ = printed


class Family(eqx.Module):
    """Family of two-layer linear networks that solve a task, one of `FAMILIES`.

    - GLS, general linear solutions: W2 W1 X = Yh.
    - LSS, least-squares solutions: W2 W1 = W*.
    - MRNS, minimum-representation-norm solutions: the GLS with the least |W1 X|^2 + |W2|^2 = 2
    nuc(Yh).
    - MWNS, minimum-weight-norm solutions: the GLS with the least |W1|^2 + |W2|^2 = 2 nuc(W*).

    MWNS are LSS, and all are GLS.

    References:
        Braun, Grant and Saxe (2025), Not all solutions are created equal, section 3.
    """

    name: str = eqx.field(static=True)

    def __check_init__(self):
        check_choice("name", self.name, ("GLS", "LSS", *MINIMAL))

    @validated
    def sample(
        self, task: Task, hidden: int, *, spread: Scalar = 1.0, key: PRNGKey
    ) -> LinearNetwork:
        """Return a random network.

        The frame R of MRNS and MWNS is uniform, and the weights of MRNS on unseen inputs are
        Gaussian. GLS and LSS have Gaussian parameters, which reach every solution up to a set of
        measure zero.

        Args:
            task: Task.
            hidden: Hidden units, at least `task.rank`.
            spread: Size of all other free parts relative to the task's own, 0 to 3. Rounding grows
                with it: in float32 the largest residual of 500 GLS of rank 8 with 16 units was 2e-6
                at 1, 4e-5 at 2 and 4e-3 at 3.
            key: Random key.
        """
        check_hidden(task, hidden)
        _check_range("spread", spread, 3)
        return _sample(self.name, task, hidden, jnp.asarray(spread, task.x.dtype), key)

    @validated
    def walk(
        self,
        task: Task,
        hidden: int,
        num_steps: int,
        *,
        rate: Scalar = 0.05,
        spread: Scalar = 1.0,
        key: PRNGKey,
    ) -> LinearNetwork:
        """Return a stationary random walk within the family, weights [steps, ...].

        Every free parameter g moves to (1 - rate) g + sqrt(1 - (1 - rate)^2) xi, from a draw of
        `sample`. In MRNS and MWNS only the frame R moves; weights of MRNS on unseen inputs stay.

        Args:
            task: Task.
            hidden: Hidden units, at least `task.rank`.
            num_steps: Networks, the first included.
            rate: Fraction by which a parameter decays in a step, from 0 to 1. At 1 moving
                parameters are independent.
            spread: As in `sample`. It and `rate` are not checked if traced.
            key: Random key.
        """
        check_hidden(task, hidden)
        check_count("num_steps", num_steps, minimum=1)
        _check_range("rate", rate, 1)
        _check_range("spread", spread, 3)
        # Floats would be static.
        rate = jnp.asarray(rate, task.x.dtype)
        spread = jnp.asarray(spread, task.x.dtype)
        return _walk(self.name, task, hidden, num_steps, rate, spread, key)

    @validated
    @eqx.filter_jit
    def residual(self, task: Task, network: LinearNetwork) -> Residual:
        """Return the distance of a network from the family's conditions."""
        check_network(task, network)
        network_map = network.map
        excess = jnp.zeros((), task.x.dtype)
        if self.name in ("GLS", "MRNS"):
            network_map = product(product(network_map, task.input_basis), task.input_basis.T)
        if self.name in MINIMAL:
            first, second = network.weights
            if self.name == "MRNS":
                first = product(task.x, first.T)
            values, _, _ = _factors(self.name, task)
            norm = jnp.sum(first**2) + jnp.sum(second**2)
            excess = norm / (2 * jnp.sum(values)) - 1
        distance = jnp.linalg.norm(network_map - task.best_map)
        return Residual(distance / jnp.linalg.norm(task.map_values), excess)

    @validated
    @eqx.filter_jit
    def project(self, task: Task, network: LinearNetwork) -> LinearNetwork:
        """Return the nearest network of the family; for GLS and LSS with the same first layer.

        Distances are Euclidean over all weights. In GLS and LSS weights are NaN if the first layer
        does not carry the inputs that the task needs, up to rounding.
        """
        hidden = check_network(task, network)
        if hidden < task.rank:
            fail(
                "network",
                f"have at least {task.rank} hidden units, the rank of the best map",
                hidden,
            )
        if self.name in MINIMAL:
            return _nearest_minimal(self.name, task, network)
        return _nearest_readout(self.name, task, network)

    @validated
    def rsm(self, task: Task) -> Float[Array, "samples samples"]:
        """Return the matrix H^T H of all networks of MRNS or MWNS, products of hidden activities.

        Raises:
            ValueError: If the family is GLS or LSS, in which the matrix is not unique, or `task` is
                a stack of tasks.
        """
        check_single(task)
        if self.name not in MINIMAL:
            fail(
                "the family",
                f"be one of {', '.join(MINIMAL)}",
                self.name,
                "Other families have no unique matrix",
            )
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


def _nearest_minimal(name: str, task: Task, network: LinearNetwork) -> LinearNetwork:
    """Return the nearest network of MRNS or MWNS."""
    first, second = network.weights
    values, read, write = _factors(name, task)
    root = jnp.sqrt(values)[None]
    frame = polar(product(first, read.T * root) + product(second.T, write * root))
    unseen = None
    if name == "MRNS":
        unseen = product(first, task.unseen)
    return _frame_network(task, frame, name, unseen)


def _nearest_readout(name: str, task: Task, network: LinearNetwork) -> LinearNetwork:
    """Return the nearest GLS or LSS with the same first layer."""
    first, second = network.weights
    # Bases in place of projectors: unseen directions are cut exactly.
    basis = task.input_basis if name == "GLS" else jnp.eye(first.shape[1], dtype=first.dtype)
    read = product(first, basis)

    # Inputs that are read do not depend on the sizes of neurons; changes of weights do.
    sizes = scale_of(jnp.max(jnp.abs(read), 1, keepdims=True))
    _, values, directions = jnp.linalg.svd(read / sizes, full_matrices=False)
    eps = jnp.finfo(first.dtype).eps
    norm = jnp.linalg.norm(first / sizes)
    is_read = values > max(first.shape) * eps * norm
    needed = product(basis.T, task.map_right)
    carried = product(jnp.where(is_read[:, None], directions, 0.0), needed)
    smallest = jnp.min(values, where=is_read, initial=jnp.inf)
    slack = 16 * eps * jnp.maximum(1.0, norm / smallest)
    slack = jnp.minimum(slack, eps**0.5)  # rounding of `directions`
    is_missing = jnp.linalg.norm(needed - product(directions.T, carried)) > slack

    error = product(task.best_map - network.map, basis)
    along = jnp.where(is_read[None], product(read, directions.T), 0.0)
    left_vectors, values, right_vectors = jnp.linalg.svd(along, full_matrices=False)
    is_read = jnp.arange(len(values)) < jnp.sum(is_read)
    inverse = jnp.where(is_read, 1 / jnp.where(is_read, values, 1.0), 0.0)
    turned = product(error, product(directions.T, right_vectors.T))
    change = product(turned * inverse[None], left_vectors.T)
    return LinearNetwork((first, second + jnp.where(is_missing, jnp.nan, change)))


def _check_range(name: str, value: Scalar, maximum: int) -> None:
    if not is_traced(value) and not 0 <= float(value) <= maximum:
        fail(name, f"be from 0 to {maximum}", value)


def check_single(task: Task) -> None:
    """Raise if a task is a stack of tasks."""
    if task.x.ndim != 2:
        fail(
            "task",
            "be one task",
            f"inputs of shape {task.x.shape}",
            "Map stacked tasks by `jax.vmap`",
        )


def check_hidden(task: Task, hidden: int, name: str = "hidden") -> None:
    """Raise if hidden units are fewer than the task's rank."""
    check_single(task)
    if hidden < task.rank:
        fail(name, f"be at least the rank of the best map ({task.rank})", hidden)


def check_network(task: Task, network: LinearNetwork) -> int:
    """Return the number of hidden units; raise if a network does not have the task's sizes."""
    check_single(task)
    shapes = [weight.shape for weight in network.weights]
    inputs = task.x.shape[1]
    outputs = task.y.shape[1]
    hidden = shapes[0][0] if shapes else 0
    if shapes != [(hidden, inputs), (outputs, hidden)]:
        fail("network", f"have weights [hidden, {inputs}] and [{outputs}, hidden]", shapes)
    return hidden


class _Free(NamedTuple):
    """Shape of a free parameter, and the squared norm of similar weights of the task, if any."""

    rows: int
    columns: int
    square: Array | float | None = None


def _parameters(name: str, task: Task, hidden: int) -> dict[str, _Free]:
    """Return the free parameters of a family, in the order in which they are drawn."""
    rank = task.rank
    unseen = task.unseen.shape[1]
    total = jnp.sum(task.map_values)
    parameters = {"frame": _Free(hidden, rank)}
    if name == "MRNS":
        square = jnp.sum(task.target_values[:, None] * task.read_in**2)
        parameters["unseen"] = _Free(hidden, unseen, square)
    if name in MINIMAL:
        return parameters
    idle = task.irrelevant.shape[1]
    if name == "LSS":
        idle += unseen
    parameters["skew"] = _Free(rank, rank, 0.16 * rank**2)
    parameters["beside"] = _Free(hidden, idle, total)
    parameters["mixing"] = _Free(rank, hidden, float(rank))
    parameters["readout"] = _Free(task.y.shape[-1], hidden, total)
    if name == "GLS":
        parameters["unseen"] = _Free(hidden, unseen, total)
    return parameters


def _draw(name: str, task: Task, hidden: int, key: PRNGKey, count: int) -> Array:
    """Return Gaussian numbers, [count, free parameters], in one draw, which compiles quickly."""
    parameters = _parameters(name, task, hidden)
    size = sum(rows * columns for rows, columns, _ in parameters.values())
    return jax.random.normal(key, (count, size), task.x.dtype)


def _free(name: str, task: Task, hidden: int, spread: Scalar, drawn: Array) -> dict[str, Array]:
    """Return drawn parameters, scaled so that each adds weights of about the task's own norm."""
    free = {}
    start = 0
    for parameter, (rows, columns, square) in _parameters(name, task, hidden).items():
        end = start + rows * columns
        free[parameter] = drawn[start:end].reshape(rows, columns)
        if square is not None:
            deviation = spread * jnp.sqrt(square / max(rows * columns, 1))
            free[parameter] *= jnp.asarray(deviation, drawn.dtype)
        start = end
    return free


def polar(matrix: Array) -> Array:
    """Return the nearest matrix with orthonormal columns."""
    left_vectors, _, right_vectors = jnp.linalg.svd(matrix, full_matrices=False)
    return product(left_vectors, right_vectors)


def _factors(name: str, task: Task) -> tuple[Array, Array, Array]:
    """Return values of a minimal family, and the bases that R reads and writes.

    Their shapes are [rank], [rank, inputs] and [outputs, rank].
    """
    if name == "MRNS":
        return task.target_values, task.read_in, task.target_left
    return task.map_values, task.map_right.T, task.map_left


def _frame_network(
    task: Task, frame: Array, name: str, unseen: Array | None = None
) -> LinearNetwork:
    """Return the MRNS or MWNS with an orthonormal frame R, [hidden, rank]."""
    values, read, write = _factors(name, task)
    root = jnp.sqrt(values)[None]
    first = product(frame * root, read)
    if unseen is not None:
        first = first + product(unseen, task.unseen.T)
    return LinearNetwork((first, product(write * root, frame.T)))


def _solution(name: str, task: Task, free: dict[str, Array]) -> LinearNetwork:
    """Return the network of free parameters.

    With R = polar(frame), a triangular L, Q = R L, and B orthogonal to R and to V, W1 = Q sqrt(S)
    V^T + (I + Q M) B and W2 = U sqrt(S) (L^-1 R^T - M (I - R R^T)) + G (I - E E^T), where E spans R
    and B.
    """
    frame = polar(free["frame"])
    if name in MINIMAL:
        return _frame_network(task, frame, name, free.get("unseen"))
    root = jnp.sqrt(task.map_values)[None]
    # Scaled so that its condition does not grow with the rank.
    lower = jnp.tril(free["skew"], -1) / task.rank**0.5
    skew = lower + jnp.diag(jnp.exp(jnp.diagonal(free["skew"])))
    basis = task.irrelevant
    if name == "LSS":
        basis = jnp.concatenate([task.irrelevant, task.unseen], 1)
    beside = free["beside"] - product(frame, product(frame.T, free["beside"]))
    beside = beside - product(frame, product(frame.T, beside))  # twice is enough
    turned = product(frame, skew)
    mixing = free["mixing"] - product(product(free["mixing"], frame), frame.T)
    beyond = beside + product(turned, product(mixing, beside))
    first = product(turned * root, task.map_right.T) + product(beyond, basis.T)
    if name == "GLS":
        first = first + product(free["unseen"], task.unseen.T)
    inverse = solve_triangular(skew, frame.T, lower=True)
    second = product(task.map_left * root, inverse - mixing)
    if frame.shape[1] + beside.shape[1] < len(frame):
        # Columns of `beside` are scaled, so that small ones count.
        size = jnp.linalg.norm(beside, axis=0)
        units = beside / jnp.where(size > 0, size, 1.0)[None]
        used, _ = jnp.linalg.qr(jnp.concatenate([frame, units], 1))
        readout = free["readout"] - product(product(free["readout"], used), used.T)
        second = second + readout - product(product(readout, used), used.T)
    return LinearNetwork((first, second))


@eqx.filter_jit
def _sample(name: str, task: Task, hidden: int, spread: Scalar, key: PRNGKey) -> LinearNetwork:
    drawn = _draw(name, task, hidden, key, 1)[0]
    return _solution(name, task, _free(name, task, hidden, spread, drawn))


@eqx.filter_jit
def _walk(
    name: str, task: Task, hidden: int, num_steps: int, rate: Scalar, spread: Scalar, key: PRNGKey
) -> LinearNetwork:
    drawn = _draw(name, task, hidden, key, num_steps)
    num_moving = drawn.shape[1]
    if name in MINIMAL:
        num_moving = hidden * task.rank
    is_moving = jnp.arange(drawn.shape[1]) < num_moving
    rates = jnp.where(is_moving, 1 - jnp.asarray(rate, drawn.dtype), 1.0)

    def step(parameters: Array, start_and_draw: tuple[Array, Array]) -> tuple[Array, Array]:
        is_start, draw = start_and_draw  # the first step is a draw
        decay = jnp.where(is_start, 0.0, rates)
        moved = decay * parameters + jnp.sqrt(1 - decay**2) * draw
        return moved, moved

    def network(parameters: Array) -> LinearNetwork:
        return _solution(name, task, _free(name, task, hidden, spread, parameters))

    _, steps = lax.scan(step, jnp.zeros_like(drawn[0]), (jnp.arange(num_steps) == 0, drawn))
    return jax.vmap(network)(steps)


class Placement(NamedTuple):
    """Distances of a network from four families; see `placement`.

    Attributes:
        distance: Distance over all weights from `Family.project`, divided by the network's norm,
            [families]. Those of GLS and LSS are of networks with the same first layer.
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

    Distances from GLS and LSS are NaN as long as the first layer does not carry the inputs that the
    task needs. During training of a network narrower than the inputs that is so until it converges.
    """
    total = jnp.sqrt(sum(jnp.sum(weight**2) for weight in network.weights))
    distances = []
    residuals = []
    for family in FAMILIES.values():
        nearest = family.project(task, network)
        pairs = zip(nearest.weights, network.weights, strict=True)
        distance = jnp.sqrt(sum(jnp.sum((a - b) ** 2) for a, b in pairs))
        distances.append(distance / total)
        residuals.append(family.residual(task, network))
    residual = jax.tree.map(lambda *leaves: jnp.stack(leaves), *residuals)
    return Placement(jnp.stack(distances), residual)


@validated
def least_norm(task: Task, depth: int) -> Float[Array, ""]:
    """Return the least sum |W_i|^2 of a network of `depth` layers with map W*.

    It is depth * sum_k s_k^(2 / depth).

    References:
        Shang et al. (2020), Unified scalable equivalent formulations for Schatten quasi-norms.
    """
    check_single(task)
    check_count("depth", depth, minimum=1)
    return depth * jnp.sum(task.map_values ** (2 / depth))


@validated
@eqx.filter_jit
def least_norm_network(task: Task, widths: Sequence[int], *, key: PRNGKey) -> LinearNetwork:
    """Return a random deep network of least norm with map W*.

    Its layers have equal singular values:
    W_1 = R_1 S^(1/l) V^T, W_i = R_i S^(1/l) R_(i-1)^T and W_l = U S^(1/l) R_(l-1)^T, with uniform
    orthonormal R_i.

    Args:
        task: Task.
        widths: Units of the hidden layers, at least `task.rank` each.
        key: Random key.
    """
    check_single(task)
    for index, width in enumerate(widths):
        check_hidden(task, width, f"widths[{index}]")
    keys = jax.random.split(key, max(len(widths), 1))
    frames = [task.map_right]
    for k, width in zip(keys, widths, strict=False):
        frames.append(polar(jax.random.normal(k, (width, task.rank), task.x.dtype)))
    frames.append(task.map_left)

    root = task.map_values[None] ** (1 / (len(widths) + 1))
    pairs = itertools.pairwise(frames)
    return LinearNetwork(tuple(product(after * root, before.T) for before, after in pairs))


@validated
def deep_residual(task: Task, network: LinearNetwork) -> Residual:
    """Return the distance of a network of any depth from those of least norm with map W*."""
    check_single(task)
    network_map = network.map
    if network_map.shape != task.best_map.shape:
        fail("network", f"have a map of shape {task.best_map.shape}", network_map.shape)
    norm = sum(jnp.sum(weight**2) for weight in network.weights)
    distance = jnp.linalg.norm(network_map - task.best_map)
    excess = norm / least_norm(task, len(network.weights)) - 1
    return Residual(distance / jnp.linalg.norm(task.map_values), excess)
