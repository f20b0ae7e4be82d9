"""Convert and check arguments by their annotations."""

import collections
import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, Union, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key, Shaped, jaxtyped

from dissociation._core.checks import check_finite, fail, fail_kind, is_traced
from dissociation._core.conversion import (
    as_array,
    as_classes,
    as_key,
    as_numbers,
    as_one_hot,
    check_fits,
    check_pixels,
    describe,
    holds_arrays,
    kind_words,
    number_kind,
    refuse_nested,
    warn_narrowed,
)
from dissociation._core.frames import as_trajectories, check_columns, check_same_rows, is_table
from dissociation._core.types import InTime, Labels

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def validated(function: Function) -> Function: ...
@overload
def validated(
    *, finite: Iterable[str] = (), empty: Iterable[str] = (), pixels: Iterable[str] = ()
) -> Callable[[Function], Function]: ...
def validated(
    function: Any = None, *, finite: Iterable[str] = (), empty: Iterable[str] = (), pixels: Iterable[str] = ()
) -> Any:
    """Decorate a function so that its arguments are converted and checked by its annotations.

    Arrays in `finite` must be finite unless traced, those in `empty` may be empty, and those in `pixels` must not hold
    integers above 1.
    """
    if function is None:
        return functools.partial(validated, finite=tuple(finite), empty=tuple(empty), pixels=tuple(pixels))
    parameters = inspect.signature(function).parameters.values()
    positions = tuple(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    takes_more = any(p.kind == p.VAR_KEYWORD for p in parameters)

    @functools.cache  # at the first call: an import stays quick
    def rules() -> dict[str, _Rule]:
        hints = getattr(function, "__annotations__", {})
        found = {name: _rule(hints.get(name, Any), may_be_empty=name in empty) for name in positions}
        rules = {name: rule for name, rule in found.items() if rule is not None}
        # Labels last, because other arguments may hold the number of classes.
        return dict(sorted(rules.items(), key=lambda item: item[1].labels is not None))

    @functools.wraps(function)
    def gate(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(positions) or not (takes_more or kwargs.keys() <= set(positions)):
            return function(*args, **kwargs)  # Python's own error
        given = dict(zip(positions, args, strict=False)) | kwargs
        # An axis of one name has one length in all arguments. Shapes are always checked, values only if they are
        # known.
        bound = _Bound([], {})
        check_same_rows(given)
        for name in filter(given.__contains__, pixels):
            check_pixels(name, given[name])
        for name, rule in rules().items():
            if name in given:
                given[name] = rule.admit(name, given[name], bound)
        bound.check()
        for name in finite:
            if given.get(name) is not None:
                check_finite(name, given[name])
        return function(*(given[name] for name in positions[: len(args)]), **{name: given[name] for name in kwargs})

    gate.__validated__ = {"finite": finite, "empty": empty, "pixels": pixels}  # type: ignore[attr-defined]  # for tests
    return gate


class _Kind(NamedTuple):
    """Kinds of numbers and shape of one jaxtyping annotation."""

    numbers: frozenset[str]  # kinds among "bool", "int", "float", "complex"
    axes: tuple[str, ...]  # names, fixed lengths, and "..." or "*name" for any number of axes
    variadic: int | None  # position of "..." or "*name"
    shaped: Any  # jaxtyping's class of such shapes, for any numbers
    place: Any  # NumPy alone, JAX alone, or None

    @property
    def shape(self) -> str:
        """Return the axes in brackets."""
        return f"[{', '.join('...' if axis.startswith('*') else axis for axis in self.axes)}]"

    @property
    def words(self) -> str:
        """Return the description of such an array for a message."""
        return f"{kind_words(self.numbers)} {self.shape}"

    def fits(self, ndim: int) -> bool:
        """Return True if an array may have this number of axes."""
        return ndim == len(self.axes) if self.variadic is None else ndim >= len(self.axes) - 1

    def sizes(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the lengths of the axes of a shape that fits, a tuple for "*name"."""
        lengths: tuple[Any, ...] = shape
        if (at := self.variadic) is not None:
            end = len(shape) - len(self.axes) + at + 1
            lengths = (*shape[:at], shape[at:end], *shape[end:])
        return dict(zip(self.axes, lengths, strict=False))


class _Bound(NamedTuple):
    """Admitted arguments of one call."""

    arrays: list[tuple[str, Any, _Kind]]
    columns: dict[str, Any]  # labels of frames' columns

    def check(self) -> None:
        """Raise unless every shape fits, and axes of one name have one length."""
        wrong = _misfit(*((kind.shaped, array.shape) for _, array, kind in self.arrays))
        if wrong is not None:
            name, array, kind = self.arrays[wrong]
            self._refuse(name, array.shape, kind)

    def _refuse(self, name: str, shape: tuple[int, ...], kind: _Kind) -> NoReturn:
        if not kind.fits(len(shape)):
            least, count = ("", len(kind.axes)) if kind.variadic is None else ("at least ", len(kind.axes) - 1)
            axes = f"have {least}{count} {'axis' if count == 1 else 'axes'} {kind.shape}"
            fail(name, axes if count else "be a single number", f"shape {shape}")
        where = ""
        for axis, size in kind.sizes(shape).items():
            first, known = self.first(axis)
            if first != name and known != size and axis.lstrip("*").isidentifier() and not where:
                where = f" with {axis.lstrip('*')} = {known} as in `{first}`"
        fail(name, f"be of shape {kind.shape}{where}", f"shape {shape}")

    def first(self, axis: str) -> tuple[str | None, Any]:
        """Return the first argument that has an axis of this name, and its length."""
        sizes = ((name, kind.sizes(array.shape).get(axis)) for name, array, kind in self.arrays)
        return next(((name, size) for name, size in sizes if size is not None), (None, None))


@functools.lru_cache(4096)
def _misfit(*shapes: tuple[Any, tuple[int, ...]]) -> int | None:
    """Return the position of the first shape that does not fit its jaxtyping class and the axes before it."""
    # In one context, because jaxtyping's import hook compares axes within a function only.
    with jaxtyped("context"):
        for position, (shaped, shape) in enumerate(shapes):
            if not isinstance(jax.ShapeDtypeStruct(shape, np.float32), shaped):
                return position
    return None


@dataclasses.dataclass(frozen=True)
class _Rule:
    """Types that one parameter accepts."""

    optional: tuple[bool, ...] = ()
    keys: tuple[bool, ...] = ()  # False for one key, True for one per member
    arrays: tuple[_Kind, ...] = ()
    labels: Labels | None = None
    numbers: tuple[type, ...] = ()  # Python's own: bool, int, float, complex
    sequence: tuple[type, ...] = ()  # of such numbers
    listed: tuple[_Kind, ...] = ()  # arrays, in a list
    instances: tuple[type, ...] = ()
    function: tuple[Any, ...] = ()
    in_time: tuple[InTime, ...] = ()
    may_be_empty: bool = False

    def admit(self, name: str, value: Any, bound: _Bound) -> Any:
        """Return the converted argument, or raise an error that names the argument."""
        # Text is a sequence, but no sequence of numbers.
        text = isinstance(value, (str, bytes)) and collections.abc.Sequence in self.instances
        instance = isinstance(value, self.instances) and not text
        if (value is None and self.optional) or instance or (self.function and callable(value)):
            return value
        value = as_trajectories(name, value, one=not self.listed) if self.in_time else value
        if self.listed and holds_arrays(value):
            return [self._admit_item(f"{name}[{i}]", item) for i, item in enumerate(value)]
        if self.keys:
            return as_key(name, value, stacked=self.keys[0] if len(self.keys) == 1 else None)
        if self.labels is not None:
            return self._admit_labels(name, value, self.labels, bound)
        if self.numbers and self._is_number(value):
            return self._admit_number(name, value)
        if self.arrays and (self._has_axes or not self.numbers):
            return self._admit_array(name, value, self.arrays, bound, 2 if self.listed else None)
        if self.sequence:
            return self._admit_sequence(name, value)
        # A class of another library may have the same name, so the message has full names.
        if type(value).__name__ in {kind.__name__ for kind in self.instances}:
            wanted = " or ".join(f"of type {_full_name(kind)}" for kind in self.instances)
            fail_kind(name, f"be {wanted}", f"an object of type {_full_name(type(value))}")
        advice = ""
        if self.numbers and hasattr(value, "__float__"):  # a scalar of another library
            advice = f"Pass {self.numbers[0].__name__}(...)"
        words = ["a function"] if self.function else []
        words += ["text" if kind is str else f"of type {kind.__name__}" for kind in self.instances]
        words += [f"a list of arrays of {kind.words}" for kind in self.listed]
        words += [self._number_words] if self.numbers else []
        return fail_kind(name, f"be {' or '.join(words)}", describe(value), advice)

    @functools.cached_property
    def _has_axes(self) -> bool:
        return any(kind.axes for kind in self.arrays)

    def _is_number(self, value: Any) -> bool:
        """Return True for scalars, and for arrays if the annotation has no axes."""
        if isinstance(value, (np.ndarray, np.generic, jax.Array)) or is_traced(value):
            return value.ndim == 0 or not (self._has_axes or self.sequence)
        return isinstance(value, (bool, int, float, complex))

    @property
    def _number_words(self) -> str:
        kinds = set(self.numbers)
        return "a number" if {float, complex} & kinds else "a boolean" if kinds == {bool} else "an integer"

    def _admit_array(
        self, name: str, value: Any, kinds: tuple[_Kind, ...], bound: _Bound, deepest: int | None = None
    ) -> Any:
        """Return an array of the first kind that fits. Nested lists may have `deepest` axes, or any number."""
        bare = not any(kind.axes for kind in kinds)
        words = ("a number" if bare else kinds[0].words) + (", or a list of arrays" if deepest else "")
        if deepest != 0 and kinds[0].axes[:1] in (("n",), ("m",)) and is_table(value):
            check_columns(name, value, bound.columns, kinds[0].axes[-1])
        array = as_array(name, value, words, bare=bare, may_be_empty=self.may_be_empty)
        if deepest is not None:
            refuse_nested(name, value, array, deepest)
        kind = next((kind for kind in kinds if kind.fits(array.ndim)), kinds[0])
        counts = number_kind(array.dtype) == "int"
        if "float" in kind.numbers and not (counts and "int" in kind.numbers):
            if kind.place is not np.ndarray:
                warn_narrowed(name, array)
            elif counts and not is_traced(array):  # the host keeps all digits
                array = np.asarray(array, np.float64)
        array = as_numbers(name, array, kind.numbers)
        bound.arrays.append((name, array, kind))
        return _placed(name, array, kind)

    def _admit_item(self, name: str, value: Any) -> Any:
        own = _Bound([], {})  # axes of one name may differ in length from item to item
        value = self._admit_array(name, value, self.listed, own, deepest=0)
        own.check()
        return value

    def _admit_number(self, name: str, value: Any) -> Any:
        kinds, words = set(self.numbers), self._number_words
        if isinstance(value, (bool, np.bool_)) and bool not in kinds:
            fail_kind(name, f"be {words}", repr(value))
        if type(value) in kinds or (type(value) is int and {float, complex} & kinds):
            return value
        array = as_array(name, value, words, bare=True)
        if array.ndim:
            fail(name, f"be {words}, not an array", f"shape {array.shape}")
        if any(kind.fits(0) for kind in self.arrays) and (float in kinds or complex in kinds or is_traced(array)):
            return _placed(name, as_numbers(name, array, self.arrays[0].numbers), self.arrays[0])
        if is_traced(array):
            fail_kind(name, f"be {words} that is known when the program is traced", "a traced value")
        wanted = next(kind for kind in (complex, float, int, bool) if kind in kinds)
        return wanted(as_numbers(name, array, frozenset({wanted.__name__})).item())

    def _admit_sequence(self, name: str, value: Any) -> Any:
        if self.may_be_empty and isinstance(value, (tuple, list)) and not value:
            return ()
        words = "real numbers" if float in self.sequence else "whole numbers"
        array = as_array(name, value, f"{words}, one after the other")
        if array.ndim != 1 or is_traced(array):
            fail(name, f"be known {words}, one after the other", f"shape {array.shape}")
        return tuple(as_numbers(name, array, frozenset({"float" if float in self.sequence else "int"})).tolist())

    def _admit_labels(self, name: str, value: Any, kind: Labels, bound: _Bound) -> Any:
        width = self.arrays[0].axes[-1]  # one name for classes, or their number
        if kind.one_hot:
            num_classes = int(width) if width.isdigit() else bound.first("classes")[1]
            labels = as_one_hot(name, value, num_classes, soft=kind.soft)
        else:
            labels = as_classes(name, value, may_be_empty=self.may_be_empty)
        bound.arrays.append((name, labels, self.arrays[0]))
        return labels


def _full_name(kind: type) -> str:
    """Return the public path of a class, without private modules."""
    return ".".join([*(part for part in kind.__module__.split(".") if not part.startswith("_")), kind.__name__])


def _placed(name: str, array: Any, kind: _Kind) -> Any:
    if kind.place is np.ndarray:
        if is_traced(array):
            fail_kind(name, "be known: it is worked on by the host", "a traced value")
        return np.asarray(array)
    check_fits(name, array)
    return jnp.asarray(array) if kind.place is jax.Array else array


def _rule(hint: Any, *, may_be_empty: bool = False) -> _Rule | None:
    """Return the rule of an annotation, or None if any value is accepted."""
    slots: dict[str, list[Any]] = collections.defaultdict(list)
    for member in _members(hint):
        slot, item = _sorted_in(member)
        slots[slot].append(item)
    if "free" in slots:
        return None
    arrays = [] if "keys" in slots else slots["arrays"]  # an array beside a key is its raw form
    if len({kind.place for kind in arrays}) > 1:
        arrays = list(dict.fromkeys(kind._replace(place=None) for kind in arrays))
    labels = next(iter(slots.pop("labels", [])), None)
    accepted = {slot: tuple(items) for slot, items in (slots | {"arrays": arrays}).items()}
    return _Rule(**accepted, labels=labels, may_be_empty=may_be_empty)


def _members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, each after the marks of its annotation."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _members(member)
    elif typing.get_origin(hint) is Annotated:
        yield from (mark for mark in hint.__metadata__ if isinstance(mark, Labels | InTime))
        yield from _members(hint.__origin__)
    else:
        yield hint


def _sorted_in(member: Any) -> tuple[str, Any]:
    """Return the field and entry of `_Rule` for a member of a union."""
    origin = typing.get_origin(member)
    if member is None or member is type(None):
        return "optional", True
    if isinstance(member, Labels | InTime):
        return "labels" if isinstance(member, Labels) else "in_time", member
    if hasattr(member, "dim_str"):
        return ("keys", bool(member.dim_str.split())) if member.dtype is Key else ("arrays", _kind(member))
    if member in (bool, int, float, complex):
        return "numbers", member
    if origin is collections.abc.Callable:
        return "function", member
    if origin in _SEQUENCES:
        first, *rest = typing.get_args(member)
        if first in (int, float):
            return "sequence", first
        slot, item = _sorted_in(next(_members(first)))
        if slot == "arrays" and (rest == [...] or not rest):
            return "listed", item._replace(
                place=item.place if item.place is np.ndarray else None
            )  # functions convert them
    kind = origin or member
    if isinstance(kind, type) and kind not in (Any, object, jax.Array, np.ndarray):
        return "instances", kind
    return "free", member  # Any, bare arrays, type variables, forward references


_SEQUENCES = (collections.abc.Sequence, tuple, list)
_NAMES = {"bool": "bool", "int": "int32", "float": "float32", "complex": "complex64"}


def _kind(annotation: Any) -> _Kind:
    known, words = annotation.dtype.dtypes, annotation.dim_str
    numbers = frozenset(kind for kind, example in _NAMES.items() if example in known) or frozenset({"int"})
    axes = tuple(words.split())
    variadic = next((i for i, axis in enumerate(axes) if axis.startswith(("...", "*"))), None)
    return _Kind(numbers, axes, variadic, Shaped[Any, words], annotation.array_type)
