"""Convert and check arguments by their annotations."""

import collections
import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar, Union, overload

import jax
import numpy as np
from jaxtyping import Key, Shaped, jaxtyped

from dissociation._core.checks import check_finite, fail, fail_kind, is_traced
from dissociation._core.columns import Reading
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
    to_device,
    warn_narrowed,
)
from dissociation._core.frames import (
    as_trajectories,
    check_columns,
    check_same_rows,
    is_table,
    take_groups,
)
from dissociation._core.types import Checked, InTime, Labels

READ_BY = {"time", "run", "columns"}
"""Arguments that name parts of a frame."""

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def validated(function: Function) -> Function: ...
@overload
def validated(
    *, finite: Iterable[str] = (), empty: Iterable[str] = (), pixels: Iterable[str] = ()
) -> Callable[[Function], Function]: ...
def validated(
    function: Any = None,
    *,
    finite: Iterable[str] = (),
    empty: Iterable[str] = (),
    pixels: Iterable[str] = (),
) -> Any:
    """Decorate a function so that its arguments are converted and checked by its annotations.

    Arrays in `finite` must be finite unless traced, those in `empty` may be empty, and those in
    `pixels` must not hold integers above 1.
    """
    if function is None:
        return functools.partial(
            validated, finite=tuple(finite), empty=tuple(empty), pixels=tuple(pixels)
        )
    parameters = inspect.signature(function).parameters.values()
    positions = tuple(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    takes_more = any(p.kind == p.VAR_KEYWORD for p in parameters)
    names_read = READ_BY if set(positions) >= READ_BY else set()
    reading = Reading(
        takes_names=bool(names_read), in_time=function.__module__.startswith("koopman")
    )
    run = _with_copies(function) if hasattr(function, "lower") else function

    @functools.cache  # at the first call: an import stays quick
    def rules() -> list[tuple[str, _Rule]]:
        hints = getattr(function, "__annotations__", {})
        pairs = [
            (name, _rule(hints.get(name, Any), may_be_empty=name in empty)) for name in positions
        ]
        # Labels last, because other arguments may hold the number of classes.
        return sorted(pairs, key=lambda pair: pair[1].labels is not None)

    @functools.wraps(function)
    def gate(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(positions) or not (takes_more or kwargs.keys() <= set(positions)):
            return function(*args, **kwargs)  # Python's own error
        arguments = dict(zip(positions, args, strict=False)) | kwargs
        names = {name: arguments[name] for name in names_read & arguments.keys()}
        # An axis of one name has one length in all arguments. Shapes are always checked, values
        # only if they are known.
        bound = _Bound([], {}, reading._replace(**names))

        check_same_rows(arguments)
        arguments = take_groups(arguments)
        for name in filter(arguments.__contains__, pixels):
            check_pixels(name, arguments[name])
        for name, rule in rules():
            if name in arguments:
                arguments[name] = rule.admit(name, arguments[name], bound)
                rule.check(name, arguments[name])
        bound.check()
        for name in finite:
            if arguments.get(name) is not None:
                check_finite(name, arguments[name])
        args = tuple(map(arguments.get, positions[: len(args)]))
        return run(*args, **{name: arguments[name] for name in kwargs})

    # Tests read these settings.
    gate.__validated__ = {  # type: ignore[attr-defined]
        "finite": finite,
        "empty": empty,
        "pixels": pixels,
    }
    return gate


def _with_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function that is called with copies of NumPy arrays.

    Their owner may change the arrays before the function runs.
    """

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(element) for element in value]
        if isinstance(value, np.ndarray):
            return to_device(value)
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: copied(value) for name, value in kwargs.items()}
        return function(*map(copied, args), **kwargs)

    return run


class _Form(NamedTuple):
    """Numbers that an argument may be."""

    kinds: frozenset[str]  # some of `conversion.KINDS`
    dims: str  # names of axes, as jaxtyping reads them
    container: Any  # JAX or NumPy alone, None for both, Python's class of a number, or tuple

    @property
    def words(self) -> str:
        """Return the description of such numbers for a message."""
        if self.container is tuple:
            return f"a sequence of {kind_words(self.kinds)}"
        if self.dims:
            return f"an array of {kind_words(self.kinds)} {_bracketed(self.dims)}"
        if {"float", "complex"} & self.kinds:
            return "a number"
        if "int" in self.kinds:
            return "an integer"
        return "a boolean"


def _bracketed(dims: str) -> str:
    """Return names of axes in brackets, for a message."""
    names = ["..." if axis.startswith("*") else axis for axis in dims.split()]
    return f"[{', '.join(names)}]"


class _Bound(NamedTuple):
    """Admitted arguments of one call."""

    # Names, descriptions, axes and shapes.
    arrays: list[tuple[str, str, tuple[str, tuple[int, ...]]]]
    columns: dict[str, Any]  # labels of frames' columns
    reading: Reading

    def check(self) -> None:
        """Raise unless axes of one name have one length."""
        position = _misfit(*(shape for _, _, shape in self.arrays))
        if position is None:
            return
        name, words, (dims, shape) = self.arrays[position]
        shapes = f"shape {shape}"
        for earlier, _, (earlier_dims, earlier_shape) in self.arrays[:position]:
            if set(earlier_dims.split()) & set(dims.split()):
                shapes += f", and {earlier_shape} for `{earlier}` {_bracketed(earlier_dims)}"
        fail(name, f"be {words}", shapes)

    def num_classes(self) -> int | None:
        """Return the length of the axis "classes", if an argument has one."""
        sizes = [shape[-1] for _, _, (dims, shape) in self.arrays if dims.endswith("classes")]
        if sizes:
            return sizes[0]
        return None


@functools.lru_cache(4096)
def _misfit(*shapes: tuple[str, tuple[int, ...]]) -> int | None:
    """Return the position of the first shape that does not fit its axes and the axes before it."""
    # In one context, because jaxtyping's import hook compares axes within a function only.
    with jaxtyped("context"):
        for position, (dims, shape) in enumerate(shapes):
            kind: Any = Shaped[Any, dims]
            if not isinstance(jax.ShapeDtypeStruct(shape, np.float32), kind):
                return position
    return None


class _Rule(NamedTuple):
    """Types that one parameter accepts."""

    plain: tuple[type, ...]  # classes whose instances pass unchanged
    exact: frozenset[type]  # Python's numbers, which pass unchanged
    forms: tuple[_Form, ...]
    items: tuple[_Form, ...]  # arrays, in a list
    keys: tuple[int, ...]  # numbers of axes of keys
    labels: Labels | None
    in_time: bool
    checks: tuple[Checked, ...]
    may_be_empty: bool
    words: str

    def admit(self, name: str, value: Any, bound: _Bound) -> Any:
        """Return the converted argument, or raise an error that names the argument."""
        if type(value) in self.exact or isinstance(value, self.plain):
            return value
        if self.in_time:
            reading = bound.reading._replace(by_index=True)
            value = as_trajectories(name, value, reading, is_single=not self.items)
        if self.items and not self.forms and isinstance(value, list | tuple) and not value:
            fail(name, f"be {self.words}", "an empty list")
        if self.items and holds_arrays(value):
            arrays = []
            for i, array in enumerate(value):
                unbound = _Bound([], {}, bound.reading)
                arrays.append(self._admit_array(f"{name}[{i}]", array, self.items, unbound, 0))
            return arrays
        if self.keys:
            return as_key(name, value, self.keys)
        if self.labels is not None:
            return self._admit_labels(name, value, self.labels, bound)
        if not self.forms:
            fail_kind(name, f"be {self.words}", describe(value))
        max_ndim = 2 if self.items else None
        return self._admit_array(name, value, self.forms, bound, max_ndim)

    def check(self, name: str, value: Any) -> None:
        """Raise unless the converted argument passes the checks of its annotation."""
        if value is not None:
            for mark in self.checks:
                mark.check(name, value)

    def _admit_labels(self, name: str, value: Any, mark: Labels, bound: _Bound) -> Any:
        dims = self.forms[0].dims
        if mark.one_hot:
            width = dims.split()[-1]  # a name, or the number of classes
            num_classes = int(width) if width.isdigit() else bound.num_classes()
            labels = as_one_hot(name, value, num_classes, soft=mark.soft)
        else:
            labels = as_classes(name, value, may_be_empty=self.may_be_empty)
        words = f"integers [n] or one-hot rows {_bracketed(dims)}"
        bound.arrays.append((name, words, (dims, labels.shape)))
        return labels

    def _admit_array(
        self, name: str, value: Any, forms: tuple[_Form, ...], bound: _Bound, max_ndim: int | None
    ) -> Any:
        """Return numbers in the first form that fits. Nested lists have up to `max_ndim` axes."""
        if is_table(value):
            axis = forms[0].dims.rpartition(" ")[2]
            check_columns(name, value, bound.columns, axis, reading=bound.reading)
        array = as_array(name, value, self.words, bare=True, may_be_empty=self.may_be_empty)
        if max_ndim is not None:
            refuse_nested(name, value, array, max_ndim)
        form = self._form_of(name, array, forms)
        kind = number_kind(array.dtype)
        is_listed = kind in form.kinds
        is_on_host = form.container not in _DEVICE
        if kind == "bool" and not form.dims and not is_listed:
            fail_kind(name, f"be {self.words}", array)
        if kind == "int" and not is_listed and is_on_host:
            array = np.asarray(array, np.float64)  # the host keeps all digits
        elif "float" in form.kinds and not is_on_host and not (kind == "int" and is_listed):
            warn_narrowed(name, array)
        if form.container is tuple and not array.size:
            return ()
        array = as_numbers(name, array, form.kinds)
        bound.arrays.append((name, self.words, (form.dims, array.shape)))

        if form.container is np.ndarray:
            return np.asarray(array)
        if form.container is tuple:
            return tuple(array.tolist())
        if is_on_host:
            return array.item()
        check_fits(name, array)
        return to_device(array) if form.container is jax.Array else array

    def _form_of(self, name: str, array: Any, forms: tuple[_Form, ...]) -> _Form:
        fitting = [form for form in forms if _misfit((form.dims, array.shape)) is None]
        for form in fitting:
            if form.container in _DEVICE or not is_traced(array):
                return form
        if fitting:
            requirement = f"be {self.words} that is known when the program is traced"
            fail_kind(name, requirement, "a traced value")
        return fail(name, f"be {self.words}", f"shape {array.shape}")


_DEVICE = (jax.Array, None)
"""Containers of arrays that may be traced."""


_WORDS: dict[Any, str] = {
    collections.abc.Callable: "a function", str: "text", types.NoneType: "", list | tuple: "a list",
}  # fmt: skip
"""Descriptions of classes."""


def _rule(hint: Any, *, may_be_empty: bool = False) -> _Rule:
    """Return the rule of an annotation."""
    slots = collections.defaultdict(list)
    for member in _members(hint):
        slot, alternative = _slot(member)
        slots[slot].append(alternative)
    forms = slots["arrays"]
    if len({form.container for form in forms}) > 1:
        forms = list(dict.fromkeys(form._replace(container=None) for form in forms))
    forms += slots["sequences"]

    python = set(slots["python"])
    widest = next((kind for kind in (complex, float, int, bool) if kind in python), None)
    if widest is not None:
        number = _Form(frozenset({widest.__name__}), "", widest)
        # Known arrays become Python's integers, but keep the precision of floats.
        position = 0 if widest in (int, bool) else len(forms)
        forms.insert(position, number)
    if {float, complex} & python:
        python.add(int)

    words = [form.words for form in forms] + ["a list of arrays"] * len(slots["items"])
    for kind in slots["plain"]:
        words.append(_WORDS.get(kind, f"of type {getattr(kind, '__name__', kind)}"))
    return _Rule(
        plain=tuple(slots["plain"]),
        exact=frozenset(python),
        forms=tuple(forms),
        items=tuple(slots["items"]),
        keys=tuple(slots["keys"]),
        labels=next(iter(slots["labels"]), None),
        in_time=bool(slots["in_time"]),
        checks=tuple(slots["checks"]),
        may_be_empty=may_be_empty,
        words=" or ".join(filter(None, dict.fromkeys(words))),
    )


_MARKS: dict[Any, str] = {Labels: "labels", InTime: "in_time", Checked: "checks"}
"""Slots of marks, by class."""


def _members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, each after the marks of its annotation."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        for member in typing.get_args(hint):
            yield from _members(member)
    elif typing.get_origin(hint) is Annotated:
        yield from (mark for mark in hint.__metadata__ if type(mark) in _MARKS)
        yield from _members(hint.__origin__)
    else:
        yield hint


_NAMES = {"bool": "bool", "int": "int32", "float": "float32", "complex": "complex64"}
"""One of jaxtyping's names of dtypes, by kind."""


def _slot(member: Any) -> tuple[str, Any]:
    """Return the slot of a rule, and its content, for a member of a union."""
    if type(member) in _MARKS:
        return _MARKS[type(member)], member
    if hasattr(member, "dim_str"):
        if member.dtype is Key:
            return "keys", len(member.dim_str.split())
        dtypes = member.dtype.dtypes
        kinds = frozenset(kind for kind, example in _NAMES.items() if example in dtypes)
        return "arrays", _Form(kinds, member.dim_str, member.array_type)
    if member in (bool, int, float, complex):
        return "python", member

    kind = typing.get_origin(member) or member
    if kind in (collections.abc.Sequence, tuple, list):
        arguments = typing.get_args(member) or (Any,)
        element = next(_members(arguments[0]))
        if element in (int, float):
            return "sequences", _Form(frozenset({element.__name__}), "_", tuple)
        if kind is not collections.abc.Sequence:
            return "plain", kind
        slot, form = _slot(element)
        if slot == "arrays":
            return "items", form._replace(container=None)  # functions convert them
        return "plain", list | tuple  # text is a sequence, too
    # Bare arrays, type variables and forward references accept any value.
    is_free = not isinstance(kind, type) or kind in (Any, jax.Array, np.ndarray)
    if is_free:
        return "plain", object
    return "plain", kind
