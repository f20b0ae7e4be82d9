"""Read representations of layers and members, and stack those of equal width."""

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
    places: list[list[int]]  # indices of items among the labels
    each: int = 1  # rows of one sample
    name: str = ""
    single: bool = False  # True if the caller gave one array without an axis of members

    def is_constant(self, place: int) -> bool:
        """Return True if all samples of a representation are the same."""
        stack, places = next(
            pair for pair in zip(self.arrays, self.places, strict=True) if place in pair[1]
        )
        return not np.ptp(np.asarray(stack[places.index(place)]), axis=0).any()

    def shown(self, place: int) -> str:
        """Return the text by which messages name a representation: its layer or argument, and its member."""
        layer, member = self.labels[place]
        return (
            self.name if len(self.labels) == 1 and not layer else f"{layer or self.name} {member}"
        )


def _named(name: str, given: Any) -> list[tuple[str, str, Any]]:
    """Return representations with their names in messages and in labels."""
    if isinstance(given, Mapping):
        if len(set(map(str, given))) < len(given):
            fail(name, "have layers whose names differ as text", list(given), "Rename one")
        return [(f"{name}[{layer!r}]", str(layer), value) for layer, value in given.items()]
    if holds_arrays(given):
        return [(f"{name}[{index}]", "", value) for index, value in enumerate(given)]
    return [(name, "", given)]


def as_items(
    name: str, given: Any, *, members: bool | None, positions: str | None, channels: str | None
) -> Items:
    """Return representations with their labels, stacked by width."""
    named = _named(name, given)
    if not named:
        fail(name, "hold at least one representation", "none")
    ranks = given.ranks if isinstance(given, Layers) else {}
    labels: list[tuple[str, int]] = []
    widths: dict[int, tuple[list[Array], list[int]]] = {}
    grids, single = set(), False
    for full, layer, value in named:
        if is_table(value):
            check_columns(full, value, reading=Reading(in_time=False))
        array = real_numbers(full, value, "real numbers [n, p] or [members, n, p]", gates=2)
        if not isinstance(given, Mapping):
            refuse_nested(full, value, array, 2 if value is given else 0)
        if is_traced(array):
            advice = "Under a transformation call the measures themselves"
            fail_kind(
                full,
                "be concrete: pairs of representations are planned on the host",
                "a traced value",
                advice,
            )
        check_finite(full, array)
        # Stacked on the host, where arranging axes compiles nothing.
        array = np.asarray(array)
        rank, place = ranks.get(layer), "last" if layer in ranks else channels
        if rank is None:
            # A guess from the number of axes would fail silently, so the caller states the axes.
            if members is None and array.ndim > 2:
                one, other, *rest = array.shape
                first, second = (
                    f"{one} members, {other} samples each",
                    f"{one} samples, of shape {(other, *rest)} each",
                )
                advice = f"True: {first}. False: {second}"
                fail(
                    "members",
                    f"be True or False for `{full}` of shape {array.shape}",
                    "None",
                    advice,
                )
            rank = array.ndim - (2 if members else 1)
        single = array.ndim == 1 + rank and named[0][2] is given
        array, grid = _arranged(
            full, array if array.ndim != 1 + rank else array[None], rank, positions, place
        )
        grids.add(grid)
        refuse_vanishing(full, array)
        arrays, places = widths.setdefault(array.shape[2], ([], []))
        arrays.append(array)
        places += range(len(labels), len(labels) + array.shape[0])
        before = sum(label == layer for label, _ in labels)
        labels += [(layer, before + index) for index in range(array.shape[0])]
    # Positions are compared as samples, so every layer needs the same ones.
    if positions == "samples" and len(grids) > 1:
        sizes = ", ".join(map(str, sorted(grids)))
        advice = 'Pass positions="neurons", which makes each position of each channel a neuron'
        fail(name, 'have positions of one size throughout for `positions="samples"`', sizes, advice)
    numbers = {array.shape[1] for arrays, _ in widths.values() for array in arrays}
    if len(numbers) > 1:
        fail(
            name,
            "be of the same samples throughout",
            f"{', '.join(map(str, sorted(numbers)))} samples",
        )
    joined = in_common_dtype(*(np.concatenate(arrays) for arrays, _ in widths.values()))
    # Positions of one sample depend on each other: tests and intervals keep them together.
    each = int(np.prod(grids.pop())) if positions == "samples" else 1
    return Items(labels, joined, [places for _, places in widths.values()], each, name, single)


def _arranged(
    name: str, array: Any, rank: int, positions: str | None, channels: str | None
) -> tuple[Any, tuple]:
    """Return an array as [members, n, p], and the sizes of its positions."""
    lead, shape = array.shape[:2], array.shape[2:]
    if array.ndim != 2 + rank or rank < 0:
        wanted = "have axes [n, p] or [members, n, p], or those of positions in place of p"
        fail(name, wanted, f"shape {array.shape}", "`members` states what the first axis is")
    if rank < 2:
        return array.reshape(*lead, -1), ()
    _check_stated("positions", positions, POSITIONS, shape)
    if positions == "neurons":
        return array.reshape(*lead, -1), ()
    _check_stated(
        "channels",
        channels,
        CHANNELS,
        shape,
        f"Last: {shape[-1]} channels. First: {shape[0]} channels",
    )
    if channels == "first":
        array = array.reshape(*lead, shape[0], -1).swapaxes(2, 3)
    grid = shape[1:] if channels == "first" else shape[:-1]
    return array.reshape(lead[0], lead[1] * int(np.prod(grid)), -1), grid


def _check_stated(
    name: str, value: Any, choices: Sequence[str], shape: tuple[int, ...], advice: str = ""
) -> None:
    if value is None:
        fail(
            name,
            f"be one of {', '.join(map(repr, choices))} for samples of shape {shape}",
            "None",
            advice,
        )
    check_choice(name, value, choices)


def of_one_width(first: Items, second: Items) -> tuple[Items, Items]:
    """Return two sets of one width each as sets of the same width, with columns of zeros, if they are similar."""
    # Zeros change no products or distances of samples, and what is compiled once is quick at its
    # first call.
    if len(first.arrays) > 1 or len(second.arrays) > 1:
        return first, second
    narrow, wide = sorted(one.arrays[0].shape[2] for one in (first, second))
    if narrow == wide or wide > 2 * narrow:
        return first, second
    padded = [
        np.pad(np.asarray(one.arrays[0]), ((0, 0), (0, 0), (0, wide - one.arrays[0].shape[2])))
        for one in (first, second)
    ]
    return first._replace(arrays=[to_device(padded[0])]), second._replace(
        arrays=[to_device(padded[1])]
    )


def check_sets(sets: Sequence[Items], measure: Measure) -> int:
    """Return the number of samples, or raise unless the measure can compare the sets."""
    number = sets[0].arrays[0].shape[1]
    for other in sets[1:]:
        check_same_length(sets[0].name, number, other.name, other.arrays[0].shape[1])
    if number % measure.repeats:
        fail(
            sets[0].name,
            f"have rows that {measure.repeats} goes into, one per repeat of all conditions",
            number,
        )
    widths = {array.shape[2] for one in sets for array in one.arrays}
    if measure.same_width and len(widths) > 1:
        fail(
            sets[-1].name,
            f"have as many classes throughout for {measure.name}",
            ", ".join(map(str, sorted(widths))),
        )
    return number


def check_fit(
    sets: Sequence[Items],
    form: Form,
    number: int,
    kept: Sequence[np.ndarray] = (),
    groups: np.ndarray | None = None,
) -> None:
    """Raise unless every representation suits the form, also with the samples `kept`, [choices, remaining] each."""
    least = min((rows.shape[1] for rows in kept), default=number)
    left = "" if least == number else " without one block"
    for one in sets[: len(form.sides)]:
        check_size(form, one.name, least, max(array.shape[2] for array in one.arrays), left=left)
    if groups is not None:
        check_group_sizes(form, groups)
        for rows in (choice for of_size in kept for choice in of_size):
            check_group_sizes(form, groups[rows], " without one block")
