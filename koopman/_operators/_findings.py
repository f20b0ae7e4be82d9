"""Findings on data and options that spoil numbers, for known values."""

import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core.checks import WrongValue, fail, is_traced, warn
from dissociation.training._machine import free_memory
from koopman._operators._numerics import rounding_unit

# Number of rows whose means and variances are read, which are then known to 3 %.
_ROWS = 1000


class Finding(NamedTuple):
    """Something that spoils an operator's numbers.

    Attributes:
        name: Name of its kind.
        numbers: What was compared, by name.
        sentence: What was found.
        advice: What to do about it.
    """

    name: str
    numbers: dict[str, float]
    sentence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.sentence} {self.advice}"


def warn_of(findings: Iterable[Finding]) -> None:
    """Warn of findings from this module, so that filters with module="koopman" apply."""
    for finding in findings:
        if finding.name == "few_pairs":  # advice, at the place of the call
            _hint_once(str(finding), UserWarning)
        else:
            _warn(str(finding))


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=1)


_warn_once = cache(_warn)
_hint_once = cache(warn)


def warn_float32(*arrays: Array | np.ndarray) -> None:
    """Warn once per process if NumPy's float64 data are computed in float32.

    JAX computes in float32 if x64 mode is off.
    """
    is_float64 = any(isinstance(a, np.ndarray) and a.dtype == np.float64 for a in arrays)
    if is_float64 and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        _warn_once(
            "Data in float64 are computed in float32, which may not tell close eigenvalues "
            "apart. For float64 call "
            "jax.config.update('jax_enable_x64', True) at the start; to keep float32 pass "
            ".astype(numpy.float32)."
        )


def refuse_large_gram(x: Array, matrices: int) -> None:
    """Raise if `matrices` kernel matrices k(x, x) of all states exceed the free memory."""
    num_bytes = matrices * len(x) ** 2 * x.dtype.itemsize
    try:
        free = free_memory([] if is_traced(x) else [x])
    except WrongValue:  # the free memory is not known
        return
    if num_bytes > free:
        received = (
            f"{len(x)} states, of which {matrices} matrices k(x, x) need {num_bytes / 1e9:.3g} GB "
            f"of {free / 1e9:.3g} GB"
        )
        advice = "Choose some by koopman.choose_centres"
        fail("centres", "be given for so many states", received, advice)


def unconverged(residual: Array | None, eps: float) -> Iterator[Finding]:
    """Yield a finding if a solver's residual exceeds the fourth root of the rounding unit."""
    if residual is None or is_traced(residual):
        return
    size = float(residual)
    # Above this limit eigenvalues have less than half of their digits.
    if size > eps**0.25:
        sentence = f"The Krylov solver ended with a relative residual of {size:.1g}:"
        yield Finding("unconverged", {"residual": size}, sentence, "take the dense one.")


def large_alpha(alpha: Any, variance: Any, trace: Any, which: str) -> Iterator[Finding]:
    """Yield a finding if `alpha` exceeds the variance to which it is added.

    An `alpha` below the rounding of `trace` is never large.
    """
    alpha = float(alpha)
    variance = float(variance)
    if alpha > variance and alpha > 1.01e-6 * float(trace):
        ratio = variance / (variance + alpha)
        sentence = (
            f"`alpha` ({alpha:.3g}) exceeds {which} ({variance:.3g}), which shrinks what it "
            f"weighs on to {ratio:.2g} of its size."
        )
        advice = "It is in units of C_x. alpha=None follows the data."
        numbers = {"alpha": alpha, "variance": variance}
        yield Finding("large_alpha", numbers, sentence, advice)


def lost_variance(
    x: Array | np.ndarray, name: str = "x", *, advice: str = "pass center=True"
) -> Iterator[Finding]:
    """Yield a finding if a column of `x` varies by less than the rounding of its squared mean.

    `x`: Features in the last axis.
    """
    if is_traced(x):
        return
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    eps = float(jnp.finfo(dtype).eps)
    rows = np.asarray(x).reshape(-1, x.shape[-1])
    stride = -(-rows.shape[0] // _ROWS)
    rows = rows[::stride].astype(np.float64)
    with np.errstate(all="ignore"):
        means = np.abs(rows.mean(0))
        deviations = rows.std(0)
        # Columns that float32 rounds are left to `dissociation._core.conversion.warn_narrowed`.
        is_exact = (rows == rows.astype(dtype)).all(0)
        is_lost = (deviations < eps**0.5 * means) & is_exact
    # A constant column, as the function 1 in a dictionary, has no variance to lose.
    is_lost = is_lost & (np.ptp(rows, 0) > 0)
    if not is_lost.any():
        return

    ratios = means / np.where(is_lost, deviations, 1.0)
    column = int(np.argmax(np.where(is_lost, ratios, 0.0)))
    mean = float(means[column])
    deviation = float(deviations[column])
    sentence = (
        f"Column {column} of `{name}` varies by {deviation:.2g} about {mean:.2g}, and its "
        f"variance is below the rounding ({eps:.1g}) of the squared mean:"
    )
    numbers = {"column": column, "deviation": deviation, "mean": mean}
    yield Finding("lost_variance", numbers, sentence, f"{advice}.")


def kernel_findings(x: Any, values: Any) -> Iterator[Finding]:
    """Yield findings if the kernel matrix of states [n, d] is nearly constant or diagonal.

    `values`: Kernel matrix, [n, n].
    """
    # Nothing can be learned if all states look equal, or none has a neighbour.
    matrix = np.asarray(values)
    trace = float(np.trace(matrix))
    total = float(np.sum(matrix, dtype=np.float64))
    about_mean = max(0.0, trace - total / len(matrix))
    floor = 8 * rounding_unit(matrix)
    if about_mean < floor * trace and not is_traced(x) and np.ptp(np.asarray(x), 0).any():
        share = about_mean / trace
        sentence = (
            f"k(x, x) varies about its mean by {share:.1g} of it, below its rounding "
            f"({floor:.1g}), and all but the constant is lost:"
        )
        advice = "take the states about their mean, or another kernel."
        yield Finding("constant_kernel", {"share": share}, sentence, advice)

    sizes = np.sqrt(np.diagonal(matrix))
    products = np.maximum(sizes[:, None] * sizes, np.finfo(matrix.dtype).tiny)
    similarities = np.abs(matrix) / products
    np.fill_diagonal(similarities, 0.0)
    nearest = float(np.median(similarities.max(0)))
    if len(matrix) > 2 and nearest < 1e-3:
        sentence = (
            "k(x, x) is nearly zero between most states and all others, and nothing is "
            "learned of one from another:"
        )
        advice = "the length scale of the kernel is too small."
        yield Finding("narrow_kernel", {"nearest": nearest}, sentence, advice)
