"""Convert values to arrays, keys and labels, with errors that name the argument."""

import functools
import reprlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dissociation._core.checks import check_classes, check_finite, fail, fail_kind, is_traced, warn

LOST_DIGITS = 1e3
"""Largest mean of a column, in standard deviations, without a warning of lost digits."""


_PARENTS = {
    "bool": jnp.bool_, "int": jnp.integer, "float": jnp.floating, "complex": jnp.complexfloating,
    "key": jax.dtypes.extended,
}  # fmt: skip
KINDS = ("bool", "int", "float", "complex")
"""Kinds of numbers, each of which the later ones hold."""


@functools.cache
def number_kind(dtype: Any) -> str:
    """Return one of `KINDS`, "key", or "" for entries that are no numbers."""
    kinds = (kind for kind, parent in _PARENTS.items() if jnp.issubdtype(dtype, parent))
    return (
        "" if jnp.issubdtype(dtype, np.timedelta64) else next(kinds, "")
    )  # NumPy counts spans of time as integers


def as_array(
    name: str, value: Any, words: str = "numbers", *, bare: bool = False, may_be_empty: bool = False
) -> jax.Array | np.ndarray:
    """Return arrays of JAX and NumPy unchanged, other values converted through NumPy or DLPack."""
    wanted = f"be {words}" if bare else f"be an array of {words}"
    array = value if isinstance(value, (jax.Array, np.ndarray)) else _converted(name, value, wanted)
    if number_kind(array.dtype) not in KINDS:
        entries = array.flat if array.ndim and isinstance(array, np.ndarray) else ()
        if any(isinstance(entry, (str, bytes)) for entry in entries):
            advice = "`numpy.unique(labels, return_inverse=True)[1]` makes integers of text labels"
            fail_kind(name, wanted, f"text, {reprlib.repr(value)}", advice)
        fail_kind(name, wanted, describe(array if array.ndim else value))
    if not isinstance(array, jax.Array):
        if np.ma.is_masked(array):
            fail(name, wanted, "a masked array", "Fill or drop its masked entries")
        array = np.asarray(array)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
    if array.size == 0 and not may_be_empty:
        fail(name, "not be empty", f"shape {array.shape}")
    return array


def to_device(array: Any, dtype: Any = None) -> jax.Array:
    """Return a JAX array; copy known NumPy arrays, and numbers of a `dtype`, on the host without a compiled program."""
    if dtype is not None and isinstance(array, bool | int | float):
        array = np.asarray(array)
    if not isinstance(array, np.ndarray | np.generic):
        return jnp.asarray(array, dtype)
    kept = jax.dtypes.canonicalize_dtype(array.dtype if dtype is None else dtype)
    # A CPU would share the memory of an aligned array, which its owner may change before the
    # program runs.
    return jax.device_put(np.array(array, kept))


def as_examples(name: str, value: Any, *, finite: bool = False) -> Any:
    """Return JAX arrays, samples first: one array, or a dictionary or tuple of arrays."""

    def converted(part: Any) -> jax.Array:
        array = as_array(name, part, "numbers [samples, ...]")
        check_fits(name, array)
        if number_kind(array.dtype) == "float":
            warn_narrowed(
                name, array, gates=sys.maxsize
            )  # no outer function has checked these arrays
        array = to_device(array)
        if finite:
            check_finite(name, array)
        return array

    arrays = jax.tree.map(converted, value, is_leaf=lambda x: not isinstance(x, (dict, tuple)))
    shapes = [leaf.shape for leaf in jax.tree.leaves(arrays)]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        wanted = "have at least 1 axis [samples, ...], of one length for all arrays"
        fail(name, wanted, f"shape {shapes[0]}" if len(shapes) == 1 else f"shapes {shapes}")
    return arrays


def _converted(name: str, value: Any, wanted: str) -> Any:
    if getattr(getattr(value, "index", None), "nlevels", 1) > 1:
        advice = "`lagged_pairs` reads runs and times; value.to_numpy() drops the index"
        fail(name, wanted, "a frame of several index levels", advice)
    ways: list[Callable[[Any], Any]] = []
    if hasattr(value, "__dlpack__"):
        ways = [np.from_dlpack, jnp.from_dlpack]  # the second from other devices than the host
    if hasattr(value, "__array__") or not ways:
        ways = [np.asarray, *ways, jnp.asarray]  # the last for lists of traced numbers
    reasons = []
    for way in ways:
        try:
            return way(value)
        except Exception as error:
            reasons.append(str(error).partition("\n")[0])
    if isinstance(value, (list, tuple)):
        fail(name, wanted, "a list whose rows differ in shape")
    return fail_kind(name, wanted, f"{describe(value)} ({reasons[0]})")


def holds_arrays(value: Any) -> bool:
    """Return True for a list of arrays, False for nested lists of numbers."""
    parts = (list, tuple, bool, int, float, complex, np.generic)
    return isinstance(value, (list, tuple)) and not all(isinstance(item, parts) for item in value)


def refuse_nested(name: str, value: Any, array: Any, most: int) -> None:
    """Raise if nested lists have more than `most` axes."""
    # Deeper lists are ambiguous: one array, or a list of arrays.
    if isinstance(value, (list, tuple)) and array.ndim > most:
        advice = "Pass numpy.asarray(...) if they are one array"
        fail(
            name, "be an array, or a list of arrays", f"nested lists of shape {array.shape}", advice
        )


def as_numbers(name: str, array: Any, numbers: frozenset[str]) -> Any:
    """Return an array converted to one of the kinds `numbers`. Half precisions become float32."""
    kind, size = number_kind(array.dtype), array.dtype.itemsize
    if kind in numbers:
        halves = kind == "float" and size not in (4, 8)
        return array.astype(np.float32 if size < 4 else np.float64) if halves else array
    for wider in ("float", "complex", "int"):
        if wider in numbers and KINDS.index(kind) < KINDS.index(wider):
            return array.astype(jax.dtypes.canonicalize_dtype(wider))
    advice = "Take its real and imaginary parts as two features" if kind == "complex" else ""
    return fail_kind(name, f"hold {kind_words(numbers)}", f"dtype {array.dtype}", advice)


def warn_narrowed(name: str, array: Any, *, gates: int = 1) -> None:
    """Warn if JAX's floats lose digits in which known numbers of a column differ, or round integers."""
    kind, working = number_kind(array.dtype), jax.dtypes.canonicalize_dtype(float)
    narrow = {"int": working.itemsize // 2, "float": working.itemsize}.get(kind, np.inf)
    if is_traced(array) or array.dtype.itemsize <= narrow or not array.ndim or not array.size:
        return
    width = array.shape[-1] if array.ndim > 1 else 1
    # The stride is odd, because every 2^k-th of consecutive large integers is exact in floats.
    rows = np.asarray(array).reshape(-1, width)
    rows = rows[:: -(-len(rows) // min(1000, 30 + 2_000_000 // width)) | 1]
    with np.errstate(all="ignore"):
        kept = rows.astype(working)
        rounding = rows.astype(np.float64) - kept
        mean, deviation = (
            np.abs(rows.mean(0, dtype=np.float64)),
            (rows - rows.min(0)).std(0, dtype=np.float64),
        )
        # Rounding to float32 is about 2 ** -25 of the mean, or zero for numbers such as small
        # integers.
        dropped = np.std(rounding, 0) / deviation
        exact = kept.astype(rows.dtype) == rows
    # Two or three numbers may lie close by chance, and a constant may vary by the rounding of
    # float64.
    lost = dropped > (LOST_DIGITS * 2.0**-25 if len(rows) > 3 else 0.01)
    lost &= deviation > 64 * np.finfo(np.float64).eps * mean
    if kind == "int":
        lost = ~exact.all(0) & (deviation > 0)
    if not lost.any():
        return
    worst = int(np.argmax(np.where(lost, mean / np.where(lost, deviation, 1.0), 0.0)))
    most = np.finfo(working).precision + 1
    digits = np.clip(np.log10(deviation[worst] / mean[worst]) + most, 0, most)
    wider = (
        ", or call jax.config.update('jax_enable_x64', True) at the start"
        if working == np.float32
        else ""
    )
    warn(
        f"{f'Column {worst} of ' if array.ndim > 1 else ''}`{name}` varies by "
        f"{deviation[worst]:.2g} about "
        f"{mean[worst]:.2g}: {working} keeps {digits:.0f} digits of it. Subtract the means "
        f"first{wider}.",
        gates=gates,
    )


def common_dtype(names: list[str], arrays: list[Any]) -> Any:
    """Return a dtype in which JAX holds all arrays."""
    kinds = {jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays}
    # NumPy's promotion keeps digits of integers, unlike JAX's.
    dtype = jax.dtypes.canonicalize_dtype(np.result_type(*kinds))
    for name, array in zip(names, arrays, strict=True) if len(kinds) > 1 else ():
        if number_kind(dtype) == "int":
            check_fits(name, array, dtype)
        elif number_kind(array.dtype) == "int":
            warn_narrowed(name, array)
    return dtype


def check_fits(name: str, array: Any, dtype: Any = None) -> None:
    """Raise if integers are out of the range of `dtype`, by default JAX's."""
    kept = jax.dtypes.canonicalize_dtype(array.dtype) if dtype is None else dtype
    if (
        is_traced(array)
        or kept == array.dtype
        or number_kind(array.dtype) != "int"
        or not array.size
    ):
        return
    limits, known = np.iinfo(kept), np.asarray(array)
    extreme = known.max() if known.max() > limits.max else known.min()
    if not limits.min <= extreme <= limits.max:
        advice = "Larger ones need jax.config.update('jax_enable_x64', True)"
        fail(name, f"hold integers from {limits.min} to {limits.max}", extreme, advice)


def check_pixels(name: str, images: Any) -> None:
    """Raise if images hold integers above 1."""
    array = as_array(name, images)
    if (
        not is_traced(array)
        and number_kind(array.dtype) == "int"
        and (most := np.asarray(array).max()) > 1
    ):
        advice = "Divide grey levels by 255; give integers that are meant as they are as floats"
        fail(name, "be numbers, for pixels from 0 to 1", f"integers up to {most}", advice)


def kind_words(numbers: frozenset[str]) -> str:
    """Return the words for numbers of these kinds."""
    if "float" in numbers:
        return "numbers" if "complex" in numbers else "real numbers"
    if "complex" in numbers:
        return "complex numbers"
    return "booleans" if numbers == {"bool"} else "integers"


def as_key(name: str, value: Any, ndims: tuple[int, ...]) -> Any:
    """Return a random key, typed or raw, or keys with one of the numbers of axes `ndims`."""
    one, several = (
        "jax.random.key(0)",
        "be random keys, one per member, as `jax.random.split(jax.random.key(0), 3)`",
    )
    wanted = f"be a random key, as `{one}` makes it" if 0 in ndims else f"{several} makes them"
    is_raw = getattr(value, "dtype", None) == np.uint32 and value.shape[-1:] == (2,)
    if not is_raw and not (isinstance(value, jax.Array) and number_kind(value.dtype) == "key"):
        fail_kind(name, wanted, describe(value))
    shape = value.shape[:-1] if is_raw else value.shape
    if len(shape) not in ndims:
        fail(
            name,
            wanted,
            f"keys of shape {shape}",
            "Map over keys by `jax.vmap`" if 0 in ndims else "",
        )
    return to_device(value) if is_raw else value


def as_classes(name: str, labels: Any, *, may_be_empty: bool = False) -> Any:
    """Return labels as integers [n], from integers or one-hot rows [n, classes]."""
    labels = _checked_labels(name, labels, may_be_empty=may_be_empty)
    if labels.ndim == 1:
        return labels
    return (jnp if isinstance(labels, jax.Array) else np).argmax(labels, axis=1)


def as_one_hot(name: str, labels: Any, num_classes: int | None, *, soft: bool = False) -> Any:
    """Return labels as one-hot rows [n, classes], from integers [n] or one-hot rows."""
    labels = _checked_labels(name, labels, soft=soft, may_be_empty=False)
    if labels.ndim == 2:
        return as_numbers(name, labels, frozenset({"float"}))
    if num_classes is None:
        if is_traced(labels):
            advice = "Pass jax.nn.one_hot(labels, num_classes)"
            fail_kind(name, "be one-hot under a transformation", "integers", advice)
        num_classes = int(np.max(np.asarray(labels))) + 1
    check_classes(name, labels, num_classes)
    if isinstance(labels, jax.Array):
        return jax.nn.one_hot(labels, num_classes)
    return (labels[:, None] == np.arange(num_classes)).astype(jax.dtypes.canonicalize_dtype(float))


def _checked_labels(name: str, labels: Any, *, soft: bool = False, may_be_empty: bool) -> Any:
    wanted = f"integers [n] or {'rows of probabilities' if soft else 'one-hot rows'} [n, classes]"
    labels = as_array(name, labels, wanted, bare=True, may_be_empty=may_be_empty)
    if labels.ndim not in (1, 2):
        fail(name, f"be {wanted}", f"shape {labels.shape}")
    if labels.ndim == 2 and labels.shape[1] == 1:
        fail(name, f"be {wanted}", f"one column, shape {labels.shape}", "Take it out: labels[:, 0]")
    if labels.ndim == 1:
        if number_kind(labels.dtype) not in ("int", "bool"):
            fail_kind(
                name,
                f"be {wanted}",
                f"dtype {labels.dtype}",
                "If they are integers, pass labels.astype(int)",
            )
        labels = labels.astype(int) if labels.dtype == np.bool_ else labels
        # Under a trace, results computed from JAX arrays are traced, so NumPy checks known labels.
        if not is_traced(labels) and labels.size and (least := int(np.min(np.asarray(labels)))) < 0:
            fail(name, "be integers from 0", least)
        check_fits(name, labels)
        return labels
    labels = as_numbers(name, labels, frozenset({"int", "float"}))
    if not is_traced(labels):
        rows = np.asarray(labels)
        right = (rows >= 0).all(1) if soft else ((rows == 0) | (rows == 1)).all(1)
        wrong = ~(right & (np.abs(rows.sum(1) - 1) <= (1e-3 if soft else 0)))
        if wrong.any():
            at = int(wrong.argmax())
            fail(name, f"be {wanted}", f"{np.array2string(rows[at], threshold=12)} in row {at}")
    return labels


def describe(value: Any) -> str:
    """Return a short description of a value for an error message."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    if isinstance(value, (str, bytes, int, float, complex)):
        return f"{type(value).__name__} {reprlib.repr(value)}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"
    return "None" if value is None else f"an object of type {type(value).__name__}"
