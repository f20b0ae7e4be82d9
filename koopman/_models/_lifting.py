"""Rows of features: delays, features of a state, kernels, and a basis of their span."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import qr

from dissociation._core.checks import check_takes, fail, fail_kind
from dissociation._core.linalg import product
from koopman._operators._estimators import Estimator
from koopman._operators._findings import refuse_large_gram
from koopman._operators._kernels import KernelMap, Linear, nystroem_map


class PlainFeatures(eqx.Module):
    """Plain function as features of a state."""

    # Static, so that `jax.jit` takes models that hold it.
    function: Callable[[Array], Any] = eqx.field(static=True)

    def __call__(self, state: Array) -> Any:
        return self.function(state)


class StateBasis(eqx.Module):
    """Basis of the span of states that have more columns than there are rows.

    It is orthonormal in columns that are divided by their sizes.

    Attributes:
        vectors: Basis of the states, [d, c].
        dual: Matrix from states to coordinates, [d, c]; `vectors` itself if all sizes are 1.
        root: Matrix R that takes coordinates to columns of one size up to a rotation, [c, c].
    """

    vectors: Any
    dual: Any
    root: Any

    def coordinates(self, states: Any) -> Any:
        """Return coordinates of states, [n, c]."""
        return states @ self.dual

    def states(self, coordinates: Any) -> Any:
        """Return states of coordinates, [..., d]."""
        if np.iscomplexobj(coordinates):
            # Products of complex and real numbers copy the vectors.
            return self.states(coordinates.real) + 1j * self.states(coordinates.imag)
        return coordinates @ self.vectors.T

    def blocks(self) -> list["StateBasis"]:
        """Return bases of successive columns, whose states are small."""
        return [StateBasis(block, block, self.root) for block in column_blocks(self.vectors)]


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
        shape = (len(past), self.num_delays, *self.state_shape)
        if past.shape != shape and past.shape != shape[:2]:
            fail("past", f"have shape {list(shape)}", past.shape)
        states = past[:, ::-1].reshape(shape[0] * shape[1], -1)
        return self.project(self.coordinates(states).reshape(len(past), -1))

    def coordinates(self, states: Array) -> Array:
        """Return features of single states."""
        if self.state_basis is not None:
            return self.state_basis.coordinates(states)
        if self.features is None:
            return states
        values = _mapped(self.features, states.reshape(-1, *self.state_shape))
        return values.reshape(len(states), -1)

    def project(self, rows: Array | np.ndarray) -> Array:
        """Return features of rows of delays."""
        if self.kernel_map is not None:
            rows = self.kernel_map(rows)
        return _projected(rows, self.offset, self.basis)


@jax.jit
def _projected(rows: Array, offset: Array, basis: Array) -> Array:
    return product(rows - offset[None], basis)


class Lifted(eqx.Module):
    """Rows of all times and pieces in an orthonormal basis.

    Attributes:
        lifting: Map from the past to features.
        rows: Features over `scale`, about 1 in size: [rows, r].
        scale: Root mean squares of the features, [r].
        sizes: Root mean squares along all directions, [k].
        alpha: Tikhonov regularisation in units of the features.
        lengths: Number of rows of every piece.
        squares: Mean squares of the columns before the basis, [F].
        metric: Matrix from features to those of columns of one size, [r, r], or None. Reduced rank
            regression takes states in these units and successors in their own.
    """

    lifting: Lifting
    rows: Any
    scale: Any
    sizes: Any
    alpha: Any
    lengths: Any
    squares: Any
    metric: Any


def pair_indices(lengths: Sequence[int], lag: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers of states and of their successors."""
    starts = np.cumsum([0, *lengths[:-1]])
    rows = [start + np.arange(max(n - lag, 0)) for start, n in zip(starts, lengths, strict=True)]
    states = np.concatenate(rows)
    return states, states + lag


def next_power(count: int) -> int:
    """Return the next power of two."""
    return 1 << max(count - 1, 1).bit_length()


def padded(rows: np.ndarray) -> np.ndarray:
    """Return rows up to a power of two, with copies of the last one.

    Programs are then compiled for few numbers of rows.
    """
    num_missing = next_power(len(rows)) - len(rows)
    return np.concatenate([rows, np.repeat(rows[-1:], num_missing, 0)])


def delay_rows(
    values: np.ndarray, lengths: Sequence[int], num_delays: int, span: int = 1
) -> tuple[np.ndarray, list[int]]:
    """Return rows (c_t, c_{t-1}, ...) of every piece, and the numbers of rows.

    The first row of a piece ends at its state number `span`, if this is above `num_delays`.
    """
    span = max(span, num_delays)
    if span == 1:
        return values, list(lengths)
    num_rows = [max(length - span + 1, 0) for length in lengths]
    newest = np.concatenate([np.arange(number) for number in num_rows])
    first = np.cumsum([0, *lengths[:-1]]) + span - 1
    newest = newest + np.repeat(first, num_rows)
    indices = newest[:, None] - np.arange(num_delays)
    width = num_delays * values.shape[1]
    return values[indices].reshape(len(newest), width), num_rows


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


def state_features(features: Any, states: np.ndarray, state_shape: tuple[int, ...]) -> np.ndarray:
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
    is_full = estimator.rank is None or estimator.size == width
    return (is_full or estimator.inverts_all) and not estimator.alpha


def column_levels(columns: np.ndarray) -> np.ndarray:
    """Return powers of two near the sizes of columns, as in `fit`; 1 for columns of zeros."""
    largest = np.abs(columns).max(0)
    return np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1.0))))


def _constant_columns(centred: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return True for columns that are rounding about their mean."""
    eps = np.finfo(working_dtype()).eps
    return np.sqrt(np.mean(centred**2, 0)) < 4 * eps * np.abs(mean)


def basis_of_states(runs: Sequence[np.ndarray], lag: int, estimator: Estimator) -> StateBasis:
    """Return a basis of the states of pieces, wider than they are long."""
    # LAPACK takes and returns this one copy, by columns.
    states = np.concatenate(runs).T
    width, num_rows = states.shape
    identity = np.eye(num_rows)
    if not has_levels(estimator, width):
        vectors = _orthonormal(states)
        return StateBasis(vectors, vectors, identity)
    predictors, _ = pair_indices(list(map(len, runs)), lag)
    scale = np.concatenate([_levels(block[:, predictors].T) for block in column_blocks(states)])
    if not estimator.inverts_all:
        states /= scale[:, None]
        vectors = _orthonormal(states)
        return StateBasis(vectors * scale[:, None], vectors / scale[:, None], identity)
    vectors = _orthonormal(states)
    root = identity[:0]
    for block, sizes in zip(column_blocks(vectors), column_blocks(scale), strict=True):
        root = np.linalg.qr(np.concatenate([root, block / sizes[:, None]]), mode="r")
    return StateBasis(vectors, vectors, root)


def column_blocks(columns: np.ndarray) -> list[np.ndarray]:
    """Return blocks of columns of states, [d, ...], whose copies are small."""
    return np.array_split(columns, -(-len(columns) // 1024))


def _orthonormal(vectors: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of columns, in place of them."""
    factors: Any = qr(vectors, overwrite_a=True, mode="economic", check_finite=False)
    return factors[0]


def _levels(predictors: np.ndarray) -> np.ndarray:
    """Return divisors of columns, powers of two near their sizes about their means."""
    mean = predictors.mean(0)
    centred = predictors - mean
    sizes = np.where(_constant_columns(centred, mean), np.abs(mean), np.abs(centred).max(0))
    return column_levels(sizes[None] / len(predictors) ** 0.5)


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
    recipe: Recipe, features: np.ndarray, lengths: Sequence[int], inputs: np.ndarray
) -> Lifted:
    """Return all rows in an orthonormal basis of those that have successors.

    Args:
        recipe: Choices of the lifting.
        features: Features of every state, by piece and time.
        lengths: Number of states of every piece.
        inputs: Inputs at the times of the states.
    """
    delayed, num_rows = delay_rows(features, lengths, recipe.num_delays, recipe.span)
    input_rows, _ = delay_rows(inputs, lengths, recipe.num_input_delays, recipe.span)
    rows = np.concatenate([delayed, input_rows], 1)
    states, _ = pair_indices(num_rows, recipe.lag)
    num_pairs = len(states)
    if num_pairs < 2:
        fail("trajectories", "hold at least two pairs", num_pairs, "Record longer")
    dtype = working_dtype()
    kernel_map = None
    if recipe.kernel is not None:
        kernel_map = _kernel_map(recipe, rows[states])
        rows = np.asarray(kernel_map(padded(rows).astype(dtype)))[: len(rows)].astype(float)
    offset = np.zeros(rows.shape[1])
    if recipe.center:
        offset = rows[states].mean(0)
    centred = rows[states] - offset
    is_constant = _constant_columns(centred, offset)
    centred[:, is_constant] = 0.0
    squares = np.mean(centred**2, 0)
    levels = np.ones(rows.shape[1])
    is_free = kernel_map is None and recipe.state_basis is None
    if is_free and has_levels(recipe.estimator, rows.shape[1]):
        levels = column_levels(centred / num_pairs**0.5)
    trace = float(np.sum(squares / levels**2))
    centred = centred / levels
    if recipe.estimator.inverts_all:
        # Reduced rank regression weighs directions of the successors, too.
        centred = rows - offset
    sizes, vectors = _directions(centred)
    sizes = sizes / len(centred) ** 0.5
    if not sizes[0] > 0:
        fail("trajectories", "hold states that vary", "constant ones alone")
    is_retained = sizes > max(centred.shape) * float(np.finfo(dtype).eps) * sizes[0]
    basis = vectors[:, is_retained]
    basis[is_constant] = 0.0
    scaled_basis = basis / levels[:, None]
    metric = None
    if not recipe.estimator.inverts_all:
        basis = scaled_basis
    elif kernel_map is None and not recipe.estimator.alpha:
        if recipe.state_basis is not None:
            root = np.kron(np.eye(recipe.num_delays), recipe.state_basis.root)
            scaled_basis = root @ basis
            trace = float(np.sum(((rows[states] - offset) @ root.T) ** 2)) / num_pairs
        metric = np.linalg.cholesky(scaled_basis.T @ scaled_basis)
    scale = sizes[is_retained]
    lifting = Lifting(
        recipe.features,
        recipe.state_basis,
        kernel_map,
        offset.astype(dtype),
        basis.astype(dtype),
        recipe.num_delays,
        recipe.state_shape,
    )
    scaled = ((rows - offset) @ (basis / scale)).astype(dtype)
    alpha = np.asarray(_alpha(recipe, trace, min(num_pairs, rows.shape[1])))
    return Lifted(lifting, scaled, scale, sizes, alpha, np.asarray(num_rows), squares, metric)


def _directions(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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


def _kernel_map(recipe: Recipe, states: np.ndarray) -> KernelMap:
    """Return features of a kernel on its centres, by default all states."""
    dtype = working_dtype()
    centres = states
    if recipe.centres is None:
        refuse_large_gram(jnp.zeros((len(states), 0), dtype), 4)
    else:
        centres = np.asarray(recipe.centres, float).reshape(len(recipe.centres), -1)
    width = centres.shape[1]
    if 2 * width == states.shape[1]:
        # Centres of the check with twice the delays: rows that end nearest to the centres.
        newest = states[:, :width]
        distances = np.sum(newest**2, 1) - 2 * centres @ newest.T
        centres = states[np.unique(np.argmin(distances, 1))]
    return nystroem_map(recipe.kernel, centres.astype(dtype))


def threshold_rank(sizes: np.ndarray, num_rows: int, num_columns: int) -> int:
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
