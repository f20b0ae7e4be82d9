"""Families of linear networks that solve a task: membership, samples, walks, nearest networks; deep networks."""

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
        if not shapes or any(
            one[-2] != following[-1] for one, following in itertools.pairwise(shapes)
        ):
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
        _check_part("spread", spread, 3)
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
        _check_part("rate", rate, 1)
        _check_part("spread", spread, 3)
        rate, spread = (
            jnp.asarray(value, task.x.dtype) for value in (rate, spread)
        )  # floats would be static
        return _walk(self.name, task, hidden, num_steps, rate, spread, key)

    @validated
    @eqx.filter_jit
    def residual(self, task: Task, network: LinearNetwork) -> Residual:
        """Return the distance of a network from the family's conditions."""
        check_network(task, network)
        found, excess = network.map, jnp.zeros((), task.x.dtype)
        if self.name in ("GLS", "MRNS"):
            found = product(product(found, task.input_basis), task.input_basis.T)
        if self.name in MINIMAL:
            first, second = network.weights
            measured = product(task.x, first.T) if self.name == "MRNS" else first
            values, _, _ = _factors(self.name, task)
            excess = (jnp.sum(measured**2) + jnp.sum(second**2)) / (2 * jnp.sum(values)) - 1
        return Residual(
            jnp.linalg.norm(found - task.best_map) / jnp.linalg.norm(task.map_values), excess
        )

    @validated
    @eqx.filter_jit
    def project(self, task: Task, network: LinearNetwork) -> LinearNetwork:
        """Return the nearest network of MRNS or MWNS; of GLS or LSS, the nearest one with the same first layer.

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
        first, second = network.weights
        if self.name in MINIMAL:
            values, read, write = _factors(self.name, task)
            root = jnp.sqrt(values)[None]
            frame = polar(product(first, read.T * root) + product(second.T, write * root))
            unseen = product(first, task.unseen) if self.name == "MRNS" else None
            return _frame_network(task, frame, self.name, unseen)
        # Bases in place of projectors: unseen directions are cut exactly.
        basis = (
            task.input_basis if self.name == "GLS" else jnp.eye(first.shape[1], dtype=first.dtype)
        )
        read = product(first, basis)
        # What is read does not depend on the sizes of neurons; changes of weights do.
        sizes = scale_of(jnp.max(jnp.abs(read), 1, keepdims=True))
        _, values, right = jnp.linalg.svd(read / sizes, full_matrices=False)
        eps, norm = jnp.finfo(first.dtype).eps, jnp.linalg.norm(first / sizes)
        kept = values > max(first.shape) * eps * norm
        needed = product(basis.T, task.map_right)
        carried = product(jnp.where(kept[:, None], right, 0.0), needed)
        least = jnp.min(values, where=kept, initial=jnp.inf)
        slack = jnp.minimum(
            16 * eps * jnp.maximum(1.0, norm / least), eps**0.5
        )  # rounding of `right`
        missing = jnp.linalg.norm(needed - product(right.T, carried)) > slack
        wrong = product(task.best_map - network.map, basis)
        along = jnp.where(kept[None], product(read, right.T), 0.0)
        left, values, turned = jnp.linalg.svd(along, full_matrices=False)
        kept = jnp.arange(len(values)) < jnp.sum(kept)
        inverse = jnp.where(kept, 1 / jnp.where(kept, values, 1.0), 0.0)
        change = product(product(wrong, product(right.T, turned.T)) * inverse[None], left.T)
        return LinearNetwork((first, second + jnp.where(missing, jnp.nan, change)))

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


def _check_part(name: str, value: Scalar, most: int) -> None:
    if not is_traced(value) and not 0 <= float(value) <= most:
        fail(name, f"be from 0 to {most}", value)


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
    """Return the number of hidden units, or raise if a network does not have two layers of the task's sizes."""
    check_single(task)
    shapes = [weight.shape for weight in network.weights]
    inputs, outputs, hidden = task.x.shape[1], task.y.shape[1], shapes[0][0] if shapes else 0
    if shapes != [(hidden, inputs), (outputs, hidden)]:
        fail("network", f"have weights [hidden, {inputs}] and [{outputs}, hidden]", shapes)
    return hidden


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
        parts |= {
            "mixing": (rank, hidden, float(rank)),
            "readout": (task.y.shape[-1], hidden, total),
        }
        parts |= {"unseen": (hidden, unseen, total)} if name == "GLS" else {}
    return parts


def _draw(name: str, task: Task, hidden: int, key: PRNGKey, count: int) -> Array:
    """Return Gaussian numbers, [count, free parameters], in one draw, which compiles quickly."""
    size = sum(rows * columns for rows, columns, _ in _parts(name, task, hidden).values())
    return jax.random.normal(key, (count, size), task.x.dtype)


def _free(name: str, task: Task, hidden: int, spread: Scalar, drawn: Array) -> dict[str, Array]:
    """Return drawn parameters, scaled so that each part of the weights has about the norm of the task's own part."""
    free, end = {}, 0
    for part, (rows, columns, square) in _parts(name, task, hidden).items():
        end += rows * columns
        free[part] = drawn[end - rows * columns : end].reshape(rows, columns)
        if square is not None:
            free[part] *= jnp.asarray(
                spread * jnp.sqrt(square / max(rows * columns, 1)), drawn.dtype
            )
    return free


def polar(matrix: Array) -> Array:
    """Return the nearest matrix with orthonormal columns."""
    left, _, right = jnp.linalg.svd(matrix, full_matrices=False)
    return product(left, right)


def _factors(name: str, task: Task) -> tuple[Array, Array, Array]:
    """Return values [r] of a minimal family, and the bases [r, inputs] and [outputs, r] that R reads and writes."""
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
    first = first if unseen is None else first + product(unseen, task.unseen.T)
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
    skew = jnp.tril(free["skew"], -1) / task.rank**0.5 + jnp.diag(
        jnp.exp(jnp.diagonal(free["skew"]))
    )
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
        used, _ = jnp.linalg.qr(
            jnp.concatenate([frame, beside / jnp.where(size > 0, size, 1.0)[None]], 1)
        )
        readout = free["readout"] - product(product(free["readout"], used), used.T)
        second = second + readout - product(product(readout, used), used.T)
    return LinearNetwork((first, second))


@eqx.filter_jit
def _sample(name: str, task: Task, hidden: int, spread: Scalar, key: PRNGKey) -> LinearNetwork:
    return _solution(
        name, task, _free(name, task, hidden, spread, _draw(name, task, hidden, key, 1)[0])
    )


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
    return jax.vmap(lambda drawn: _solution(name, task, _free(name, task, hidden, spread, drawn)))(
        steps
    )


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
    distances, residuals = [], []
    for family in FAMILIES.values():
        nearest = family.project(task, network)
        moved = [
            jnp.sum((a - b) ** 2) for a, b in zip(nearest.weights, network.weights, strict=True)
        ]
        distances.append(jnp.sqrt(sum(moved)) / total)
        residuals.append(family.residual(task, network))
    return Placement(
        jnp.stack(distances), jax.tree.map(lambda *parts: jnp.stack(parts), *residuals)
    )


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
@eqx.filter_jit
def least_norm_network(task: Task, widths: Sequence[int], *, key: PRNGKey) -> LinearNetwork:
    """Return a random deep network of least norm with map W*, with equal singular values in all layers.

    W_1 = R_1 S^(1/l) V^T, W_i = R_i S^(1/l) R_(i-1)^T and W_l = U S^(1/l) R_(l-1)^T, with uniform
    orthonormal R_i.

    Args:
        task: Task.
        widths: Units of the hidden layers, at least `task.rank` each.
        key: Random key.
    """
    check_single(task)
    for place, width in enumerate(widths):
        check_hidden(task, width, f"widths[{place}]")
    keys = jax.random.split(key, max(len(widths), 1))
    shapes = [(width, task.rank) for width in widths]
    drawn = [
        polar(jax.random.normal(k, shape, task.x.dtype))
        for k, shape in zip(keys, shapes, strict=False)
    ]
    root = task.map_values[None] ** (1 / (len(widths) + 1))
    frames = [task.map_right, *drawn, task.map_left]
    return LinearNetwork(
        tuple(
            product(after * root, before.T)
            for before, after in zip(frames[:-1], frames[1:], strict=True)
        )
    )


@validated
def deep_residual(task: Task, network: LinearNetwork) -> Residual:
    """Return the distance of a network of any depth from those of least norm with map W*."""
    check_single(task)
    whole = network.map
    if whole.shape != task.best_map.shape:
        fail("network", f"have a map of shape {task.best_map.shape}", whole.shape)
    norm = sum(jnp.sum(weight**2) for weight in network.weights)
    missed = jnp.linalg.norm(whole - task.best_map) / jnp.linalg.norm(task.map_values)
    return Residual(missed, norm / least_norm(task, len(network.weights)) - 1)
