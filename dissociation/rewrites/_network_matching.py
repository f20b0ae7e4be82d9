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

    Ties leave neurons where they are. An assignment replaces the permutation so far only if it
    raises the sum by more than rounding, 1e-12 of it, and the first of starts with equal sums is
    returned. Neurons with equal weights, which may be exchanged, keep the order of the start.

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

    Example:
        >>> from dissociation import models, rewrites
        >>> model = models.MLP(4, 6, 1, 3, key=jax.random.key(0))
        >>> groups = rewrites.neuron_groups(model, jnp.ones(4))
        >>> permuted = permute(groups["layers[0]"], [2, 0, 1, 5, 4, 3])(model)
        >>> match_weights(model, permuted, groups).permutations["layers[0]"].tolist()
        [1, 2, 0, 5, 4, 3]
    """
    if num_starts > 2 and key is None:
        advice = "For instance jax.random.key(0)"
        fail("key", "be given where random orders are drawn", "None", advice)
    check_alike(a, b)
    _check_groups(a, groups)
    first = known_parameters("a", a, "assignments are a step")
    second = known_parameters("b", b, "assignments are a step")

    # Running statistics in the state are no weights: the objective leaves them out.
    weight_paths = set()
    for path, _ in jax.tree_util.tree_leaves_with_path(parameters_in(a)):
        weight_paths.add(jax.tree_util.keystr(path))
    groups_of_weights = {}
    for name, group in groups.items():
        slots = tuple(slot for slot in group.slots if slot.path in weight_paths)
        groups_of_weights[name] = dataclasses.replace(group, slots=slots)
    groups = _in_order(groups_of_weights)

    identity = {}
    for name, group in groups.items():
        identity[name] = np.tile(np.arange(group.size), (group.copies, 1))
    starts = [identity]
    if num_starts > 1:
        # Permutations of other groups do not change the sorted weights of a neuron.
        starts.append(_by_signatures(first, second, groups))
    if num_starts > 2 and key is not None:
        rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,), jnp.uint32)))
        for _ in range(num_starts - 2):
            starts.append({name: rng.permuted(order, axis=1) for name, order in identity.items()})
    matchings = [_ascended(first, second, groups, start) for start in starts]
    return max(matchings, key=lambda matching: matching.value)


def _copies_moved(group: NeuronGroup, by: NeuronGroup, permutations: np.ndarray) -> np.ndarray:
    """Return the copy of `group` that moves to each copy if `by` is permuted, [copies].

    For example the heads of attention are neurons of one group and copies of another, the neurons
    in a head. A permutation of heads then permutes the rows of this other group's permutations, see
    `_move_copies`. To find the copies, entries of the parameters get the number of their copy and
    are permuted as `by` permutes weights.
    """
    sources = np.arange(group.copies)
    if group.copies == 1:
        return sources
    for slot in group.slots:
        copies = np.moveaxis(slot.copy, slot.axis, 0)
        labels = slot.with_blocks(np.full(slot.shape, -1), copies[None])  # -1: not of the group
        moved = labels
        for moving_slot in by.slots:
            if moving_slot.leaf == slot.leaf:
                moved = moving_slot.permuted(moved, permutations)
        has_neuron = labels >= 0
        sources[labels[has_neuron]] = moved[has_neuron]
    return sources


def _in_order(groups: Mapping[str, NeuronGroup]) -> dict[str, NeuronGroup]:
    """Order groups so that a group that permutes copies of another, as heads do, comes first."""
    remaining = dict(groups)
    ordered = {}
    while remaining:
        name = _unmoved(remaining)
        if name is None:
            name = next(iter(remaining))
            group = remaining[name]
            # Two groups that permute copies of each other have no order: one of them gets a single
            # copy.
            slots = tuple(slot._replace(copy=np.zeros_like(slot.copy)) for slot in group.slots)
            remaining[name] = dataclasses.replace(group, slots=slots, copies=1)
        ordered[name] = remaining.pop(name)
    return ordered


def _unmoved(groups: Mapping[str, NeuronGroup]) -> str | None:
    """Return the first group whose copies no other group permutes, or None."""
    for name, group in groups.items():
        if not any(_moves(by, group) for by in groups.values() if by is not group):
            return name
    return None


def _moves(by: NeuronGroup, group: NeuronGroup) -> bool:
    """Test whether a permutation of the group `by` permutes the copies of another."""
    turn = np.tile(np.roll(np.arange(by.size), 1), (by.copies, 1))
    return bool((_copies_moved(group, by, turn) != np.arange(group.copies)).any())


def check_alike(a: Any, b: Any) -> None:
    shapes_of_a = list(map(np.shape, parameters_of(a)[0]))
    shapes_of_b = list(map(np.shape, parameters_of(b)[0]))
    if shapes_of_a != shapes_of_b:
        fail("b", f"have arrays of the shapes that `a` has, {shapes_of_a}", shapes_of_b)


def _check_groups(model: Any, groups: Mapping[str, NeuronGroup]) -> None:
    paths, _, leaves, _ = program_of(model, None)
    shapes = dict(zip(paths, map(np.shape, leaves), strict=True))
    for name, group in groups.items():
        for slot in group.slots:
            shape = shapes.get(slot.path, "none")
            if shape != slot.shape:
                wanted_array = f"{name!r} has an array {slot.path} of shape {slot.shape}"
                fail("groups", f"be of the networks: {wanted_array}", shape)


def _rows(leaves: Sequence[np.ndarray], group: NeuronGroup) -> list[list[np.ndarray]]:
    """Return the weights at each neuron, [neurons, numbers], by copy and slot."""
    rows = [[] for _ in range(group.copies)]
    for slot in group.slots:
        blocks = slot.blocks(leaves[slot.leaf])
        copies = np.broadcast_to(np.moveaxis(slot.copy, slot.axis, 0), blocks.shape[1:])
        for copy in range(group.copies):
            rows[copy].append(blocks[:, copies == copy])
    return rows


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
    """Match neurons by their sorted weights, one group after another."""
    permutations = {}
    for name, group in groups.items():
        orders = []
        for pair in zip(_rows(first, group), _rows(second, group), strict=True):
            likeness = np.zeros((group.size, group.size))
            for a, b in zip(*pair, strict=True):
                a = np.sort(a, 1)
                b = np.sort(b, 1)
                likeness += 2 * a @ b.T - (a**2).sum(1)[:, None] - (b**2).sum(1)[None]
            orders.append(_assigned(likeness))
        permutations[name] = np.stack(orders)
        second = _permuted(second, group, permutations[name])
    return permutations


def _assigned(likeness: np.ndarray) -> np.ndarray:
    return linear_sum_assignment(likeness, maximize=True)[1]


def _ascended(
    first: list[np.ndarray],
    second: list[np.ndarray],
    groups: Mapping[str, NeuronGroup],
    start: dict[str, np.ndarray],
) -> Matching:
    """Improve the permutations `start`, one group after another, until none improves."""
    permutations = dict(start)
    for name, permutation in start.items():
        second = _permuted(second, groups[name], permutation)
    rows = {name: _rows(first, group) for name, group in groups.items()}
    leaves = sorted({slot.leaf for group in groups.values() for slot in group.slots})
    value = _overlap(first, second, leaves)
    for _ in range(SWEEPS):
        previous = value
        for name, group in groups.items():
            orders = []
            for pair in zip(rows[name], _rows(second, group), strict=True):
                likeness = sum(a @ b.T for a, b in zip(*pair, strict=True))
                orders.append(_assigned(np.asarray(likeness)))
            order = np.stack(orders)
            moved = _permuted(second, group, order)
            overlap = _overlap(first, moved, leaves)
            # Rounding alone is no progress: equal assignments could alternate.
            if overlap > value + 1e-12 * abs(value):
                second = moved
                value = overlap
                permutations[name] = np.take_along_axis(permutations[name], order, 1)
                _move_copies(permutations, groups, name, order)
        if value == previous:
            return Matching(_single(permutations, groups), value, converged=True)
    return Matching(_single(permutations, groups), value, converged=False)


def _overlap(first: list[np.ndarray], second: list[np.ndarray], leaves: list[int]) -> float:
    return sum((float(np.vdot(first[leaf], second[leaf])) for leaf in leaves), 0.0)


def _move_copies(
    permutations: dict[str, np.ndarray],
    groups: Mapping[str, NeuronGroup],
    name: str,
    order: np.ndarray,
) -> None:
    """Move the permutations in copies of other groups with these copies, in place."""
    for moved_name, group in groups.items():
        if moved_name != name:
            copies = _copies_moved(group, groups[name], order)
            permutations[moved_name] = permutations[moved_name][copies]


def _single(
    permutations: Mapping[str, np.ndarray], groups: Mapping[str, NeuronGroup]
) -> dict[str, np.ndarray]:
    """Drop the axis of copies from permutations of groups with one copy."""
    single = dict(permutations)
    for name, permutation in permutations.items():
        if groups[name].copies == 1:
            single[name] = permutation[0]
    return single


@validated
def match_activations(a: Any, b: Any, groups: dict[str, NeuronGroup], inputs: Any) -> Matching:
    """Match the neurons of b to those of a by activations.

    Their correlation on data is maximised, one group after another. The activations of a neuron are
    the values that the next layer receives, at all examples and positions. Queries and keys of
    attention are not permuted.

    Args:
        a: A network.
        b: A network of the same structure.
        groups: Groups of a or b.
        inputs: Examples, samples first.

    Returns:
        Permutations. Each copy of a group, such as an attention head, has its own optimal
        permutation. A neuron that is constant on the data has correlation 0 with all others. Of
        permutations with equal correlations SciPy's `linear_sum_assignment` returns one, the same
        in every call.

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
    permutations = {}
    correlations = []
    groups = _in_order(groups)
    for name, group in groups.items():
        slots = [slot for slot in group.slots if slot.outgoing and len(slot.shape) > 1]
        activity_of_a = _activity(a, inputs, group, slots)
        activity_of_b = _activity(b, inputs, group, slots)
        if not activity_of_a:
            continue
        neurons = np.arange(group.size)
        permutation = np.tile(neurons, (group.copies, 1))
        for copy, activity in activity_of_a.items():
            likeness = activity.T @ activity_of_b[copy]
            permutation[copy] = _assigned(likeness)
            correlations.append(likeness[neurons, permutation[copy]])
        permutations[name] = permutation
        b = permute(group, permutation)(b)
    value = 0.0
    if correlations:
        value = float(np.mean(np.concatenate(correlations)))
    return Matching(_single(permutations, groups), value, converged=True)


def _activity(
    model: Any, inputs: Any, group: NeuronGroup, slots: Sequence[Slot]
) -> dict[int, np.ndarray]:
    """Return activity [rows, neurons] by copy, centred and of length one.

    Products of such activities are correlations.
    """
    activity: dict[int, np.ndarray] = {}
    refusal = None
    for slot in slots:
        missing = set(slot.copy.flat) - set(activity)
        if not missing:
            continue
        try:
            features = layer_inputs(model, inputs, slot.path, call=group.call)
        except WrongValue as error:
            refusal = error
            continue
        axes = features.axes
        if slot.axis not in axes:
            continue
        rows = np.asarray(features.rows, np.float64)
        grid = rows.reshape(len(rows), *(slot.shape[axis] for axis in axes))
        # [neurons, positions, rows, other axes]
        blocks = np.moveaxis(grid, 1 + axes.index(slot.axis), 0)[slot.positions]
        copies = np.moveaxis(slot.copy, slot.axis, 0)
        shape = [slot.copy.shape[axis] for axis in axes if axis != slot.axis]
        copies = copies.reshape(len(copies), 1, *shape)
        copies = np.broadcast_to(copies, blocks.shape[1:])
        for copy in sorted(missing):
            columns = blocks[:, copies == copy].T
            columns = columns - columns.mean(0)
            lengths = np.linalg.norm(columns, axis=0)
            # Constant neurons have lengths of rounding size: infinity makes their correlations 0.
            is_varying = lengths > 1e-12 * max(lengths.max(), 1e-300)
            activity[int(copy)] = columns / np.where(is_varying, lengths, np.inf)
    if refusal is not None and not activity:
        wanted_neurons = "be of neurons that some layer reads as a whole"
        fail("groups", wanted_neurons, f"{group.name!r}: {refusal}")
    return activity
