"""Read representations of layers and members, and stack those of equal width."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from dissociation._core.checks import (
    check_choice,
    check_finite,
    check_same_length,
    fail,
    fail_kind,
    is_traced,
)
from dissociation._core.columns import Reading
from dissociation._core.conversion import holds_arrays, refuse_nested, to_device
from dissociation._core.frames import check_columns, is_table
from dissociation.models._representations import Layers
from dissociation.similarity._base import (
    Form,
    Measure,
    check_group_sizes,
    check_size,
    in_common_dtype,
    real_numbers,
    refuse_vanishing,
)

POSITIONS = ("samples", "neurons")
"""Positions (pixels, tokens, steps) as samples, [n h w, c], or as neurons, [n, h w c]."""

CHANNELS = ("last", "first")
"""Place of the channel axis among a sample's axes."""

Representations = Mapping[str, Any] | Sequence[Any] | Array | np.ndarray


class Items(NamedTuple):
    """Labelled representations of the same samples."""

    labels: list[tuple[str, int]]
    arrays: list[Array]  # [items, n, p], one per width
    indices: list[list[int]]  # of the items of each array among the labels
    num_positions: int = 1  # rows of one sample
    name: str = ""
    single: bool = False  # True if the caller gave one array without an axis of members

    @property
    def number(self) -> int:
        """Return the number of rows."""
        return self.arrays[0].shape[1]

    @property
    def members(self) -> list[int]:
        """Return the member of each item."""
        return [member for _, member in self.labels]

    def stacks(self) -> list[tuple[Array, list[int]]]:
        """Return each array with the indices of its items."""
        return list(zip(self.arrays, self.indices, strict=True))

    def stack_with(self, index: int) -> tuple[Array, list[int]]:
        """Return the array that holds an item, and the indices of its items."""
        return next(stack for stack in self.stacks() if index in stack[1])

    def is_constant(self, index: int) -> bool:
        """Return True if all samples of a representation are the same."""
        array, indices = self.stack_with(index)
        features = np.asarray(array[indices.index(index)])
        return not np.ptp(features, axis=0).any()

    def name_of(self, index: int) -> str:
        """Return a representation's layer or argument, and its member, for messages."""
        layer, member = self.labels[index]
        if len(self.labels) == 1 and not layer:
            return self.name
        return f"{layer or self.name} {member}"


def _named(name: str, representations: Any) -> list[tuple[str, str, Any]]:
    """Return representations with their names in messages and in labels."""
    if isinstance(representations, Mapping):
        if len(set(map(str, representations))) < len(representations):
            layers = list(representations)
            fail(name, "have layers whose names differ as text", layers, "Rename one")
        pairs = representations.items()
        return [(f"{name}[{layer!r}]", str(layer), features) for layer, features in pairs]
    if holds_arrays(representations):
        pairs = enumerate(representations)
        return [(f"{name}[{index}]", "", features) for index, features in pairs]
    return [(name, "", representations)]


def _read(name: str, features: Any, max_ndim: int | None) -> np.ndarray:
    """Return finite real numbers on the host.

    Nested lists may have `max_ndim` axes, or any number if it is None.
    """
    if is_table(features):
        check_columns(name, features, reading=Reading(in_time=False))
    array = real_numbers(name, features, "real numbers [n, p] or [members, n, p]", gates=2)
    if max_ndim is not None:
        refuse_nested(name, features, array, max_ndim)
    if is_traced(array):
        requirement = "be concrete: pairs of representations are planned on the host"
        advice = "Under a transformation call the measures themselves"
        fail_kind(name, requirement, "a traced value", advice)
    check_finite(name, array)
    # Stacked on the host, where arranging axes compiles nothing.
    return np.asarray(array)


def _sample_rank(name: str, array: np.ndarray, members: bool | None) -> int:
    """Return the number of axes of one sample."""
    # A guess from the number of axes would fail silently, so the caller states the axes.
    if members is None and array.ndim > 2:
        first, second, *shape = array.shape
        advice = (
            f"True: {first} members, {second} samples each. "
            f"False: {first} samples, of shape {(second, *shape)} each"
        )
        fail("members", f"be True or False for `{name}` of shape {array.shape}", "None", advice)
    if members:
        return array.ndim - 2
    return array.ndim - 1


def as_items(
    name: str,
    representations: Any,
    *,
    members: bool | None,
    positions: str | None,
    channels: str | None,
) -> Items:
    """Return representations with their labels, stacked by width.

    Iterations of a loop are layers.
    """
    ranks = {}
    if isinstance(representations, Layers):
        representations = representations.unrolled()
        ranks = representations.ranks
    named = _named(name, representations)
    if not named:
        fail(name, "hold at least one representation", "none")
    is_bare = named[0][2] is representations
    max_ndim = 2 if is_bare else 0
    if isinstance(representations, Mapping):
        max_ndim = None

    labels = []
    arrays_of_width = defaultdict(list)
    indices_of_width = defaultdict(list)
    numbers = set()
    grids = set()
    single = False
    for full_name, layer, features in named:
        array = _read(full_name, features, max_ndim)
        axis = channels
        if layer in ranks:
            rank = ranks[layer]
            axis = "last"
        else:
            rank = _sample_rank(full_name, array, members)
        if array.ndim == 1 + rank:
            single = is_bare
            array = array[None]
        array, grid = _arranged(full_name, array, rank, positions, axis)
        refuse_vanishing(full_name, array)

        num_items, number, width = array.shape
        grids.add(grid)
        numbers.add(number)
        arrays_of_width[width].append(array)
        indices_of_width[width].extend(range(len(labels), len(labels) + num_items))
        num_members = sum(label == layer for label, _ in labels)
        labels += [(layer, num_members + item) for item in range(num_items)]

    # Positions are compared as samples, so every layer needs the same ones.
    if positions == "samples" and len(grids) > 1:
        requirement = 'have positions of one size throughout for `positions="samples"`'
        advice = 'Pass positions="neurons", which makes each position of each channel a neuron'
        fail(name, requirement, ", ".join(map(str, sorted(grids))), advice)
    if len(numbers) > 1:
        sizes = ", ".join(map(str, sorted(numbers)))
        fail(name, "be of the same samples throughout", f"{sizes} samples")

    stacks = in_common_dtype(*map(np.concatenate, arrays_of_width.values()))
    # Positions of one sample depend on each other: tests and intervals keep them together.
    num_positions = 1
    if positions == "samples":
        num_positions = int(np.prod(grids.pop()))
    return Items(labels, stacks, list(indices_of_width.values()), num_positions, name, single)


def _arranged(
    name: str, array: Any, rank: int, positions: str | None, channels: str | None
) -> tuple[Any, tuple]:
    """Return an array as [members, n, p], and the sizes of its positions."""
    if array.ndim != 2 + rank or rank < 0:
        requirement = "have axes [n, p] or [members, n, p], or those of positions in place of p"
        advice = "`members` states what the first axis is"
        fail(name, requirement, f"shape {array.shape}", advice)
    num_members, number = array.shape[:2]
    shape = array.shape[2:]
    if rank > 1:
        _check_stated("positions", positions, POSITIONS, shape)
    if rank < 2 or positions == "neurons":
        return array.reshape(num_members, number, -1), ()

    advice = f"Last: {shape[-1]} channels. First: {shape[0]} channels"
    _check_stated("channels", channels, CHANNELS, shape, advice)
    grid = shape[:-1]
    if channels == "first":
        grid = shape[1:]
        array = array.reshape(num_members, number, shape[0], -1).swapaxes(2, 3)
    num_rows = number * int(np.prod(grid))
    return array.reshape(num_members, num_rows, -1), grid


def _check_stated(
    name: str, choice: Any, choices: Sequence[str], shape: tuple[int, ...], advice: str = ""
) -> None:
    """Raise unless the caller states one of the choices."""
    if choice is None:
        requirement = f"be one of {', '.join(map(repr, choices))} for samples of shape {shape}"
        fail(name, requirement, "None", advice)
    check_choice(name, choice, choices)


def _padded(items: Items, width: int) -> Items:
    """Return a set of one width with columns of zeros up to `width`."""
    array = np.asarray(items.arrays[0])
    columns = (0, width - array.shape[2])
    padded = np.pad(array, ((0, 0), (0, 0), columns))
    return items._replace(arrays=[to_device(padded)])


def of_one_width(first: Items, second: Items) -> tuple[Items, Items]:
    """Return two sets of one width each as sets of the same width, if the widths are similar.

    The narrower one gets columns of zeros.
    """
    # Zeros change no products or distances of samples, and what is compiled once is quick at its
    # first call.
    if len(first.arrays) > 1 or len(second.arrays) > 1:
        return first, second
    narrow, wide = sorted(items.arrays[0].shape[2] for items in (first, second))
    if narrow == wide or wide > 2 * narrow:
        return first, second
    return _padded(first, wide), _padded(second, wide)


def check_sets(sets: Sequence[Items], measure: Measure) -> int:
    """Return the number of samples, or raise unless the measure can compare the sets."""
    name = sets[0].name
    number = sets[0].number
    widths = set()
    for items in sets:
        check_same_length(name, number, items.name, items.number)
        widths.update(array.shape[2] for array in items.arrays)
    if number % measure.repeats:
        requirement = (
            f"have rows that {measure.repeats} goes into, one per repeat of all conditions"
        )
        fail(name, requirement, number)
    if measure.same_width and len(widths) > 1:
        requirement = f"have as many classes throughout for {measure.name}"
        fail(sets[-1].name, requirement, ", ".join(map(str, sorted(widths))))
    return number


def check_fit(
    sets: Sequence[Items],
    form: Form,
    number: int,
    subsets: Sequence[np.ndarray] = (),
    groups: np.ndarray | None = None,
) -> None:
    """Raise unless every representation suits the form.

    It must also suit it with the samples of `subsets`, [choices, remaining] each.
    """
    smallest = min((rows.shape[1] for rows in subsets), default=number)
    condition = ""
    if smallest != number:
        condition = " without one block"
    for items in sets[: len(form.sides)]:
        width = max(array.shape[2] for array in items.arrays)
        check_size(form, items.name, smallest, width, condition=condition)
    if groups is None:
        return
    check_group_sizes(form, groups)
    for choices in subsets:
        for rows in choices:
            check_group_sizes(form, groups[rows], " without one block")
