"""Match the neurons of two networks by permutations of all groups."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

from dissociation._core.checks import WrongValue, fail
from dissociation._core.conversion import as_examples
from dissociation._core.results import printed
from dissociation._core.types import PRNGKey, Size
from dissociation._core.validation import validated
from dissociation.models._program import parameters_in, program_of
from dissociation.rewrites._groups import NeuronGroup, Slot, known_parameters, parameters_of
from dissociation.rewrites._rewrites import permute
from dissociation.rewrites._seen import layer_inputs

SWEEPS = 100
"""Largest number of sweeps over all groups; a few are enough."""


class Matching(NamedTuple):
    """Permutations that match the neurons of a second network with those of a first.

    Attributes:
        permutations: By group: neuron `permutations[name][i]` of the second matches neuron i of the
            first, [neurons] or [copies, neurons]. `apply` follows this order: heads before the
            neurons in each head.
        value: Maximised objective: the inner product of weights, or the mean correlation of
            neurons.
        converged: True if no single group could be improved; always True for activations.
    """

    permutations: dict[str, np.ndarray]
    value: float
    converged: bool

    __repr__ = printed

    def apply(self, model: Any, groups: Mapping[str, NeuronGroup]) -> Any:
        """Return the second network, `model`, with its neurons in the order of the first.

        Raises:
            ValueError: If `groups` lacks a matched group.
        """
        for name, permutation in self.permutations.items():
            if name not in groups:
                fail("groups", f"hold {name!r}, which was matched", ", ".join(groups) or "none")
            model = permute(groups[name], permutation)(model)
        return model


@validated
def match_weights(
    a: Any,
    b: Any,
    groups: dict[str, NeuronGroup],
    *,
    num_starts: Size = 2,
    key: PRNGKey | None = None,
) -> Matching:
    """Match b with a by weights: find permutations P that maximise sum <a, P(b)> over parameters.

    Coordinate ascent solves one linear assignment per group exactly, from several starts. The start
    by sorted weights finds a permuted copy at once.

    Args:
        a: A network.
        b: A network of the same structure.
        groups: Groups of a or b, from `rewrites.neuron_groups`.
        num_starts: Number of starts. The first is b as it is, the second pairs neurons by sorted
            weights, others are random orders.
        key: Key of the random orders.

    Raises:
        ValueError: If structures differ, or a key is missing.
        TypeError: If the networks are traced: matching runs on the host.

    References:
        Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin, algorithm 1.
    """
    if num_starts > 2 and key is None:
        fail(
            "key",
            "be given where random orders are drawn",
            "None",
            "For instance jax.random.key(0)",
        )
    check_alike(a, b)
    _check_groups(a, groups)
    first, second = (
        known_parameters(*named, "assignments are a step") for named in (("a", a), ("b", b))
    )
    paths = {
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(parameters_in(a))
    }
    # Running statistics in the state are no weights: the objective leaves them out.
    own = {
        name: tuple(slot for slot in group.slots if slot.path in paths)
        for name, group in groups.items()
    }
    groups = _in_order(
        {name: dataclasses.replace(group, slots=own[name]) for name, group in groups.items()}
    )
    still = {
        name: np.tile(np.arange(group.size), (group.copies, 1)) for name, group in groups.items()
    }
    starts = [still]
    if num_starts > 1:
        # Permutations of other groups do not change the sorted weights of a neuron.
        starts.append(_by_signatures(first, second, groups))
    if num_starts > 2 and key is not None:
        rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,), jnp.uint32)))
        starts += [
            {name: rng.permuted(each, axis=1) for name, each in still.items()}
            for _ in range(num_starts - 2)
        ]
    return max(
        (_ascended(first, second, groups, start) for start in starts), key=lambda found: found.value
    )


def _copies_moved(group: NeuronGroup, by: NeuronGroup, permutations: np.ndarray) -> np.ndarray:
    """Return the copy of `group` that moves to each copy if the group `by` is permuted, [copies]."""
    found = np.arange(group.copies)
    for slot in group.slots if group.copies > 1 else ():
        labels = slot.with_blocks(
            np.full(slot.shape, -1), np.moveaxis(slot.copy, slot.axis, 0)[None]
        )
        moved = labels
        for other in by.slots:
            moved = other.permuted(moved, permutations) if other.leaf == slot.leaf else moved
        found[labels[labels >= 0]] = moved[labels >= 0]
    return found


def _in_order(groups: Mapping[str, NeuronGroup]) -> dict[str, NeuronGroup]:
    """Order groups so that a group that permutes copies of another, as heads do, comes first."""
    left, ordered = dict(groups), {}
    while left:
        free = (
            k
            for k, own in left.items()
            if not any(_moves(by, own) for by in left.values() if by is not own)
        )
        name = next(free, None)
        if name is None:
            name = next(iter(left))
            # Two groups that permute copies of each other have no order: one of them gets a single
            # copy.
            slots = tuple(slot._replace(copy=np.zeros_like(slot.copy)) for slot in left[name].slots)
            left[name] = dataclasses.replace(left[name], slots=slots, copies=1)
        ordered[name] = left.pop(name)
    return ordered


def _moves(group: NeuronGroup, other: NeuronGroup) -> bool:
    """Test whether a permutation of a group permutes the copies of another."""
    turn = np.tile(np.roll(np.arange(group.size), 1), (group.copies, 1))
    return bool((_copies_moved(other, group, turn) != np.arange(other.copies)).any())


def check_alike(a: Any, b: Any) -> None:
    first, second = ([np.shape(leaf) for leaf in parameters_of(model)[0]] for model in (a, b))
    if first != second:
        fail("b", f"have arrays of the shapes that `a` has, {first}", second)


def _check_groups(model: Any, groups: Mapping[str, NeuronGroup]) -> None:
    paths, _, leaves, _ = program_of(model, None)
    shapes = dict(zip(paths, map(np.shape, leaves), strict=True))
    for name, group in groups.items():
        for slot in group.slots:
            if shapes.get(slot.path) != slot.shape:
                wanted = (
                    f"be of the networks: {name!r} has an array {slot.path} of shape {slot.shape}"
                )
                fail("groups", wanted, shapes.get(slot.path, "none"))


def _rows(leaves: Sequence[np.ndarray], group: NeuronGroup) -> list[list[np.ndarray]]:
    """Return the weights at each neuron, [neurons, numbers], by copy and slot."""
    blocks = [slot.blocks(leaves[slot.leaf]) for slot in group.slots]
    where = [
        np.broadcast_to(np.moveaxis(slot.copy, slot.axis, 0), block.shape[1:])
        for slot, block in zip(group.slots, blocks, strict=True)
    ]
    return [
        [block[:, own == copy] for block, own in zip(blocks, where, strict=True)]
        for copy in range(group.copies)
    ]


def _permuted(
    leaves: list[np.ndarray], group: NeuronGroup, permutations: np.ndarray
) -> list[np.ndarray]:
    leaves = list(leaves)
    for slot in group.slots:
        leaves[slot.leaf] = slot.permuted(leaves[slot.leaf], permutations)
    return leaves


def _by_signatures(
    first: list[np.ndarray], second: list[np.ndarray], groups: Mapping[str, NeuronGroup]
) -> dict[str, np.ndarray]:
    found = {}
    for name, group in groups.items():
        likeness = np.zeros((group.copies, group.size, group.size))
        for total, *pairs in zip(likeness, _rows(first, group), _rows(second, group), strict=True):
            for one, other in zip(*pairs, strict=True):
                one, other = np.sort(one, 1), np.sort(other, 1)
                total += 2 * one @ other.T - (one**2).sum(1)[:, None] - (other**2).sum(1)[None]
        found[name] = np.stack([_assigned(total) for total in likeness])
        second = _permuted(second, group, found[name])
    return found


def _assigned(likeness: np.ndarray) -> np.ndarray:
    return linear_sum_assignment(likeness, maximize=True)[1]


def _ascended(
    first: list[np.ndarray],
    second: list[np.ndarray],
    groups: Mapping[str, NeuronGroup],
    start: dict[str, np.ndarray],
) -> Matching:
    found = dict(start)
    now = second
    for name, permutation in start.items():
        now = _permuted(now, groups[name], permutation)
    touched = sorted({slot.leaf for group in groups.values() for slot in group.slots})
    value = sum((float(np.vdot(first[leaf], now[leaf])) for leaf in touched), 0.0)
    own = {name: _rows(first, group) for name, group in groups.items()}
    for _ in range(SWEEPS):
        before = value
        for name, group in groups.items():
            pairs = zip(own[name], _rows(now, group), strict=True)
            likeness = [
                sum(one @ other.T for one, other in zip(*each, strict=True)) for each in pairs
            ]
            order = np.stack([_assigned(np.asarray(each)) for each in likeness])
            moved = _permuted(now, group, order)
            better = sum(float(np.vdot(first[leaf], moved[leaf])) for leaf in touched)
            # Rounding alone is no progress: equal assignments could alternate.
            if better > value + 1e-12 * abs(value):
                now, value = moved, better
                found[name] = np.take_along_axis(found[name], order, 1)
                # Permutations found in the copies of other groups move with these copies.
                found |= {
                    k: found[k][_copies_moved(other, group, order)]
                    for k, other in groups.items()
                    if k != name
                }
        if value == before:
            return Matching(_single(found, groups), value, converged=True)
    return Matching(_single(found, groups), value, converged=False)


def _single(
    found: Mapping[str, np.ndarray], groups: Mapping[str, NeuronGroup]
) -> dict[str, np.ndarray]:
    """Drop the axis of copies from permutations of groups with one copy."""
    return {name: each if groups[name].copies > 1 else each[0] for name, each in found.items()}


@validated
def match_activations(a: Any, b: Any, groups: dict[str, NeuronGroup], inputs: Any) -> Matching:
    """Match the neurons of b to those of a by activations: maximise their correlation on data, one group after another.

    The activations of a neuron are the values that the next layer receives, at all examples and
    positions. Queries and keys of attention are not permuted.

    Args:
        a: A network.
        b: A network of the same structure.
        groups: Groups of a or b.
        inputs: Examples, samples first.

    Returns:
        Permutations. Each copy of a group, such as an attention head, has its own optimal
        permutation. A neuron that is constant on the data has correlation 0 with all others.

    Raises:
        TypeError: If the networks do not accept the examples.
        ValueError: If structures differ, or a group is in layers that are stacked and run by a
            loop.

    References:
        Li et al. (2015), Convergent learning; Ainsworth, Hayase and Srinivasa (2023), section 3.1.
    """
    check_alike(a, b)
    _check_groups(a, groups)
    inputs = as_examples("inputs", inputs, finite=True)
    found, values = {}, []
    groups = _in_order(groups)
    for name, group in groups.items():
        reads = [slot for slot in group.slots if slot.outgoing and len(slot.shape) > 1]
        one, other = (_activity(model, inputs, group, reads) for model in (a, b))
        if not one:
            continue
        found[name] = np.tile(np.arange(group.size), (group.copies, 1))
        for copy, rows in one.items():
            likeness = rows.T @ other[copy]
            found[name][copy] = _assigned(likeness)
            values.append(likeness[np.arange(group.size), found[name][copy]])
        b = permute(group, found[name])(b)
    value = float(np.mean(np.concatenate(values))) if values else 0.0
    return Matching(_single(found, groups), value, converged=True)


def _activity(
    model: Any, inputs: Any, group: NeuronGroup, reads: Sequence[Slot]
) -> dict[int, np.ndarray]:
    """Return activity [rows, neurons] by copy, centred and of length one, so that products are correlations."""
    found: dict[int, np.ndarray] = {}
    refusal = None
    for slot in reads:
        if not set(slot.copy.flat) - set(found):
            continue
        try:
            seen = layer_inputs(model, inputs, slot.path, call=group.call)
        except WrongValue as error:
            refusal = error
            continue
        if slot.axis not in seen.axes:
            continue
        rows = np.asarray(seen.rows, np.float64)
        grid = rows.reshape(len(rows), *(slot.shape[axis] for axis in seen.axes))
        # [neurons, positions, rows, other axes]
        values = np.moveaxis(grid, 1 + seen.axes.index(slot.axis), 0)[slot.positions]
        others = [
            axis for axis in range(len(slot.shape)) if axis in seen.axes and axis != slot.axis
        ]
        copy = np.moveaxis(slot.copy, slot.axis, 0)
        copy = copy.reshape([copy.shape[0], 1, *(slot.copy.shape[axis] for axis in others)])
        copy = np.broadcast_to(copy, values.shape[1:])
        for number in sorted(set(slot.copy.flat) - set(found)):
            own = values[:, copy == number].T
            own = own - own.mean(0)
            lengths = np.linalg.norm(own, axis=0)
            # Constant neurons have lengths of rounding size: infinity makes their correlations 0.
            found[int(number)] = own / np.where(
                lengths > 1e-12 * max(lengths.max(), 1e-300), lengths, np.inf
            )
    if refusal is not None and not found:
        fail(
            "groups", "be of neurons that some layer reads as a whole", f"{group.name!r}: {refusal}"
        )
    return found
