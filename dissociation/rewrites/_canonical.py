"""Canonical form of a network, the same for all networks that are rewrites of each other.

Equality is up to rounding. The form is computed on the host in float64.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dissociation._core.checks import fail
from dissociation._core.conversion import to_device
from dissociation._core.types import Positive
from dissociation._core.validation import validated
from dissociation.models._program import Call
from dissociation.rewrites._axes import has_order
from dissociation.rewrites._comparison import check_resized
from dissociation.rewrites._groups import (
    NeuronGroup,
    Slot,
    known_parameters,
    neuron_groups,
    parameters_of,
    resized,
)
from dissociation.rewrites._seen import layer_inputs
from dissociation.rewrites._sizes import refit

PASSES = 50
"""Largest number of passes over all groups.

Dropped neurons of one group may leave neurons of another without weights.
"""

SLOPE = 0.5
"""Slope of the waves in `_features`."""

Arrays = list[np.ndarray]


@validated
def canonical(
    model: Any,
    example: Any,
    *,
    tolerance: Positive = 1e-5,
    inputs: Any = None,
    call: Call | None = None,
) -> Any:
    """Return the canonical form of a network, with the same function and dtypes.

    Neurons without incoming or outgoing weights are dropped, incoming weights are scaled to length
    one, neurons with equal incoming weights are merged, or dropped if their outgoing weights
    cancel. Neurons are ordered by incoming weights, from the first layer on. An empty group keeps
    one neuron of zeros. Neurons tied up to rounding, as in layers of thousands, have an arbitrary
    order, which `fingerprint` ignores.

    Args:
        model: A network whose groups are homogeneous of degree one and can be widened: perceptrons,
            convolutional and residual networks with ReLU-like activations, without normalisation or
            layers stacked in a scan. Pairs relu(z) - relu(-z) = z are not merged, rotations of
            linear layers not undone.
        example: One example, see `rewrites.neuron_groups`.
        tolerance: Distance of normalised incoming weights below which neurons are merged. Merged
            outgoing weights below this fraction of their absolute sum count as cancelled.
        inputs: Examples, samples first. Neurons that are zero on all of them are dropped; the
            function is kept on these inputs alone.
        call: See `rewrites.neuron_groups`.

    Raises:
        ValueError: If a group lacks these properties, the program depends on its size, or neurons
            of a residual stream are written by its blocks alone.
        TypeError: If the network is traced.
    """
    leaves, groups, sequence = _reduced(model, example, tolerance, inputs, call)
    for name, settled in sequence.items():
        group = groups[name]
        rows = _rows(leaves, group, settled)
        num_weights = rows.shape[1]
        # A seed that depends on the shape alone gives all networks of one function the same
        # direction.
        direction = np.random.default_rng(num_weights).standard_normal(num_weights)
        order = np.argsort(rows @ direction, kind="stable")
        for slot in group.slots:
            leaves[slot.leaf] = slot.permuted(leaves[slot.leaf], order[None])
    return _with(leaves, model)


@validated
def fingerprint(
    model: Any,
    example: Any,
    *,
    tolerance: Positive = 1e-5,
    inputs: Any = None,
    call: Call | None = None,
) -> Float[Array, " numbers"]:
    """Return a vector with one number more than the canonical form, for `fingerprint_distance`.

    It does not depend on the order of neurons: every axis of neurons is multiplied by functions of
    the incoming weights, [neurons, neurons]. All but the normalised arrays are divided by their
    common root mean square, whose logarithm comes last. The length depends on the numbers of
    neurons. Arguments and errors are those of `canonical`.
    """
    leaves, groups, sequence = _reduced(model, example, tolerance, inputs, call)
    normalised = set()
    for name, settled in sequence.items():
        for index in settled:
            slot = groups[name].slots[index]
            if not slot.outgoing:
                normalised.add(slot.leaf)
    size = 1.0
    free = [leaf for leaf in range(len(leaves)) if leaf not in normalised]
    if free:
        weights = np.concatenate([leaves[leaf].ravel() for leaf in free])
        size = np.sqrt(np.mean(weights**2)) or 1.0
    for leaf in free:
        leaves[leaf] = leaves[leaf] / size

    for name, settled in sequence.items():
        group = groups[name]
        features = _features(_rows(leaves, group, settled))
        for slot in group.slots:
            blocks = np.tensordot(features, slot.blocks(leaves[slot.leaf]), 1)
            leaves[slot.leaf] = slot.with_blocks(leaves[slot.leaf], blocks)
    numbers = [leaf.ravel() for leaf in leaves]
    numbers.append(np.array([np.log(size)]))
    return to_device(np.concatenate(numbers), float)


@validated(finite=("a", "b"))
def fingerprint_distance(
    a: Float[Array | np.ndarray, " numbers"], b: Float[Array | np.ndarray, " others"]
) -> float:
    """Return |a - b| over the larger of |a| and |b|; infinite if lengths differ.

    Rewrites of one network differ by about the rounding of their weights.
    """
    if a.shape != b.shape:
        return float("inf")
    first = np.asarray(a, np.float64)
    second = np.asarray(b, np.float64)
    size = max(np.linalg.norm(first), np.linalg.norm(second))
    if size == 0:
        return 0.0
    return float(np.linalg.norm(first - second) / size)


def _reduced(
    model: Any, example: Any, tolerance: float, inputs: Any, call: Any
) -> tuple[Arrays, dict[str, NeuronGroup], dict[str, list[int]]]:
    """Return the arrays of a network after merging, its groups, and by group the ordering slots."""
    # A group may shrink to one neuron and must still be found.
    groups = neuron_groups(model, example, call=call, single=True)
    refused = []
    for name, group in groups.items():
        reason = _refused(group)
        if reason:
            refused.append(f"{name} ({reason})")
    if refused:
        wanted_groups = (
            "have groups that are homogeneous of degree one, in one way and one copy, "
            "without normalisation"
        )
        fail("model", wanted_groups, f"others: {', '.join(refused)}")
    leaves = known_parameters("model", model, "a canonical form is a step")
    if inputs is not None:
        for group in groups.values():
            _silence(leaves, group, model, inputs, call)

    # Sums of the absolute values that were merged into each number. A number that has cancelled up
    # to rounding is small beside its sum, in whichever pass it did.
    sizes = [np.abs(leaf) for leaf in leaves]
    sequence = _sequence(groups)
    for _ in range(PASSES):
        num_nonzero = list(map(np.count_nonzero, leaves))
        for name, settled in sequence.items():
            _merge(leaves, sizes, groups[name], settled, tolerance)
        if num_nonzero == list(map(np.count_nonzero, leaves)):
            break
    return leaves, _drop_zeros(leaves, groups, model), sequence


def _drop_zeros(
    leaves: Arrays, groups: Mapping[str, NeuronGroup], model: Any
) -> dict[str, NeuronGroup]:
    """Drop neurons without incoming weights, in place, and return the smaller groups."""
    remaining = []
    smaller = []
    for group in groups.values():
        neurons = np.flatnonzero(_lengths(leaves, group, _scaled(group)))
        if len(neurons) == 0:
            neurons = np.zeros(1, int)  # an axis must keep one entry
        remaining.append(neurons)
        if len(neurons) < group.size:
            smaller.append(group)
    reduced, positions_of_axis = resized(list(groups.values()), remaining)
    for (leaf, axis), positions in positions_of_axis.items():
        leaves[leaf] = np.take(leaves[leaf], positions, axis)
    if smaller:
        check_resized(model, _with(leaves, model), smaller[0], reduced, single=True)
    return dict(zip(groups, reduced, strict=True))


def _silence(leaves: Arrays, group: NeuronGroup, model: Any, inputs: Any, call: Any) -> None:
    """Zero the outgoing weights of neurons that are zero on all inputs, in place."""
    is_silent = np.ones(group.size, bool)
    outgoing = [slot for slot in group.slots if slot.outgoing]
    for slot in outgoing:
        features = layer_inputs(model, inputs, slot.path, call=call)
        shape = [1] * len(slot.shape)
        for axis in features.axes:
            shape[axis] = slot.shape[axis]
        is_active = np.asarray((features.rows != 0).any(0)).reshape(shape)
        is_silent &= ~slot.rows(is_active).any(1)
    _multiply(leaves, outgoing, ~is_silent)


def _multiply(leaves: Arrays, slots: Sequence[Slot], factors: np.ndarray) -> None:
    """Multiply the weights at each neuron by factors [neurons], in place."""
    for slot in slots:
        array = leaves[slot.leaf]
        blocks = slot.blocks(array) * factors.reshape(-1, *[1] * array.ndim)
        leaves[slot.leaf] = slot.with_blocks(array, blocks)


def _with(leaves: Arrays, model: Any) -> Any:
    """Return the model with other arrays, in the dtypes of the model."""
    originals, tree, static = parameters_of(model)
    arrays = []
    for leaf, original in zip(leaves, originals, strict=True):
        arrays.append(to_device(leaf, original.dtype))
    return refit(eqx.combine(jax.tree.unflatten(tree, arrays), static))


def _refused(group: NeuronGroup) -> str:
    """Return the reason why a group has no canonical form; empty if it has."""
    reasons = {
        f"in {group.copies} copies": group.copies > 1,
        "normalised": group.normalised,
        "not homogeneous": not len(group.scalings),
        f"scaled in {len(group.scalings)} ways": len(group.scalings) > 1,
        "of no one degree": group.degree is None,
        f"of degree {group.degree or 0.0:g}": group.degree != 1,
        "made by what does not scale with it": not np.all(group.scaling),
        "read in another order": any(has_order(slot.layout) for slot in group.slots),
        "not just multiplied and summed by what reads it": not group.cancelling,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _rows(leaves: Arrays, group: NeuronGroup, slots: list[int]) -> np.ndarray:
    """Return the weights at each neuron in some slots of a group, [neurons, numbers]."""
    rows = []
    for index in slots:
        slot = group.slots[index]
        rows.append(slot.rows(leaves[slot.leaf]))
    return np.concatenate(rows, 1)


def _lengths(leaves: Arrays, group: NeuronGroup, slots: list[int]) -> np.ndarray:
    return np.linalg.norm(_rows(leaves, group, slots), axis=1)


def _scaled(group: NeuronGroup, sign: int = 1) -> list[int]:
    """Return the indices of slots that `scale` multiplies; of those that it divides for -1."""
    exponents: Any = group.scaling
    return np.flatnonzero(sign * exponents > 0).tolist()


def _merge(
    leaves: Arrays, sizes: Arrays, group: NeuronGroup, settled: list[int], tolerance: float
) -> None:
    """Normalise and merge neurons of a group, in place; others become zero."""
    exponents: Any = group.scaling
    incoming = _scaled(group)
    outgoing = _scaled(group, -1)
    is_alive = _lengths(leaves, group, incoming) > 0
    # Other groups write to a residual stream too: their scale is theirs, so only settled slots have
    # a length.
    own_slots = [index for index in settled if index in incoming]
    lengths = _lengths(leaves, group, own_slots or incoming)
    if (is_alive & (lengths == 0)).any():
        wanted_weights = f"write to all neurons of {group.name} by its own weights"
        fail("model", wanted_weights, "some of residual branches only")
    lengths = np.where(lengths > 0, lengths, 1.0)
    for arrays in (leaves, sizes):
        for slot, exponent in zip(group.slots, exponents, strict=True):
            _multiply(arrays, [slot], lengths**-exponent)

    labels = _clusters(_rows(leaves, group, incoming), is_alive, tolerance)
    alive = np.flatnonzero(labels >= 0)
    membership = np.zeros((labels.max(initial=-1) + 1, group.size))
    membership[labels[alive], alive] = 1.0
    firsts = np.zeros(0, int)
    if len(membership):
        firsts = np.argmax(membership, 1)

    norms = []
    for arrays in (leaves, sizes):
        for index in outgoing:
            slot = group.slots[index]
            blocks = slot.blocks(arrays[slot.leaf])
            blocks[firsts] = np.tensordot(membership, blocks, 1)
            arrays[slot.leaf] = slot.with_blocks(arrays[slot.leaf], blocks)
        norms.append(_lengths(arrays, group, outgoing)[firsts])
    is_large = norms[0] > tolerance * norms[1]
    is_kept = np.isin(np.arange(group.size), firsts[is_large])
    for arrays in (leaves, sizes):
        _multiply(arrays, group.slots, is_kept)


def _clusters(rows: np.ndarray, is_alive: np.ndarray, tolerance: float) -> np.ndarray:
    """Assign numbers to sets of neurons with equal incoming weights, -1 for dead neurons."""
    alive = np.flatnonzero(is_alive)
    unit = rows[alive] / np.linalg.norm(rows[alive], axis=1, keepdims=True)
    # |u - v|^2 of unit vectors, from one product of matrices; the floor is its rounding.
    distances = 2 - 2 * unit @ unit.T
    is_near = distances < max(tolerance**2, 64 * np.finfo(float).eps)
    pairs = np.nonzero(is_near)
    graph = coo_array((np.ones(len(pairs[0])), pairs), shape=is_near.shape)
    labels = np.full(len(rows), -1)
    labels[alive] = connected_components(graph, directed=False)[1]
    return labels


def _sequence(groups: Mapping[str, NeuronGroup]) -> dict[str, list[int]]:
    """Return groups from the inputs on, with slots that do not depend on later groups."""
    owners: dict[tuple[int, int], set[str]] = {}
    for name, group in groups.items():
        for slot in group.slots:
            owners.setdefault((slot.leaf, slot.axis), set()).add(name)
    remaining = dict(groups)
    sequence = {}
    while remaining:
        name, settled = _next(remaining, owners)
        sequence[name] = settled
        del remaining[name]
    return sequence


def _next(
    remaining: Mapping[str, NeuronGroup], owners: Mapping[tuple[int, int], set[str]]
) -> tuple[str, list[int]]:
    """Return the first group that the others do not affect, and its settled slots."""
    # Outgoing weights order a group only if no incoming weights of any group are settled.
    for is_outgoing in (False, True):
        for name, group in remaining.items():
            settled = []
            has_matrix = False
            for index, slot in enumerate(group.slots):
                if slot.outgoing != is_outgoing or owners[slot.leaf, slot.axis] != {name}:
                    continue
                if remaining.keys().isdisjoint(_beside(slot, owners)):
                    settled.append(index)
                    has_matrix |= len(slot.shape) > 1
            if has_matrix:
                return name, settled

    for name, group in remaining.items():
        names = set()
        for slot in group.slots:
            names |= owners[slot.leaf, slot.axis] | _beside(slot, owners)
        if remaining.keys() & names <= {name}:
            return name, list(range(len(group.slots)))
    wanted_order = "have groups that can be put in order one after another"
    fail("model", wanted_order, f"{', '.join(remaining)}, which cannot")


def _beside(slot: Slot, owners: Mapping[tuple[int, int], set[str]]) -> set[str]:
    """Return the groups along the other axes of a slot's array."""
    names = set()
    for axis in range(len(slot.shape)):
        if axis != slot.axis:
            names |= owners.get((slot.leaf, axis), set())
    return names


def _features(rows: np.ndarray) -> np.ndarray:
    """Return functions of the incoming weights, as many as neurons, [functions, neurons]."""
    count, size = rows.shape
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1.0)
    rng = np.random.default_rng(count)
    # Edges let neurons near each other differ; a small slope does not amplify rounding from layer
    # to layer.
    directions = SLOPE * rng.standard_normal((size, count))
    phases = unit @ directions + rng.uniform(0, 2, count)
    waves = np.abs(phases % 2 - 1) - 0.5
    return (waves * (12 / count) ** 0.5).T
