"""Rows of features: delays, features of a state, kernels, and a basis of their span."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Int

from dissociation._core.checks import check_takes, fail, fail_kind
from dissociation._core.linalg import product
from koopman._operators._estimators import Estimator
from koopman._operators._findings import refuse_large_gram
from koopman._operators._kernels import KernelMap, Linear, as_module, nystroem_map

Rows = Float[np.ndarray, "_ _"]


class PlainFeatures(eqx.Module):
    """Plain function as features of a state."""

    # Static, so that `jax.jit` takes models that hold it.
    function: Callable[[Array], Any] = eqx.field(static=True)

    def __call__(self, state: Array) -> Any:
        return self.function(state)


class StateBasis(eqx.Module):
    """Orthonormal basis of the span of states that have more columns than there are rows.

    Attributes:
        scale: Divisors of the columns, powers of two: [d].
        vectors: Basis of the scaled columns, [d, c].
    """

    scale: Float[Array | np.ndarray, " d"]
    vectors: Float[Array | np.ndarray, "d c"]

    def coordinates(self, states: Float[Array | np.ndarray, "n d"]) -> Any:
        """Return coordinates of states, [n, c]."""
        return (states / self.scale[None]) @ self.vectors

    def states(self, coordinates: Inexact[Array | np.ndarray, "*n c"]) -> Any:
        """Return states of coordinates, [..., d]."""
        return coordinates @ (self.vectors.T * self.scale[None])


class Lifting(eqx.Module):
    """Map of the last `num_delays` states to features.

    Attributes:
        features: Features of one state, or None.
        state_basis: Basis of wide states, or None.
        kernel_map: Features of a kernel, or None.
        offset: Mean of the rows, zero without an intercept: [F].
        basis: Orthonormal directions of the rows in units of the columns, [F, r].
        num_delays: Number of states in a row.
        state_shape: Shape of one state.
    """

    features: Any
    state_basis: StateBasis | None
    kernel_map: KernelMap | None
    offset: Any
    basis: Any
    num_delays: int = eqx.field(static=True)
    state_shape: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, past: Float[Array | np.ndarray, "n delays *state"]) -> Float[Array, "n r"]:
        """Return features of states in the order of time."""
        past = jnp.asarray(past, self.basis.dtype)
        num_rows = past.shape[0]
        wanted_shape = (self.num_delays, *self.state_shape)
        if past.shape[1:] != wanted_shape and past.shape[1:] != wanted_shape[:1]:
            fail("past", f"have shape [n, {', '.join(map(str, wanted_shape))}]", past.shape)
        states = past.reshape(num_rows * self.num_delays, -1)
        coordinates = self.coordinates(states).reshape(num_rows, self.num_delays, -1)
        rows = coordinates[:, ::-1].reshape(num_rows, -1)
        return self.project(rows)

    def coordinates(self, states: Float[Array, "n d"]) -> Array:
        """Return features of single states."""
        if self.state_basis is not None:
            return self.state_basis.coordinates(states)
        if self.features is None:
            return states
        shaped = states.reshape(-1, *self.state_shape)
        return jax.vmap(self.features)(shaped).reshape(len(shaped), -1)

    def project(self, rows: Float[Array | np.ndarray, "n F"]) -> Array:
        """Return features of rows of delays."""
        if self.kernel_map is not None:
            rows = self.kernel_map(rows)
        return _projected(rows, self.offset, self.basis)


@jax.jit
def _projected(rows: Array, offset: Array, basis: Array) -> Array:
    return product(rows - offset[None], basis)


class Lifted(NamedTuple):
    """Rows of all times and pieces in an orthonormal basis.

    Attributes:
        lifting: Map from the past to features.
        rows: Features over `scale`, about 1 in size: [rows, r].
        scale: Root mean squares of the features, [r].
        sizes: Root mean squares along all directions, [k].
        alpha: Tikhonov regularisation in units of the features.
        lengths: Number of rows of every piece.
        squares: Mean squares of the columns before the basis, [F].
    """

    lifting: Lifting
    rows: Any
    scale: Any
    sizes: Any
    alpha: Any
    lengths: Any
    squares: Any


def pair_indices(
    lengths: Sequence[int], lag: int
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Return the row numbers of states and of their successors."""
    starts = np.cumsum([0, *lengths[:-1]])
    rows = [start + np.arange(max(n - lag, 0)) for start, n in zip(starts, lengths, strict=True)]
    states = np.concatenate(rows)
    return states, states + lag


def next_power(count: int) -> int:
    """Return the next power of two."""
    return 1 << max(count - 1, 1).bit_length()


def padded(rows: Float[np.ndarray, "n *d"]) -> np.ndarray:
    """Return rows up to a power of two, with copies of the last one.

    Programs are then compiled for few numbers of rows.
    """
    num_missing = next_power(len(rows)) - len(rows)
    return np.concatenate([rows, np.repeat(rows[-1:], num_missing, 0)])


def delay_rows(
    values: Float[np.ndarray, "n f"], lengths: Sequence[int], num_delays: int, span: int = 1
) -> tuple[Rows, list[int]]:
    """Return rows (c_t, c_{t-1}, ...) of every piece, and the numbers of rows.

    The first row of a piece ends at its state number `span`, if this is above `num_delays`.
    """
    span = max(span, num_delays)
    if span == 1:
        return values, list(lengths)
    blocks = []
    for piece in np.split(values, np.cumsum(lengths)[:-1]):
        num_rows = max(len(piece) - span + 1, 0)
        newest = np.arange(span - 1, span - 1 + num_rows)
        indices = newest[:, None] - np.arange(num_delays)
        blocks.append(piece[indices].reshape(num_rows, -1))
    return np.concatenate(blocks), list(map(len, blocks))


def working_dtype() -> Any:
    """Return the dtype in which JAX computes floats."""
    return jax.dtypes.canonicalize_dtype(np.float64)


def as_features(features: Any) -> Any:
    """Return features as a module."""
    if features is None:
        return None
    if not callable(features):
        fail_kind("features", "be a function of one state", type(features).__name__)
    is_leaf = jax.tree.structure(features) == jax.tree.structure(0)
    return PlainFeatures(features) if is_leaf else features


def state_features(
    features: Any, states: Float[np.ndarray, "n d"], state_shape: tuple[int, ...]
) -> Rows:
    """Return features of every state, [n, f], by one program."""
    shaped = padded(states.astype(working_dtype())).reshape(-1, *state_shape)
    check_takes("features", features, shaped[0])
    values = np.asarray(_mapped(features, shaped))[: len(states)].reshape(len(states), -1)
    is_finite = np.isfinite(values).all(1)
    if not is_finite.all():
        row = int(np.argmin(is_finite))
        fail(
            "features",
            "return finite numbers for all states",
            f"{values[row][~np.isfinite(values[row])][0]} for state {row}",
            "Change the function, for example its logarithms and quotients",
        )
    return values.astype(float)


@eqx.filter_jit
def _mapped(features: Any, states: Any) -> Array:
    return jax.vmap(features)(states)


def has_levels(estimator: Estimator, width: int) -> bool:
    """Return True if a fit first divides columns by powers of two near their sizes."""
    # The columns of the successors, which reduced rank regression compares, keep their units.
    is_full = estimator.rank is None or estimator.size == width
    return (
        is_full
        and not estimator.inverts_all
        and (estimator.alpha is None or float(estimator.alpha) == 0.0)
    )


def column_levels(columns: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " d"]:
    """Return powers of two near the sizes of columns, as in `fit`; 1 for columns of zeros."""
    largest = np.abs(columns).max(0)
    return np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1.0))))


def basis_of_states(runs: Sequence[Rows], lag: int, is_levelled: bool) -> StateBasis:
    """Return a basis of the states of pieces, wider than they are long."""
    states = np.concatenate(runs)
    scale = np.ones(states.shape[1])
    if is_levelled:
        predictors = states[pair_indices(list(map(len, runs)), lag)[0]]
        mean = predictors.mean(0)
        deviations = np.abs(predictors - mean).max(0)
        is_constant = deviations <= 4 * np.finfo(working_dtype()).eps * np.abs(mean)
        sizes = np.where(is_constant, np.abs(mean), deviations)
        scale = column_levels(sizes[None] / len(predictors) ** 0.5)
    return StateBasis(scale, np.linalg.qr((states / scale).T)[0])


class Recipe(eqx.Module):
    """Choices of a lifting.

    Attributes:
        estimator: Estimator, whose `alpha` and rank choose the units of columns.
        features: Features of a state, or None.
        state_basis: Basis of wide states, or None.
        kernel: Kernel, or None.
        centres: Centres of the kernel, or None for all states.
        lag: Steps from x to y.
        num_delays: Number of states in a row.
        num_input_delays: Number of inputs in a row, 0 without inputs.
        center: If True, there is an intercept.
        state_shape: Shape of one state.
    """

    estimator: Estimator
    features: Any
    state_basis: StateBasis | None
    kernel: Any
    centres: Any
    lag: int = eqx.field(static=True)
    num_delays: int = eqx.field(static=True)
    num_input_delays: int = eqx.field(static=True)
    center: bool = eqx.field(static=True)
    state_shape: tuple[int, ...] = eqx.field(static=True)

    @property
    def span(self) -> int:
        """Return the number of times in a row."""
        return max(self.num_delays, self.num_input_delays)


def lift_rows(
    recipe: Recipe,
    coordinates: Float[np.ndarray, "n f"],
    lengths: Sequence[int],
    inputs: Rows | None = None,
) -> Lifted:
    """Return all rows in an orthonormal basis of those that have successors.

    Args:
        recipe: Choices of the lifting.
        coordinates: Features of every state, by piece and time.
        lengths: Number of states of every piece.
        inputs: Inputs at the times of the states, or None.
    """
    span = recipe.span
    rows, num_rows = delay_rows(coordinates, lengths, recipe.num_delays, span)
    if inputs is not None:
        input_rows, _ = delay_rows(inputs, lengths, recipe.num_input_delays, span)
        rows = np.concatenate([rows, input_rows], 1)
    states, _ = pair_indices(num_rows, recipe.lag)
    if len(states) < 2:
        fail("trajectories", "hold at least two pairs", len(states), "Record longer")
    kernel_map = None
    if recipe.kernel is not None:
        kernel_map = _kernel_map(recipe, rows[states])
        rows = np.asarray(kernel_map(padded(rows).astype(working_dtype())))[: len(rows)]
        rows = rows.astype(float)
    x = rows if len(states) == len(rows) - recipe.lag else rows[states]
    x = x[: len(states)]
    num_pairs = len(states)
    eps = float(np.finfo(working_dtype()).eps)
    offset = x.mean(0) if recipe.center else np.zeros(rows.shape[1])
    centred = x - offset
    # A constant column about its mean is rounding.
    is_constant = np.sqrt(np.mean(centred**2, 0)) < 4 * eps * np.abs(offset)
    centred[:, is_constant] = 0.0
    squares = np.mean(centred**2, 0)
    levels = np.ones(rows.shape[1])
    is_free = kernel_map is None and recipe.state_basis is None
    if is_free and has_levels(recipe.estimator, rows.shape[1]):
        levels = column_levels(centred / num_pairs**0.5)
        centred = centred / levels
    trace = float(np.sum(squares / levels**2))
    if recipe.estimator.inverts_all:
        # Reduced rank regression weighs directions of the successors, too.
        centred = rows - offset
    sizes, vectors = _directions(centred)
    sizes = sizes / len(centred) ** 0.5
    is_retained = sizes > max(centred.shape) * eps * sizes[0]
    if not sizes[0] > 0:
        fail("trajectories", "hold states that vary", "constant ones alone")
    basis = vectors[:, is_retained] / levels[:, None]
    basis[is_constant] = 0.0
    scale = sizes[is_retained]

    dtype = working_dtype()
    lifting = Lifting(
        recipe.features,
        recipe.state_basis,
        kernel_map,
        offset.astype(dtype),
        basis.astype(dtype),
        recipe.num_delays,
        recipe.state_shape,
    )
    alpha = _alpha(recipe, trace, min(num_pairs, rows.shape[1]))
    scaled = ((rows - offset) @ (basis / scale)).astype(dtype)
    numbers = (np.asarray(alpha), np.asarray(num_rows))
    return Lifted(lifting, scaled, scale, sizes, *numbers, squares)


def _directions(rows: Rows) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, "F k"]]:
    """Return singular values, and right singular vectors in columns."""
    if len(rows) > 2 * rows.shape[1]:
        rows = np.asarray(np.linalg.qr(rows, mode="r"))
    _, sizes, vectors = np.linalg.svd(rows, full_matrices=False)
    return sizes, vectors.T


def _alpha(recipe: Recipe, trace: float, rank: int) -> float:
    """Return the regularisation: that of the estimator, or the default of `koopman.fit`."""
    if recipe.estimator.alpha is not None:
        return float(recipe.estimator.alpha)
    eps = float(np.finfo(working_dtype()).eps)
    if recipe.kernel is not None:
        return (8 * eps if type(recipe.kernel) is Linear else 1e-6) * trace
    return max((rank * eps) ** 2, rank * 2.0**-52) * trace


def _kernel_map(recipe: Recipe, states: Rows) -> KernelMap:
    """Return features of a kernel on its centres, by default all states."""
    dtype = working_dtype()
    centres = recipe.centres
    if centres is None:
        refuse_large_gram(jnp.zeros((len(states), 0), dtype), 4)
        centres = states
    else:
        centres = np.asarray(centres, float)
        centres = centres.reshape(len(centres), -1)
        if centres.shape[1] * 2 == states.shape[1]:
            # Centres of the check with twice the delays: rows that end nearest to the centres.
            newest = states[:, : centres.shape[1]]
            distances = np.sum(newest**2, 1) - 2 * centres @ newest.T
            centres = states[np.unique(np.argmin(distances, 1))]
        elif centres.shape[1] != states.shape[1]:
            fail(
                "centres",
                f"have shape [m, {states.shape[1]}], a row of delays, newest state first",
                np.shape(recipe.centres),
            )
    return nystroem_map(as_module(recipe.kernel), centres.astype(dtype))


def threshold_rank(sizes: Float[np.ndarray, " k"], num_rows: int, num_columns: int) -> int:
    """Return the number of singular values above w(beta) times their median, at least 1.

    w = 0.56 b^3 - 0.95 b^2 + 1.82 b + 1.43 with b = shorter / longer side.

    Source: Gavish and Donoho (2014), The optimal hard threshold for singular values is 4/sqrt(3),
    eq. 5.
    """
    shorter = min(num_rows, num_columns)
    longer = max(num_rows, num_columns)
    beta = shorter / longer
    factor = 0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43
    median = np.median(np.pad(sizes, (0, max(shorter - len(sizes), 0))))
    floor = longer * float(np.finfo(working_dtype()).eps) * sizes[0]
    return max(1, int((sizes > max(factor * median, floor)).sum()))
