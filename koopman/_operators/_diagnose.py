"""Findings on what spoils the numbers of a fitted operator, from the operator and its pairs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_finite, fail, is_traced
from dissociation._core.splits import permutation
from dissociation._core.validation import validated
from koopman._operators._findings import (
    Finding,
    kernel_findings,
    large_alpha,
    lost_variance,
    unconverged,
)
from koopman._operators._kernels import KernelMap, Linear, gram
from koopman._operators._numerics import rounding_unit
from koopman._operators._operator import Fitting, Operator
from koopman._operators._pairs import Moments

ROWS = 4000
"""Largest number of rows of a regression on few features."""
_OPERATIONS = 2e9
"""Largest number of operations of a regression on many features."""
_QUICK_SVD = 128
"""Number of columns above which an eigendecomposition is several times faster than an SVD."""
_SMALL_SQUARE = 1e-8
"""Relative size of an eigenvalue of x^T x below which its vector is not accurate."""


@validated
def diagnose(
    operator: Operator,
    x: Float[Array | np.ndarray, "n d"] | Moments,
    y: Float[Array | np.ndarray, "n d"] | None = None,
) -> tuple[Finding, ...]:
    """Return what spoils the eigenvalues and forecasts of an operator.

    `fit` calls it for known arrays, and warns of each finding. Inside of `jit` nothing is
    diagnosed.

    Args:
        operator: Result of `fit`, one operator.
        x: States, features or moments that `fit` took.
        y: Successors that `fit` took; None for moments.

    Returns:
        Findings, none if nothing was found. Their names are "unconverged" (an iterative solver),
        "large_alpha" (above the variance on which it weighs), "small_columns" (which the default
        alpha suppresses), "few_directions" (fewer than the rank), "equal_values" (that the rank
        separates), "rounding" (which outweighs alpha), "few_pairs", "lost_variance" (of a column,
        below the rounding of its squared mean), "constant_kernel", "narrow_kernel",
        "suppressed_directions" (that predict), and "missing_intercept". The last two are F tests
        (above 10 and 25) on at most some thousand pairs.

    Raises:
        ValueError: If the operator is traced or one of a stack, or data are not finite or not of
            the fit.
    """
    if is_traced(operator.core) or operator.core.ndim != 2:
        advice = "Diagnose outside of jit, and each operator of a vmap by itself"
        fail("operator", "be one known operator", f"`core` of shape {operator.core.shape}", advice)
    encode = operator.encode
    is_kernel = isinstance(encode, KernelMap)
    if not isinstance(x, Moments):
        if y is None:
            fail("y", "be given with `x`", "None")
        check_finite("x", x)
        check_finite("y", y)
        width = x.shape[1]
    elif is_kernel:
        fail("x", "be the states of a fit with a kernel", "moments")
    elif y is not None:
        fail("y", "be None with moments, which hold successors", f"shape {y.shape}")
    else:
        width = x.widths[0]
    fitted = encode.centres.shape[1] if is_kernel else encode.matrix.shape[0]
    if width != fitted:
        fail("x", f"have {fitted} columns, as the operator was fitted", width)
    return tuple(findings_of(operator, x, y))


def findings_of(operator: Operator, x: Any, y: Any) -> Iterator[Finding]:
    """Yield the findings that `diagnose` returns."""
    fitting = operator.fitting
    if fitting is not None:
        yield from _findings_of_fit(operator, fitting)
    if isinstance(x, Moments):
        yield from _regression(operator, _rows_of_moments(x))
        return

    encode = operator.encode
    if not isinstance(encode, KernelMap):
        is_centred = fitting is not None and fitting.settings.is_centred
        if not is_centred:
            yield from lost_variance(x)
        rank = operator.core.shape[0]
        if rank > x.shape[0]:
            sentence = (
                "There are fewer pairs than directions of the operator, and eigenvalues of "
                "the rest are zero."
            )
            advice = (
                "If snapshots are in columns, [features, time], pass the transpose x.T; if in "
                "rows, [time, features], a lower rank is enough."
            )
            numbers = {"pairs": float(x.shape[0]), "rank": float(rank)}
            yield Finding("few_pairs", numbers, sentence, advice)
        yield from _regression(operator, _rows_of_pairs(x, y, is_centred))
        return

    centres = encode.centres
    if len(centres) == len(x):
        yield from kernel_findings(centres, gram(encode.kernel, centres, centres))
    # The span of few centres, or of few states, is not that of the features.
    width = x.shape[1]
    if type(encode.kernel) is Linear and width < len(x) and width <= len(centres):
        yield from _regression(operator, _rows_of_pairs(x, y, is_centred=False))


def _findings_of_fit(operator: Operator, fitting: Fitting) -> Iterator[Finding]:
    """Yield findings on solver, `alpha`, columns, rank and rounding."""
    settings = fitting.settings
    alpha = float(operator.alpha)
    yield from unconverged(fitting.residual, rounding_unit(operator.core))
    if settings.compared:
        yield from large_alpha(alpha, fitting.variance, fitting.trace, settings.compared)

    squares = np.asarray(0.0 if fitting.squares is None else fitting.squares)
    columns = np.flatnonzero((squares > 0) & (squares < 3 * alpha))
    if len(columns):
        sentence = (
            f"Column {columns[0]} of `x` is too small beside the largest for the default `alpha` "
            f"({len(columns)} such): "
            "principal components are taken in the units of the columns."
        )
        numbers = {"column": float(columns[0]), "columns": float(len(columns))}
        yield Finding("small_columns", numbers, sentence, "Bring them to one size.")

    rank = operator.core.shape[0]
    num_directions = int(operator.effective_rank)
    if settings.has_rank and num_directions < rank:
        sentence = (
            f"`rank` ({rank}) exceeds the {num_directions} directions that the data hold in "
            f"{operator.core.dtype}: the other "
            f"{rank - num_directions} latent functions are zero or rounding."
        )
        numbers = {"rank": float(rank), "directions": float(num_directions)}
        yield Finding("few_directions", numbers, sentence, f"Lower it to {num_directions}.")
    yield from _equal_values(operator, fitting)
    yield from _rounding(operator)


def _equal_values(operator: Operator, fitting: Fitting) -> Iterator[Finding]:
    """Yield a finding if the rank separates equal singular values.

    Rounding then chooses the directions.
    """
    values = np.asarray(operator.singular_values)
    trailing_values = np.asarray(fitting.trailing_values)
    last = values[-1]
    if not trailing_values.size or last <= float(fitting.cutoff) * values[0]:
        return
    tolerance = np.finfo(values.dtype).eps ** 0.75 * last
    if last - trailing_values[0] > tolerance:
        return

    rank = len(values)
    gap = abs(last - trailing_values[0])
    num_above = int((trailing_values >= last - tolerance).sum())
    num_below = int((values > last + tolerance).sum())
    ranks = []
    if num_above < len(trailing_values):
        ranks.append(str(rank + num_above))
    if num_below > 0:
        ranks.append(str(num_below))
    choice = " or ".join(ranks) or f"{rank + num_above} or more"
    sentence = (
        f"Singular values {rank} and {rank + 1} agree ({last:.6g}, gap {gap:.1g}): at rank "
        f"{rank} rounding "
        "chooses which directions stay, and eigenvalues are lost."
    )
    numbers = {"rank": rank, "value": float(last), "gap": float(gap)}
    yield Finding("equal_values", numbers, sentence, f"Use rank {choice}.")


def _rounding(operator: Operator) -> Iterator[Finding]:
    gram_x = np.asarray(operator.gram_x)
    total = gram_x + np.asarray(operator.penalty)
    # U^T C_x U + B is the identity, except for unused columns. Directions are weighted by what
    # `alpha` leaves of them, because the smallest ones of ridge regression are rounding.
    weight = np.sqrt(np.abs(np.diagonal(gram_x)))
    is_used = np.diagonal(total) > 0
    deviation = np.abs(total - np.diag(is_used))
    error = float((deviation * weight[:, None] * weight[None]).max())
    if not error <= 1e-2:  # or it is NaN
        sentence = (
            f"Latent functions are orthonormal only to {error:.1g}, for the rounding of "
            f"{total.dtype} outweighs "
            "`alpha`; eigenvalues may be off by as much."
        )
        advice = "Raise `alpha`, take another solver or route, or enable x64."
        yield Finding("rounding", {"error": error}, sentence, advice)


class _Rows(NamedTuple):
    """Rows of pairs in the order of time, or rows with the same products, for a regression."""

    x: np.ndarray  # features of the states, [m, d]
    y: np.ndarray  # features of the successors, [m, d]
    ones: np.ndarray | None  # column of ones in these rows, [m]; None for centred data
    num_pairs: float
    slack: float  # share of the column of ones below which it is in the span of the features


def _rows_of_pairs(x: Any, y: Any, is_centred: bool) -> _Rows:
    width = x.shape[1]
    num_affordable = min(ROWS, int(_OPERATIONS / (4 * width**2)))
    num_rows = max(3 * width // 2, num_affordable, 2)
    indices = np.sort(permutation(x.shape[0])[:num_rows])
    rows_x = np.asarray(x)[indices].astype(float)
    rows_y = np.asarray(y)[indices].astype(float)
    ones = np.ones(len(indices))
    if is_centred:
        rows_x = rows_x - rows_x.mean(0)
        rows_y = rows_y - rows_y.mean(0)
        ones = None
    return _Rows(rows_x, rows_y, ones, float(len(indices)), 1e-20)


def _rows_of_moments(x: Moments) -> _Rows:
    width = x.widths[0]
    eps = rounding_unit(x.root)
    count = float(x.count)
    root = np.asarray(x.root, float)[: 2 * width, : 2 * width]
    ones = None
    if not x.center:
        # Moments hold only the products of a column of ones with the data. Its part beyond the
        # span of the data gets a row.
        mean = np.concatenate([np.asarray(x.mean_x, float), np.asarray(x.mean_y, float)])
        mean = mean + np.asarray(x.rest, float)[1 : 1 + 2 * width]
        ones = np.linalg.lstsq(root.T, count * mean, rcond=8 * width * eps)[0]
        beyond = max(0.0, count - ones @ ones) ** 0.5
        ones = np.append(ones, beyond)
    rows_x, rows_y = np.split(np.pad(root, ((0, 1), (0, 0))), 2, 1)
    return _Rows(rows_x, rows_y, ones, count, 8 * eps)


def _regression(operator: Operator, rows: _Rows) -> Iterator[Finding]:
    """Yield findings of suppressed predictive directions or a missing intercept, by F tests."""
    eps = rounding_unit(operator.core)
    alpha = float(operator.alpha) if operator.given else 0.0
    basis, sizes = _span_of(rows.x, eps, alpha)
    coefficients = basis.T @ rows.y
    residual = rows.y - basis @ coefficients
    freedom = float(rows.num_pairs - len(sizes))
    floor = (8 * eps) ** 2 * np.sum(rows.y**2)

    num_directions = operator.core.shape[0]
    if operator.fitting is not None and operator.fitting.settings.inverts_all:
        num_directions = rows.x.shape[1]
    share = np.zeros(len(sizes))
    if alpha:
        share = alpha / (sizes**2 / rows.num_pairs + alpha)
    is_suppressed = (share**4 > 0.01) & (np.arange(len(sizes)) < num_directions)
    if freedom >= 1 and is_suppressed.any():
        num_suppressed = int(is_suppressed.sum())
        signal = np.mean(np.sum(coefficients[is_suppressed] ** 2, 1))
        noise = max(np.sum(residual**2) / freedom, floor)
        ratio = signal / noise
        if ratio > 10:
            sentence = (
                f"`alpha` ({alpha:.3g}) suppresses {num_suppressed} directions of the features "
                "that predict (F = "
                f"{ratio:.2g}): forecasts and eigenvalues are not those of the data."
            )
            numbers = {"alpha": alpha, "directions": num_suppressed, "F": float(ratio)}
            yield Finding("suppressed_directions", numbers, sentence, "Lower it, or leave it out.")
    if rows.ones is not None and freedom >= 2:
        yield from _intercept(rows, basis, residual, freedom, floor)


def _span_of(x: np.ndarray, eps: float, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return an orthonormal basis of the columns' span, [m, k].

    Return also the singular values [k], or without an `alpha` numbers near them.
    """
    width = x.shape[1]
    if not alpha:
        # Without `alpha` the rank must not depend on the units of the columns.
        largest = np.abs(x).max(0)
        x = x / np.where(largest > 0, largest, 1.0)
        if len(x) > width:
            basis, root = np.linalg.qr(x)
            diagonal = np.abs(np.diagonal(root))
            largest_norm = np.linalg.norm(root, axis=0).max()
            if diagonal.min() > width * eps * largest_norm * 8:
                return basis, diagonal
    elif len(x) >= width > _QUICK_SVD:
        return _span_by_squares(x, eps)
    left_vectors, sizes, _ = np.linalg.svd(x, full_matrices=False)
    is_kept = sizes > width * eps * sizes[0]
    return left_vectors[:, is_kept], sizes[is_kept]


def _span_by_squares(x: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Return what `_span_of` does, of many columns: by eigenvectors of x^T x.

    Directions with small eigenvalues, which rounding of x^T x may mix, get an SVD of their own.
    """
    squares, vectors = np.linalg.eigh(x.T @ x)
    squares = squares[::-1]
    vectors = vectors[:, ::-1]
    cutoff = x.shape[1] * eps
    is_large = squares > max(_SMALL_SQUARE, cutoff**2) * squares[0]
    large_sizes = np.sqrt(squares[is_large])
    # Orthonormal up to the rounding unit over `_SMALL_SQUARE`.
    basis = x @ vectors[:, is_large] / large_sizes
    remainder = x @ vectors[:, ~is_large]
    remainder = remainder - basis @ (basis.T @ remainder)
    left_vectors, sizes, _ = np.linalg.svd(remainder, full_matrices=False)
    is_kept = sizes > cutoff * np.sqrt(max(squares[0], 0.0))
    basis = np.concatenate([basis, left_vectors[:, is_kept]], 1)
    return basis, np.append(large_sizes, sizes[is_kept])


def _intercept(
    rows: _Rows, basis: np.ndarray, residual: np.ndarray, freedom: float, floor: float
) -> Iterator[Finding]:
    """Yield a finding if a column of ones lowers the residual of a regression on the basis."""
    remainder = rows.ones - basis @ (basis.T @ rows.ones)
    length = remainder @ remainder
    if not length > rows.slack * rows.num_pairs:
        return
    product = remainder @ residual
    square = np.sum(product**2)
    gain = square / length
    total = np.sum(residual**2)
    noise = max((total - gain) / (freedom - 1), floor)
    ratio = gain / noise
    # Residuals of overlapping pairs depend on each other, so the variance is taken over blocks of
    # rows.
    if ratio > 25 and len(residual) == rows.num_pairs:
        scores = remainder[:, None] * (residual - remainder[:, None] * product / length)
        num_blocks = int(rows.num_pairs**0.5)
        starts = np.linspace(0, rows.num_pairs, num_blocks, endpoint=False).astype(int)
        block_sums = np.add.reduceat(scores, starts)
        variance = max(np.sum(block_sums**2), floor * length)
        ratio = min(ratio, square / variance)
    if ratio > 25:
        share = gain / total
        sentence = (
            f"A column of ones lowers the squared residual of one step by {100 * share:.2g} % (F "
            f"= {ratio:.2g}), as "
            "for data with an offset, which spoils eigenvalues and forecasts."
        )
        advice = (
            "If they have one, pass center=True, which carries an intercept. It needs "
            "explicit features: no `kernel`."
        )
        numbers = {"F": float(ratio), "share": float(share)}
        yield Finding("missing_intercept", numbers, sentence, advice)
