"""Findings on what spoils the numbers of a fitted operator, from the operator and its pairs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
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
from koopman._operators._kernels import KernelMap, Linear, Operator, gram
from koopman._operators._pairs import Moments

ROWS = 4000
"""Most rows of a regression on few features, and the operations that it may take on many."""
_OPERATIONS = 2e9


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
    _check_data(operator, x, y)
    return tuple(findings_of(operator, x, y))


def _check_data(operator: Operator, x: Any, y: Any) -> None:
    """Raise unless `x` and `y` can be what the operator was fitted to."""
    encode = operator.encode
    if isinstance(x, Moments):
        if isinstance(encode, KernelMap):
            fail("x", "be the states of a fit with a kernel", "moments")
        if y is not None:
            fail("y", "be None with moments, which hold successors", f"shape {y.shape}")
        width = x.widths[0]
    else:
        if y is None:
            fail("y", "be given with `x`", "None")
        check_finite("x", x)
        check_finite("y", y)
        width = x.shape[1]
    wanted = encode.centres.shape[1] if isinstance(encode, KernelMap) else encode.matrix.shape[0]
    if width != wanted:
        fail("x", f"have {wanted} columns, as the operator was fitted", width)


def findings_of(operator: Operator, x: Any, y: Any) -> Iterator[Finding]:
    """Yield what `diagnose` returns."""
    fitting, encode = operator.fitting, operator.encode
    if fitting is not None:
        yield from unconverged(fitting.residual, float(jnp.finfo(operator.core.dtype).eps))
        if fitting.compared:
            yield from large_alpha(
                operator.alpha, fitting.variance, fitting.trace, fitting.compared
            )
        if fitting.squares is not None:
            yield from _small_columns(np.asarray(fitting.squares), float(operator.alpha))
        yield from _few_directions(operator, fitting.ranked)
        yield from _equal_values(
            np.asarray(operator.singular_values), np.asarray(fitting.rest), float(fitting.cutoff)
        )
        yield from _rounding(operator)
    if isinstance(x, Moments):
        yield from _regression(operator, _rows_of_moments(x))
        return
    centred = fitting is not None and fitting.centred
    if not isinstance(encode, KernelMap):
        if not centred:
            yield from lost_variance(x)
        yield from _few_pairs(x, operator)
        yield from _regression(operator, _some_rows(x, y, centred))
        return
    width, num_centres = x.shape[1], len(encode.centres)
    if num_centres == len(x):
        yield from kernel_findings(
            encode.centres, gram(encode.kernel, encode.centres, encode.centres)
        )
    # The span of few centres, or of few states, is not that of the features.
    if type(encode.kernel) is Linear and width < len(x) and width <= num_centres:
        yield from _regression(operator, _some_rows(x, y, centred=False))


def _small_columns(squares: np.ndarray, alpha: float) -> Iterator[Finding]:
    """Yield a finding on columns so small that the default `alpha`, in proportion to all columns, suppresses them."""
    hidden = np.flatnonzero((squares > 0) & (squares < 3 * alpha))
    if len(hidden):
        sentence = (
            f"Column {hidden[0]} of `x` is too small beside the largest for the default `alpha` "
            f"({len(hidden)} such): "
            "principal components are taken in the units of the columns."
        )
        numbers = {"column": float(hidden[0]), "columns": float(len(hidden))}
        yield Finding("small_columns", numbers, sentence, "Bring them to one size.")


def _few_directions(operator: Operator, ranked: bool) -> Iterator[Finding]:
    rank, held = operator.core.shape[0], int(operator.effective_rank)
    if ranked and held < rank:
        sentence = (
            f"`rank` ({rank}) exceeds the {held} directions that the data hold in "
            f"{operator.core.dtype}: the other "
            f"{rank - held} latent functions are zero or rounding."
        )
        yield Finding(
            "few_directions", {"rank": rank, "directions": held}, sentence, f"Lower it to {held}."
        )


def _equal_values(values: np.ndarray, rest: np.ndarray, cutoff: float) -> Iterator[Finding]:
    """Yield a finding if the rank separates equal singular values, so that rounding chooses the directions."""
    if not rest.size or values[-1] <= cutoff * values[0]:
        return
    tolerance = np.finfo(values.dtype).eps ** 0.75 * values[-1]
    if values[-1] - rest[0] > tolerance:
        return
    rank = len(values)
    num_above = int((rest >= values[-1] - tolerance).sum())
    num_below = int((values > values[-1] + tolerance).sum())
    ranks = [str(rank + num_above)] * (num_above < len(rest)) + [str(num_below)] * (num_below > 0)
    gap = abs(values[-1] - rest[0])
    sentence = (
        f"Singular values {rank} and {rank + 1} agree ({values[-1]:.6g}, gap {gap:.1g}): at rank "
        f"{rank} rounding "
        "chooses which directions stay, and eigenvalues are lost."
    )
    advice = f"Use rank {' or '.join(ranks) or f'{rank + num_above} or more'}."
    yield Finding(
        "equal_values",
        {"rank": rank, "value": float(values[-1]), "gap": float(gap)},
        sentence,
        advice,
    )


def _rounding(operator: Operator) -> Iterator[Finding]:
    seen = np.asarray(operator.gram_x)
    total = seen + np.asarray(operator.penalty)
    # U^T C_x U + B is the identity, except for unused columns. Directions are weighted by what
    # `alpha` leaves of them, because the smallest ones of ridge regression are rounding.
    weight = np.sqrt(np.abs(np.diagonal(seen)))
    off = np.abs(total - np.diag(np.diagonal(total) > 0))
    error = float((off * weight[:, None] * weight[None]).max())
    if not error <= 1e-2:  # or it is NaN
        sentence = (
            f"Latent functions are orthonormal only to {error:.1g}, for the rounding of "
            f"{total.dtype} outweighs "
            "`alpha`; eigenvalues may be off by as much."
        )
        advice = "Raise `alpha`, take another solver or route, or enable x64."
        yield Finding("rounding", {"error": error}, sentence, advice)


def _few_pairs(x: Array | np.ndarray, operator: Operator) -> Iterator[Finding]:
    """Yield a finding if the operator has more directions than there are pairs, as of transposed data."""
    if operator.core.shape[0] > x.shape[0]:
        sentence = (
            "There are fewer pairs than directions of the operator, and eigenvalues of "
            "the rest are zero."
        )
        advice = (
            "If snapshots are in columns, [features, time], pass the transpose x.T; if in rows, "
            "[time, features], a "
            "lower rank is enough."
        )
        yield Finding(
            "few_pairs", {"pairs": x.shape[0], "rank": operator.core.shape[0]}, sentence, advice
        )


class _Rows(NamedTuple):
    """Rows of a regression: those of pairs in the order of time, or rows with the same products."""

    x: np.ndarray  # features of the states, [m, d]
    y: np.ndarray  # features of the successors, [m, d]
    ones: np.ndarray | None  # column of ones in these rows, [m]; None for centred data
    num_pairs: float
    slack: float  # share of the column of ones below which it is in the span of the features


def _some_rows(x: Any, y: Any, centred: bool) -> _Rows:
    width = x.shape[1]
    most = max(3 * width // 2, min(ROWS, int(_OPERATIONS / (4 * width**2))))
    some = np.sort(permutation(x.shape[0])[: max(most, 2)])
    now, later = (np.asarray(part)[some].astype(float) for part in (x, y))
    if centred:
        now, later = now - now.mean(0), later - later.mean(0)
    return _Rows(now, later, None if centred else np.ones(len(some)), float(len(some)), 1e-20)


def _rows_of_moments(x: Moments) -> _Rows:
    width, eps, count = x.widths[0], float(jnp.finfo(x.root.dtype).eps), float(x.count)
    root = np.asarray(x.root, float)[: 2 * width, : 2 * width]
    mean = np.concatenate([np.asarray(x.mean_x, float), np.asarray(x.mean_y, float)])
    rest = np.asarray(x.rest, float)[1 : 1 + 2 * width]
    # Moments hold only the products of a column of ones with the data. What lies beyond their span
    # gets a row.
    ones = np.linalg.lstsq(root.T, count * (mean + rest), rcond=8 * width * eps)[0]
    ones = np.append(ones, max(0.0, count - ones @ ones) ** 0.5)
    now, later = np.split(np.pad(root, ((0, 1), (0, 0))), 2, 1)
    return _Rows(now, later, None if x.center else ones, count, 8 * eps)


def _regression(operator: Operator, rows: _Rows) -> Iterator[Finding]:
    """Yield findings if `alpha` suppresses predictive directions, or if an intercept is missing, by F tests."""
    eps = float(jnp.finfo(operator.core.dtype).eps)
    alpha = float(operator.alpha) if operator.given else 0.0
    left, sizes = _span_of(rows.x, eps, alpha)
    freedom = float(rows.num_pairs - len(sizes))
    held = left.T @ rows.y
    rest, floor = rows.y - left @ held, (8 * eps) ** 2 * np.sum(rows.y**2)
    whole = operator.fitting is not None and operator.fitting.whole
    size = rows.x.shape[1] if whole else operator.core.shape[0]
    share = alpha / (sizes**2 / rows.num_pairs + alpha) if alpha else np.zeros(len(sizes))
    suppressed = (share**4 > 0.01) & (np.arange(len(sizes)) < size)
    if freedom >= 1 and suppressed.any():
        ratio = np.mean(np.sum(held[suppressed] ** 2, 1)) / max(np.sum(rest**2) / freedom, floor)
        if ratio > 10:
            sentence = (
                f"`alpha` ({alpha:.3g}) suppresses {suppressed.sum()} directions of the features "
                "that predict (F = "
                f"{ratio:.2g}): forecasts and eigenvalues are not those of the data."
            )
            numbers = {"alpha": alpha, "directions": int(suppressed.sum()), "F": float(ratio)}
            yield Finding("suppressed_directions", numbers, sentence, "Lower it, or leave it out.")
    if rows.ones is not None and freedom >= 2:
        yield from _intercept(rows, left, rest, freedom, floor)


def _span_of(x: np.ndarray, eps: float, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return an orthonormal basis of the columns' span [m, k], and with an `alpha` the singular values [k]."""
    width = x.shape[1]
    if alpha:
        left, sizes, _ = np.linalg.svd(x, full_matrices=False)
        is_kept = sizes > width * eps * sizes[0]
        return left[:, is_kept], sizes[is_kept]
    # Without `alpha` the rank must not depend on the units of the columns.
    largest = np.abs(x).max(0)
    x = x / np.where(largest > 0, largest, 1.0)
    if len(x) > width:
        left, root = np.linalg.qr(x)
        diagonal = np.abs(np.diagonal(root))
        if diagonal.min() > width * eps * np.linalg.norm(root, axis=0).max() * 8:
            return left, diagonal
    left, sizes, _ = np.linalg.svd(x, full_matrices=False)
    is_kept = sizes > width * eps * sizes[0]
    return left[:, is_kept], sizes[is_kept]


def _intercept(
    rows: _Rows, left: np.ndarray, rest: np.ndarray, freedom: float, floor: float
) -> Iterator[Finding]:
    """Yield a finding if a column of ones lowers the residual `rest` of a regression on the basis `left`."""
    left_over = rows.ones - left @ (left.T @ rows.ones)
    length = left_over @ left_over
    if not length > rows.slack * rows.num_pairs:
        return
    square = np.sum((left_over @ rest) ** 2)
    gain = square / length
    ratio = gain / max((np.sum(rest**2) - gain) / (freedom - 1), floor)
    # Residuals of overlapping pairs depend on each other, so the variance is taken over blocks of
    # rows.
    if ratio > 25 and len(rest) == rows.num_pairs:
        off = left_over[:, None] * (rest - left_over[:, None] * (left_over @ rest) / length)
        starts = np.linspace(0, rows.num_pairs, int(rows.num_pairs**0.5), endpoint=False).astype(
            int
        )
        ratio = min(ratio, square / max(np.sum(np.add.reduceat(off, starts) ** 2), floor * length))
    if ratio > 25:
        share = gain / np.sum(rest**2)
        sentence = (
            f"A column of ones lowers the squared residual of one step by {100 * share:.2g} % (F "
            f"= {ratio:.2g}), as "
            "for data with an offset, which spoils eigenvalues and forecasts."
        )
        advice = (
            "If they have one, pass center=True, which carries an intercept. It needs "
            "explicit features: no `kernel`."
        )
        yield Finding(
            "missing_intercept", {"F": float(ratio), "share": float(share)}, sentence, advice
        )
