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
    """Warn from this module, so that `warnings.filterwarnings("ignore", module="koopman")` applies."""
    for finding in findings:
        if finding.name == "few_pairs":  # advice, at the place of the call
            _hint_once(str(finding), UserWarning)
        else:
            _warn(str(finding))


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=1)


_warn_once, _hint_once = cache(_warn), cache(warn)


def warn_float32(*arrays: Array | np.ndarray) -> None:
    """Warn, once per process, if NumPy's float64 data are computed in float32 because x64 mode is off."""
    given = any(isinstance(a, np.ndarray) and a.dtype == np.float64 for a in arrays)
    if given and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        _warn_once(
            "Data in float64 are computed in float32, which may not tell close eigenvalues "
            "apart. For float64 call "
            "jax.config.update('jax_enable_x64', True) at the start; to keep float32 pass "
            ".astype(numpy.float32)."
        )


def refuse_large_gram(x: Array, matrices: int) -> None:
    """Raise if `matrices` kernel matrices k(x, x) of all states exceed the free memory."""
    try:
        wanted, free = (
            matrices * len(x) ** 2 * x.dtype.itemsize,
            free_memory([] if is_traced(x) else [x]),
        )
    except WrongValue:  # the free memory is not known
        return
    if wanted > free:
        got = (
            f"{len(x)} states, of which {matrices} matrices k(x, x) need {wanted / 1e9:.3g} GB "
            f"of {free / 1e9:.3g} GB"
        )
        fail("centres", "be given for so many states", got, "Choose some by koopman.choose_centres")


def unconverged(residual: Array | None, eps: float) -> Iterator[Finding]:
    """Yield a finding if the residual of an iterative solver exceeds the fourth root of the rounding unit."""
    # Eigenvalues then have less than half of their digits.
    if residual is not None and not is_traced(residual) and float(residual) > eps**0.25:
        sentence = f"The Krylov solver ended with a relative residual of {float(residual):.1g}:"
        yield Finding("unconverged", {"residual": float(residual)}, sentence, "take the dense one.")


def large_alpha(alpha: Any, variance: Any, trace: Any, which: str) -> Iterator[Finding]:
    """Yield a finding if `alpha` exceeds the variance to which it is added, and the rounding of `trace`."""
    given, held, total = float(alpha), float(variance), float(trace)
    if given > held and given > 1.01e-6 * total:
        sentence = (
            f"`alpha` ({given:.3g}) exceeds {which} ({held:.3g}), which shrinks what it weighs "
            "on to "
            f"{held / (held + given):.2g} of its size."
        )
        advice = "It is in units of C_x. alpha=None follows the data."
        yield Finding("large_alpha", {"alpha": given, "variance": held}, sentence, advice)


def lost_variance(
    x: Array | np.ndarray, name: str = "x", *, advice: str = "pass center=True"
) -> Iterator[Finding]:
    """Yield a finding if a column of `x` [..., d] varies by less than the rounding of its squared mean."""
    if is_traced(x):
        return
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    eps = float(jnp.finfo(dtype).eps)
    rows = np.asarray(x).reshape(-1, x.shape[-1])
    some = rows[:: -(-rows.shape[0] // _ROWS)].astype(np.float64)
    with np.errstate(all="ignore"):
        mean, deviation = np.abs(some.mean(0)), some.std(0)
        # Columns that float32 rounds are left to `dissociation._core.conversion.warn_narrowed`.
        lost = (deviation < eps**0.5 * mean) & (some == some.astype(dtype)).all(0)
    # A constant column, as the function 1 in a dictionary, has no variance to lose.
    lost = lost & (np.ptp(some, 0) > 0)
    if lost.any():
        worst = int(np.argmax(np.where(lost, mean / np.where(lost, deviation, 1.0), 0.0)))
        sentence = (
            f"Column {worst} of `{name}` varies by {deviation[worst]:.2g} about "
            f"{mean[worst]:.2g}, and its variance is "
            f"below the rounding ({eps:.1g}) of the squared mean:"
        )
        numbers = {
            "column": worst,
            "deviation": float(deviation[worst]),
            "mean": float(mean[worst]),
        }
        yield Finding("lost_variance", numbers, sentence, f"{advice}.")


def kernel_findings(x: Any, values: Any) -> Iterator[Finding]:
    """Yield findings if the kernel matrix `values` [n, n] of states `x` [n, d] is nearly constant or diagonal."""
    # Nothing can be learned if all states look equal, or none has a neighbour.
    matrix = np.asarray(values)
    trace = float(np.trace(matrix))
    about_mean = max(0.0, trace - float(np.sum(matrix, dtype=np.float64)) / len(matrix))
    floor = 8 * float(jnp.finfo(matrix.dtype).eps)
    if about_mean < floor * trace and not is_traced(x) and np.ptp(np.asarray(x), 0).any():
        sentence = (
            f"k(x, x) varies about its mean by {about_mean / trace:.1g} of it, below its "
            f"rounding ({floor:.1g}), and "
            "all but the constant is lost:"
        )
        advice = "take the states about their mean, or another kernel."
        yield Finding("constant_kernel", {"share": about_mean / trace}, sentence, advice)
    sizes = np.sqrt(np.diagonal(matrix))
    near = np.abs(matrix) / np.maximum(sizes[:, None] * sizes, np.finfo(matrix.dtype).tiny)
    np.fill_diagonal(near, 0.0)
    nearest = float(np.median(near.max(0)))
    if len(near) > 2 and nearest < 1e-3:
        sentence = (
            "k(x, x) is nearly zero between most states and all others, and nothing is "
            "learned of one from another:"
        )
        advice = "the length scale of the kernel is too small."
        yield Finding("narrow_kernel", {"nearest": nearest}, sentence, advice)
