"""Warnings about data and options that spoil an estimator's numbers, for known values."""

import warnings
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core.checks import WrongValue, fail, is_traced, warn
from dissociation.training._machine import free_memory

# Number of rows that `warn_offset` reads, for means and variances to 3 %.
_ROWS = 1000
ROWS = 4000
"""Number of rows passed to `warn_regression`, or four per feature if that is more."""


def _warn(message: str) -> None:
    """Warn from this module, so that `warnings.filterwarnings("ignore", module="koopman")` applies."""
    warnings.warn(message, stacklevel=1)


_warn_once, _hint_once = cache(_warn), cache(warn)


def warn_float32(*arrays: Array | np.ndarray) -> None:
    """Warn, once per process, if NumPy's float64 data are computed in float32 because x64 mode is off."""
    given = any(isinstance(a, np.ndarray) and a.dtype == np.float64 for a in arrays)
    if given and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        _warn_once(
            "Data in float64 are computed in float32, which may not tell close eigenvalues apart. For float64 call "
            "jax.config.update('jax_enable_x64', True) at the start; to keep float32 pass .astype(numpy.float32)."
        )


def hint_columns(x: Array | np.ndarray, rank: Any) -> None:
    """Warn, once per process, if the operator has more directions than there are pairs."""
    # The usual cause is transposed data.
    if not any(map(is_traced, (x, rank))) and min(x.shape[1], rank or x.shape[1]) > x.shape[0]:
        _hint_once(
            "There are fewer pairs than directions of the operator, and eigenvalues of the rest are zero. If snapshots "
            "are in columns, [features, time], pass the transpose x.T; if in rows, [time, features], a lower rank is "
            "enough.",
            UserWarning,
        )


def refuse_large_gram(x: Array, matrices: int) -> None:
    """Raise if `matrices` kernel matrices k(x, x) of all states exceed the free memory."""
    try:
        wanted, free = matrices * len(x) ** 2 * x.dtype.itemsize, free_memory([] if is_traced(x) else [x])
    except WrongValue:  # the free memory is not known
        return
    if wanted > free:
        got = f"{len(x)} states, of which {matrices} matrices k(x, x) need {wanted / 1e9:.3g} GB of {free / 1e9:.3g} GB"
        fail("centres", "be given for so many states", got, "Choose some by koopman.choose_centres")


def warn_offset(x: Array | np.ndarray, name: str = "x", *, advice: str = "pass center=True") -> None:
    """Warn if a column of `x` [..., d] varies by less than the rounding of its squared mean."""
    if is_traced(x):
        return
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    eps = float(jnp.finfo(dtype).eps)
    rows = np.asarray(x).reshape(-1, x.shape[-1])
    some = rows[:: -(-rows.shape[0] // _ROWS)].astype(np.float64)
    with np.errstate(all="ignore"):
        mean, deviation = np.abs(some.mean(0)), some.std(0)
        # Columns that float32 rounds are left to `dissociation._core.conversion.warn_float32`.
        lost = (deviation < eps**0.5 * mean) & (some == some.astype(dtype)).all(0)
    # A constant column, as the function 1 in a dictionary, has no variance to lose.
    if lost.any() and (lost := lost & (np.ptp(some, 0) > 0)).any():
        worst = np.argmax(np.where(lost, mean / np.where(lost, deviation, 1.0), 0.0))
        _warn(
            f"Column {worst} of `{name}` varies by {deviation[worst]:.2g} about {mean[worst]:.2g}, and its variance is "
            f"below the rounding ({eps:.1g}) of the squared mean: {advice}."
        )


def warn_constant(x: Array, gram: Array | np.ndarray) -> None:
    """Warn if the kernel matrix `gram` [n, n] of states `x` [n, d] is nearly constant or diagonal."""
    # Nothing can be learned if all states look equal, or none has a neighbour.
    gram = np.asarray(gram)
    trace = float(np.trace(gram))
    about_mean = trace - float(np.sum(gram, dtype=np.float64)) / gram.shape[0]
    eps = float(jnp.finfo(gram.dtype).eps)
    if about_mean < 8 * eps * trace and not is_traced(x) and np.ptp(np.asarray(x), 0).any():
        _warn(
            f"k(x, x) varies about its mean by {max(about_mean, 0.0) / trace:.1g} of it, below its rounding "
            f"({8 * eps:.1g}), and all but the constant is lost: take the states about their mean, or another kernel."
        )
    sizes = np.sqrt(np.diagonal(gram))
    near = np.abs(gram) / np.maximum(sizes[:, None] * sizes, np.finfo(gram.dtype).tiny)
    np.fill_diagonal(near, 0.0)
    if len(near) > 2 and np.median(near.max(0)) < 1e-3:
        _warn(
            "k(x, x) is nearly zero between most states and all others, and nothing is learned of one from another: "
            "the length scale of the kernel is too small."
        )


def warn_large_alpha(alpha: Any, variance: Any, trace: Any, which: str, unit: Any) -> None:
    """Warn if `alpha` exceeds the variance to which it is added, and the rounding of `trace`."""
    given, held, total = (float(part) * float(unit) ** 2 for part in (alpha, variance, trace))
    if given > held and given > 1.01e-6 * total:
        _warn(
            f"`alpha` ({given:.3g}) exceeds {which} ({held:.3g}), which shrinks what it weighs on to "
            f"{held / (held + given):.2g} of its size. It is in units of C_x. alpha=None follows the data."
        )


def warn_regression(
    x: np.ndarray,
    y: np.ndarray,
    ones: np.ndarray | None,
    *,
    count: float | int,
    slack: float,
    eps: float,
    alpha: float | None,
    size: int,
) -> None:
    """Warn if `alpha` suppresses predictive directions, or if an intercept is missing, by F tests.

    `x`, `y`: Features of states and successors in the order of time, or rows with the same products, [m, d].
    `ones`: Column of ones in these rows, [m]; None for centred data.
    """
    width, largest = x.shape[1], np.abs(x).max(0)
    if alpha is None:  # rank cuts on columns of one size
        # Without `alpha` the rank must not depend on the units of the columns.
        x = x / np.where(largest > 0, largest, 1.0)
    series = (x, y) if len(x) == count else None
    if len(x) > 2 * width + 1:
        columns = [x, y, np.zeros(len(x)) if ones is None else ones]
        parts = np.asarray(np.linalg.qr(np.column_stack(columns), mode="r"))
        x, y, ones = parts[:, :width], parts[:, width:-1], None if ones is None else parts[:, -1]
    left, sizes, right = np.linalg.svd(x, full_matrices=False)
    kept = sizes > width * eps * sizes[0]
    left, sizes, right, freedom = left[:, kept], sizes[kept], right[kept], count - kept.sum()
    held = left.T @ y
    rest, floor = y - left @ held, (8 * eps) ** 2 * np.sum(y**2)
    share = alpha / (sizes**2 / count + alpha) if alpha else np.zeros(len(sizes))
    suppressed = (share**4 > 0.01) & (np.arange(len(sizes)) < size)
    if freedom >= 1 and suppressed.any():
        ratio = np.mean(np.sum(held[suppressed] ** 2, 1)) / max(np.sum(rest**2) / freedom, floor)
        if ratio > 10:
            _warn(
                f"`alpha` ({alpha:.3g}) suppresses {suppressed.sum()} directions of the features that predict (F = "
                f"{ratio:.2g}): forecasts and eigenvalues are not those of the data. Lower it, or leave it out."
            )
    if ones is None or freedom < 2:
        return
    left_over = ones - left @ (left.T @ ones)
    if left_over @ left_over > slack * count:
        gain = np.sum((left_over @ rest) ** 2) / (left_over @ left_over)
        ratio = gain / max((np.sum(rest**2) - gain) / (freedom - 1), floor)
        # Residuals of overlapping pairs depend on each other, so the variance is taken over blocks of rows.
        if ratio > 25 and series is not None:
            scores = series[0] @ (right.T / sizes)
            missing = 1 - scores @ (left.T @ ones)
            found = (left_over @ rest) / (left_over @ left_over)
            off = missing[:, None] * (series[1] - scores @ held - missing[:, None] * found)
            blocks = np.add.reduceat(off, np.linspace(0, count, int(count**0.5), endpoint=False).astype(int))
            square = np.sum((left_over @ rest) ** 2)
            ratio = min(ratio, square / max(np.sum(blocks**2), floor * (left_over @ left_over)))
        if ratio > 25:
            _warn(
                f"A column of ones lowers the squared residual of one step by {100 * gain / np.sum(rest**2):.2g} % "
                f"(F = {ratio:.2g}), as for data with an offset, which spoils eigenvalues and forecasts. If they have "
                "one, pass center=True, which carries an intercept. It needs explicit features: no `kernel`."
            )


def warn_small_columns(squares: Any, alpha: Any) -> None:
    """Warn of columns so small that the default `alpha`, in proportion to all columns, suppresses them."""
    hidden = np.flatnonzero((np.asarray(squares) > 0) & (np.asarray(squares) < 3 * float(alpha)))
    if len(hidden):
        _warn(
            f"Column {hidden[0]} of `x` is too small beside the largest for the default `alpha` ({len(hidden)} such): "
            "principal components are taken in the units of the columns. Bring them to one size."
        )


def warn_directions(operator: Any, basis: Any, cutoff: float, asked: Any) -> None:
    """Warn of latent functions that are missing, chosen by rounding, or not orthonormal.

    `asked`: Rank of the estimator. Singular values of `basis` below `cutoff` times the largest are zero.
    """
    rank, held = operator.core.shape[0], int(operator.effective_rank)
    if asked is not None and held < rank:
        _warn(
            f"`rank` ({rank}) exceeds the {held} directions that the data hold in {operator.core.dtype}: the other "
            f"{rank - held} latent functions are zero or rounding. Lower it to {held}."
        )
    _warn_tied(np.asarray(basis.values), np.asarray(basis.rest), cutoff)
    seen = np.asarray(operator.gram_x)
    gram = seen + np.asarray(operator.penalty)
    # U^T C_x U + B is the identity, except for unused columns. Directions are weighted by what `alpha` leaves of them,
    # because the smallest ones of ridge regression are rounding.
    weight = np.sqrt(np.abs(np.diagonal(seen)))
    error = (np.abs(gram - np.diag(np.diagonal(gram) > 0)) * weight[:, None] * weight[None]).max()
    if not error <= 1e-2:  # or it is NaN
        _warn(
            f"Latent functions are orthonormal only to {error:.1g}, for the rounding of {gram.dtype} outweighs "
            "`alpha`; eigenvalues may be off by as much. Raise `alpha`, take another solver or route, or enable x64."
        )


def _warn_tied(values: np.ndarray, rest: np.ndarray, cutoff: float) -> None:
    """Warn if the rank separates equal singular values, so that rounding chooses the directions."""
    if not rest.size or values[-1] <= cutoff * values[0]:
        return
    tolerance = np.finfo(values.dtype).eps ** 0.75 * values[-1]
    if values[-1] - rest[0] > tolerance:
        return
    rank = len(values)
    above, below = int((rest >= values[-1] - tolerance).sum()), int((values > values[-1] + tolerance).sum())
    ranks = [str(rank + above)] * (above < len(rest)) + [str(below)] * (below > 0)
    _warn(
        f"Singular values {rank} and {rank + 1} agree ({values[-1]:.6g}, gap {abs(values[-1] - rest[0]):.1g}): at rank "
        f"{rank} rounding chooses which directions stay, and eigenvalues are lost. Use rank "
        f"{' or '.join(ranks) or f'{rank + above} or more'}."
    )


def warn_unconverged(residual: Array | None, eps: float) -> None:
    """Warn if the residual of an iterative solver exceeds the fourth root of the rounding unit."""
    # Eigenvalues then have less than half of their digits.
    if residual is not None and not is_traced(residual) and float(residual) > eps**0.25:
        _warn(f"The Krylov solver ended with a relative residual of {float(residual):.1g}; take the dense one.")
