"""Convert values to arrays, keys and labels, with errors that name the argument."""

import functools
import reprlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dissociation._core.checks import check_classes, check_finite, fail, fail_kind, is_traced, warn

LARGEST_MEAN_RATIO = 1e3
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
    if jnp.issubdtype(dtype, np.timedelta64):  # which NumPy counts as integers
        return ""
    kinds = (kind for kind, parent in _PARENTS.items() if jnp.issubdtype(dtype, parent))
    return next(kinds, "")


def as_array(
    name: str, value: Any, words: str = "numbers", *, bare: bool = False, may_be_empty: bool = False
) -> jax.Array | np.ndarray:
    """Return arrays of JAX and NumPy unchanged, other values converted through NumPy or DLPack.

    Args:
        name: Name of the argument, for errors.
        value: Argument.
        words: Words for valid entries, for errors: "`name` must be an array of {words}".
        bare: If True, `words` describe the whole array: "`name` must be {words}".
        may_be_empty: If True, an array without entries is valid.
    """
    requirement = f"be {words}"
    if not bare:
        requirement = f"be an array of {words}"
    array = value
    if not isinstance(value, (jax.Array, np.ndarray)):
        array = _converted(name, value, requirement)
    if number_kind(array.dtype) not in KINDS:
        has_elements = isinstance(array, np.ndarray) and array.ndim > 0
        if has_elements and any(isinstance(element, (str, bytes)) for element in array.flat):
            advice = "`numpy.unique(labels, return_inverse=True)[1]` makes integers of text labels"
            fail_kind(name, requirement, f"text, {reprlib.repr(value)}", advice)
        fail_kind(name, requirement, describe(array if array.ndim else value))

    if not isinstance(array, jax.Array):
        if np.ma.is_masked(array):
            fail(name, requirement, "a masked array", "Fill or drop its masked entries")
        array = np.asarray(array)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
    if array.size == 0 and not may_be_empty:
        fail(name, "not be empty", f"shape {array.shape}")
    return array


def to_device(array: Any, dtype: Any = None) -> jax.Array:
    """Return a JAX array.

    Known NumPy arrays, and numbers of a `dtype`, are copied on the host without a compiled program.
    """
    if dtype is not None and isinstance(array, bool | int | float):
        array = np.asarray(array)
    if not isinstance(array, np.ndarray | np.generic):
        return jnp.asarray(array, dtype)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype if dtype is None else dtype)
    # A CPU would share the memory of an aligned array, which its owner may change before the
    # program runs.
    return jax.device_put(np.array(array, dtype))


def as_examples(name: str, value: Any, *, finite: bool = False) -> Any:
    """Return JAX arrays, samples first: one array, or a dictionary or tuple of arrays."""

    def converted(leaf: Any) -> jax.Array:
        array = as_array(name, leaf, "numbers [samples, ...]")
        check_fits(name, array)
        if number_kind(array.dtype) == "float":
            # No outer function has checked these arrays.
            warn_narrowed(name, array, gates=sys.maxsize)
        array = to_device(array)
        if finite:
            check_finite(name, array)
        return array

    arrays = jax.tree.map(converted, value, is_leaf=lambda x: not isinstance(x, (dict, tuple)))
    shapes = [leaf.shape for leaf in jax.tree.leaves(arrays)]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        requirement = "have at least 1 axis [samples, ...], of one length for all arrays"
        words = f"shapes {shapes}"
        if len(shapes) == 1:
            words = f"shape {shapes[0]}"
        fail(name, requirement, words)
    return arrays


def _converted(name: str, value: Any, requirement: str) -> Any:
    """Return the array of the first conversion that succeeds, or raise."""
    if getattr(getattr(value, "index", None), "nlevels", 1) > 1:
        advice = "`lagged_pairs` reads runs and times; value.to_numpy() drops the index"
        fail(name, requirement, "a frame of several index levels", advice)
    conversions = []
    if hasattr(value, "__dlpack__"):
        # The second is for other devices than the host.
        conversions = [np.from_dlpack, jnp.from_dlpack]
    if hasattr(value, "__array__") or not conversions:
        # The last is for lists of traced numbers.
        conversions = [np.asarray, *conversions, jnp.asarray]
    reasons = []
    for convert in conversions:
        try:
            return convert(value)
        except Exception as error:
            reasons.append(str(error).partition("\n")[0])
    if isinstance(value, (list, tuple)):
        fail(name, requirement, "a list whose rows differ in shape")
    return fail_kind(name, requirement, f"{describe(value)} ({reasons[0]})")


def holds_arrays(value: Any) -> bool:
    """Return True for a list of arrays, False for nested lists of numbers."""
    if not isinstance(value, (list, tuple)):
        return False
    plain = (list, tuple, bool, int, float, complex, np.generic)
    return not all(isinstance(element, plain) for element in value)


def refuse_nested(name: str, value: Any, array: Any, max_ndim: int) -> None:
    """Raise if nested lists have more than `max_ndim` axes."""
    # Deeper lists are ambiguous: one array, or a list of arrays.
    if isinstance(value, (list, tuple)) and array.ndim > max_ndim:
        advice = "Pass numpy.asarray(...) if they are one array"
        words = f"nested lists of shape {array.shape}"
        fail(name, "be an array, or a list of arrays", words, advice)


def as_numbers(name: str, array: Any, numbers: frozenset[str]) -> Any:
    """Return an array converted to one of the kinds `numbers`. Half precisions become float32."""
    kind = number_kind(array.dtype)
    if kind in numbers:
        size = array.dtype.itemsize
        if kind != "float" or size in (4, 8):
            return array
        return array.astype(np.float32 if size < 4 else np.float64)
    for wider in ("float", "complex", "int"):
        if wider in numbers and KINDS.index(kind) < KINDS.index(wider):
            return array.astype(jax.dtypes.canonicalize_dtype(wider))
    advice = ""
    if kind == "complex":
        advice = "Take its real and imaginary parts as two features"
    return fail_kind(name, f"hold {kind_words(numbers)}", f"dtype {array.dtype}", advice)


def warn_narrowed(name: str, array: Any, *, gates: int = 1) -> None:
    """Warn if JAX's floats lose digits in which numbers of a column differ, or round integers.

    There is no warning if more than `gates` calls of `validated` functions lie between the user's
    line and this one, because an outer one has already warned of its argument.
    """
    kind = number_kind(array.dtype)
    working = jax.dtypes.canonicalize_dtype(float)
    exact_size = {"int": working.itemsize // 2, "float": working.itemsize}.get(kind, np.inf)
    if is_traced(array) or array.dtype.itemsize <= exact_size or not array.ndim or not array.size:
        return

    width = 1
    if array.ndim > 1:
        width = array.shape[-1]
    rows = np.asarray(array).reshape(-1, width)
    num_rows = min(1000, 30 + 2_000_000 // width)
    # The stride is odd, because every 2^k-th of consecutive large integers is exact in floats.
    stride = -(-len(rows) // num_rows) | 1
    rows = rows[::stride]
    with np.errstate(all="ignore"):
        narrowed = rows.astype(working)
        rounding = rows.astype(np.float64) - narrowed
        mean = np.abs(rows.mean(0, dtype=np.float64))
        deviation = (rows - rows.min(0)).std(0, dtype=np.float64)
        # Rounding to float32 is about 2 ** -25 of the mean, or zero for numbers such as small
        # integers.
        lost_fraction = np.std(rounding, 0) / deviation
        is_exact = (narrowed.astype(rows.dtype) == rows).all(0)

    if kind == "int":
        is_lost = ~is_exact & (deviation > 0)
    else:
        # Two or three numbers may lie close by chance, and a constant may vary by the rounding of
        # float64.
        limit = 0.01
        if len(rows) > 3:
            limit = LARGEST_MEAN_RATIO * 2.0**-25
        is_varying = deviation > 64 * np.finfo(np.float64).eps * mean
        is_lost = (lost_fraction > limit) & is_varying
    if not is_lost.any():
        return

    ratio = mean / np.where(is_lost, deviation, 1.0)
    column = int(np.argmax(np.where(is_lost, ratio, 0.0)))
    num_digits = np.finfo(working).precision + 1
    log_ratio = np.log10(deviation[column] / mean[column])
    digits = np.clip(log_ratio + num_digits, 0, num_digits)
    subject = f"`{name}`"
    if array.ndim > 1:
        subject = f"Column {column} of {subject}"
    advice = "Subtract the means first"
    if working == np.float32:
        advice += ", or call jax.config.update('jax_enable_x64', True) at the start"
    warn(
        f"{subject} varies by {deviation[column]:.2g} about {mean[column]:.2g}: {working} keeps "
        f"{digits:.0f} digits of it. {advice}.",
        gates=gates,
    )


def common_dtype(names: list[str], arrays: list[Any]) -> Any:
    """Return a dtype in which JAX holds all arrays."""
    dtypes = {jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays}
    # NumPy's promotion keeps digits of integers, unlike JAX's.
    dtype = jax.dtypes.canonicalize_dtype(np.result_type(*dtypes))
    if len(dtypes) == 1:
        return dtype
    for name, array in zip(names, arrays, strict=True):
        if number_kind(dtype) == "int":
            check_fits(name, array, dtype)
        elif number_kind(array.dtype) == "int":
            warn_narrowed(name, array)
    return dtype


def check_fits(name: str, array: Any, dtype: Any = None) -> None:
    """Raise if integers are out of the range of `dtype`, by default JAX's."""
    if dtype is None:
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    is_integer = number_kind(array.dtype) == "int"
    if is_traced(array) or dtype == array.dtype or not is_integer or not array.size:
        return
    limits = np.iinfo(dtype)
    integers = np.asarray(array)
    extreme = integers.max()
    if extreme <= limits.max:
        extreme = integers.min()
    if not limits.min <= extreme <= limits.max:
        advice = "Larger ones need jax.config.update('jax_enable_x64', True)"
        fail(name, f"hold integers from {limits.min} to {limits.max}", extreme, advice)


def check_pixels(name: str, images: Any) -> None:
    """Raise if images hold integers above 1."""
    array = as_array(name, images)
    if is_traced(array) or number_kind(array.dtype) != "int":
        return
    largest = np.asarray(array).max()
    if largest > 1:
        advice = "Divide grey levels by 255; give integers that are meant as they are as floats"
        fail(name, "be numbers, for pixels from 0 to 1", f"integers up to {largest}", advice)


def kind_words(numbers: frozenset[str]) -> str:
    """Return the words for numbers of these kinds."""
    if "float" in numbers:
        if "complex" in numbers:
            return "numbers"
        return "real numbers"
    if "complex" in numbers:
        return "complex numbers"
    if numbers == {"bool"}:
        return "booleans"
    return "integers"


def as_key(name: str, value: Any, ndims: tuple[int, ...]) -> Any:
    """Return a random key, typed or raw, or keys with one of the numbers of axes `ndims`."""
    requirement = (
        "be random keys, one per member, as `jax.random.split(jax.random.key(0), 3)` makes them"
    )
    advice = ""
    if 0 in ndims:
        requirement = "be a random key, as `jax.random.key(0)` makes it"
        advice = "Map over keys by `jax.vmap`"
    is_raw = getattr(value, "dtype", None) == np.uint32 and value.shape[-1:] == (2,)
    if not is_raw and not (isinstance(value, jax.Array) and number_kind(value.dtype) == "key"):
        fail_kind(name, requirement, describe(value))
    shape = value.shape
    if is_raw:
        shape = shape[:-1]
    if len(shape) not in ndims:
        fail(name, requirement, f"keys of shape {shape}", advice)
    if is_raw:
        return to_device(value)
    return value


def as_classes(name: str, labels: Any, *, may_be_empty: bool = False) -> Any:
    """Return labels as integers [n], from integers or one-hot rows [n, classes]."""
    labels = _checked_labels(name, labels, may_be_empty=may_be_empty)
    if labels.ndim == 1:
        return labels
    xp = jnp if isinstance(labels, jax.Array) else np
    return xp.argmax(labels, axis=1)


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
    words = "integers [n] or one-hot rows [n, classes]"
    if soft:
        words = "integers [n] or rows of probabilities [n, classes]"
    labels = as_array(name, labels, words, bare=True, may_be_empty=may_be_empty)
    requirement = f"be {words}"
    if labels.ndim == 1:
        return _checked_integers(name, labels, requirement)
    if labels.ndim != 2:
        fail(name, requirement, f"shape {labels.shape}")
    if labels.shape[1] == 1:
        advice = "Take it out: labels[:, 0]"
        fail(name, requirement, f"one column, shape {labels.shape}", advice)

    labels = as_numbers(name, labels, frozenset({"int", "float"}))
    if not is_traced(labels):
        rows = np.asarray(labels)
        is_valid = (rows == 0) | (rows == 1)
        tolerance = 0
        if soft:
            is_valid = rows >= 0
            tolerance = 1e-3
        is_wrong = ~(is_valid.all(1) & (np.abs(rows.sum(1) - 1) <= tolerance))
        if is_wrong.any():
            i = int(is_wrong.argmax())
            fail(name, requirement, f"{np.array2string(rows[i], threshold=12)} in row {i}")
    return labels


def _checked_integers(name: str, labels: Any, requirement: str) -> Any:
    if number_kind(labels.dtype) not in ("int", "bool"):
        advice = "If they are integers, pass labels.astype(int)"
        fail_kind(name, requirement, f"dtype {labels.dtype}", advice)
    if labels.dtype == np.bool_:
        labels = labels.astype(int)
    # Under a trace, results computed from JAX arrays are traced, so NumPy checks known labels.
    if not is_traced(labels) and labels.size:
        smallest = int(np.min(np.asarray(labels)))
        if smallest < 0:
            fail(name, "be integers from 0", smallest)
    check_fits(name, labels)
    return labels


def describe(value: Any) -> str:
    """Return a short description of a value for an error message."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    if isinstance(value, (str, bytes, int, float, complex)):
        return f"{type(value).__name__} {reprlib.repr(value)}"
    if callable(value) and hasattr(value, "__name__"):
        noun = "class" if isinstance(value, type) else "function"
        return f"the {noun} {value.__name__}"
    if value is None:
        return "None"
    return f"an object of type {type(value).__name__}"
