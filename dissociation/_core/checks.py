"""Argument checks, whose messages read "`name` must ..., got ..."."""

import importlib
import inspect
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

_INNER = ("dissociation", "koopman", "jax", "equinox", "jaxtyping", "beartype")
"""Packages whose frames are not the user's."""


class WrongValue(ValueError):
    """Error of a wrong argument."""


def fail(
    name: str,
    requirement: str,
    received: object,
    advice: str = "",
    error: type[Exception] = WrongValue,
) -> NoReturn:
    """Raise an error, "`name` must `requirement`, got `received`. `advice`."."""
    words = str(received).removesuffix(".") or "nothing"
    message = f"`{name}` must {requirement}, got {words}."
    if advice:
        message += f" {advice}."
    raise error(message)


def import_extra(module: str, use: str, extra: str) -> Any:
    """Import a package of one of the extras, or name the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} must be installed for {use}: pip install 'dissociation[{extra}]'."
        ) from error


def fail_kind(name: str, requirement: str, received: object, advice: str = "") -> NoReturn:
    """Raise a `TypeError` with the message of `fail`."""
    fail(name, requirement, received, advice, TypeError)


def warn(
    message: str, category: type[Warning] = RuntimeWarning, *, gates: int = sys.maxsize
) -> None:
    """Warn at the user's line, unless more than `gates` `validated` calls lie in between."""
    frame = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INNER:
        gates -= frame.f_code.co_name == "gate"
        frame = frame.f_back
        level += 1
    # An outer validated function has already warned of its argument.
    if gates >= 0:
        warnings.warn(message, category, stacklevel=level)


def that_differ(names: Sequence[str]) -> str:
    """Return names and a verb that complete "whose ..."."""
    verb = "differs" if len(names) == 1 else "differ"
    return f"{', '.join(names)} {verb}"


def is_traced(value: Any) -> bool:
    """Return True if `value` is traced."""
    return isinstance(value, Tracer)


def check_known(
    reason: str, /, *, advice: str = "Call it outside of jit", **arguments: Any
) -> None:
    """Raise if arrays of an argument are traced, which `reason` does not allow."""
    requirement = "be known"
    if reason:
        requirement = f"be known: {reason}"
    for name, value in arguments.items():
        if any(map(is_traced, jax.tree.leaves(value))):
            fail_kind(name, requirement, "a traced value", advice)


def _check_range(name: str, value: Any, requirement: str, *, may_be_zero: bool) -> None:
    if is_traced(value):
        return
    number = np.asarray(value)
    if number.dtype.kind not in "iuf" and not jnp.issubdtype(number.dtype, jnp.floating):
        fail_kind(name, "be a real number", repr(value))
    is_in_range = number >= 0 if may_be_zero else number > 0
    if not np.all(np.isfinite(number) & is_in_range):
        fail(name, requirement, value)


def check_single(name: str, value: Any) -> None:
    """Raise unless `value` is a scalar, known or traced."""
    if np.ndim(value):
        fail(
            name, "be a single number", f"shape {np.shape(value)}", "Map over several by `jax.vmap`"
        )


def check_positive(name: str, value: Any) -> None:
    """Raise unless every known entry of `value` is positive and finite."""
    _check_range(name, value, "be positive and finite", may_be_zero=False)


def check_non_negative(name: str, value: Any) -> None:
    """Raise unless every known entry of `value` is non-negative and finite."""
    _check_range(name, value, "be non-negative and finite", may_be_zero=True)


def check_level(level: float) -> None:
    """Raise unless a confidence level lies between 0 and 1."""
    if not 0 < level < 1:
        fail("level", "be between 0 and 1", level)


def check_count(name: str, value: Any, *, minimum: int = 0, maximum: int | None = 2**31 - 1) -> int:
    """Return an untraced integer as a Python int; raise if it is not in `minimum` to `maximum`."""
    # Counts set shapes, so they are static. The default maximum is the largest size of an axis.
    if is_traced(value) or isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be a Python integer (it sets a shape), got {value!r}.")
    if value < minimum:
        fail(name, f"be at least {minimum}", value)
    if maximum is not None and value > maximum:
        fail(name, f"be at most {maximum}", value)
    return int(value)


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise unless `value` is one of `choices`, which the error lists."""
    choices = tuple(choices)
    if value not in choices:
        requirement = "be left out, as there is nothing to choose from"
        if choices:
            requirement = f"be one of {', '.join(map(repr, choices))}"
        fail(name, requirement, repr(value))


def check_classes(name: str, labels: ArrayLike, num_classes: int) -> None:
    """Raise if a label that is not traced lies outside of 0 to `num_classes` - 1."""
    if is_traced(labels) or not np.size(labels):
        return
    integers = np.asarray(labels)  # under a trace, results computed from JAX arrays are traced
    smallest = integers.min()
    largest = integers.max()
    if smallest < 0 or largest >= num_classes:
        fail(name, f"lie between 0 and {num_classes - 1}", f"{smallest} to {largest}")


def check_finite(name: str, array: ArrayLike) -> None:
    """Raise unless every known entry of `array` is finite."""
    if is_traced(array):
        return
    if isinstance(array, jax.Array) and array.devices().pop().platform != "cpu":
        with jax.ensure_compile_time_eval():  # on the data's device, even under a trace
            if bool(jnp.isfinite(array).all()):
                return
    array = np.asarray(array)
    with np.errstate(all="ignore"):  # a sum is quicker than a mask, which is for sums that overflow
        if bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all()):
            return
    position = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
    fail(name, "be finite", f"{array[position]} at index {position}")


def takes(function: Any, number: int) -> bool:
    """Return True if a function can be called with `number` positional arguments."""
    with suppress(ValueError):  # a compiled function has no known signature
        signature = inspect.signature(function)
        try:
            signature.bind(*range(number))
        except TypeError:
            return False
    return True


def check_call(name: str, function: Any, arguments: Sequence[str], advice: str = "") -> None:
    """Raise a `TypeError` unless `function` takes `len(arguments)` positional arguments."""
    if not takes(function, len(arguments)):
        requirement = f"take {len(arguments)} arguments ({', '.join(arguments)})"
        fail_kind(name, requirement, inspect.signature(function), advice)


def check_takes(name: str, model: Any, example: Any) -> Any:
    """Return the shapes and dtypes of a model's outputs for one example.

    Raise a `TypeError` if the call fails.
    """
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), example)
    try:
        return jax.eval_shape(model, structs)
    except WrongValue:
        raise
    except (TypeError, ValueError, IndexError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        num_lines = 2 if lines[0].endswith(":") else 1
        reason = " ".join(lines[:num_lines]).rstrip(".")
        if reason.startswith(f"`{name}` must "):
            raise
        shapes = jax.tree.map(np.shape, example)
        raise TypeError(
            f"`{name}` must take one example of shape {shapes} (a single model, no stacked ones), "
            f"got an error: {reason}."
        ) from error


def check_model(name: str, model: Any, example: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a model's output for one example, or raise.

    The output must be one real array.
    """
    output = check_takes(name, model, example)
    if not isinstance(output, jax.ShapeDtypeStruct):
        fail_kind(name, "give one array", f"{jax.tree.structure(output)}")
    if jnp.issubdtype(output.dtype, jnp.complexfloating):
        fail_kind(name, "give real numbers", f"dtype {output.dtype}")
    if 0 in output.shape:
        fail(name, "give outputs that are not empty", f"shape {output.shape}")
    return output


def check_same_length(
    first: str, first_length: int, second: str, second_length: int, meaning: str = "samples"
) -> None:
    """Raise unless two arguments have the same number of `meaning`."""
    if first_length != second_length:
        fail(second, f"have as many {meaning} as `{first}` ({first_length})", second_length)


def check_distinct(name: str, values: Sequence[Any]) -> None:
    """Raise unless there are values and they are distinct."""
    if not values or len(set(values)) != len(values):
        fail(name, "be different from each other, one at least", values)


def check_seed(name: str, value: Any) -> None:
    """Raise unless `value` is an integer from 0 to 2^32 - 1."""
    # `jax.random.PRNGKey` gives other integers the key of one in this range.
    if not 0 <= check_count(name, value, maximum=None) < 2**32:
        fail(name, "lie from 0 to 4294967295", value)
