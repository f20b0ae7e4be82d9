"""Canonical form of a network, the same for all networks that are rewritten into each other, up to rounding.

It is computed on the host in float64.
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
"""Largest number of passes over all groups: dropped neurons of one may leave neurons of another without weights."""

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
        rows = _rows(leaves, groups[name], settled)
        # A seed that depends on the shape alone gives all networks of one function the same
        # direction.
        direction = np.random.default_rng(rows.shape[1]).standard_normal(rows.shape[1])
        order = np.argsort(rows @ direction, kind="stable")
        for slot in groups[name].slots:
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
    slots = [groups[name].slots[index] for name, settled in sequence.items() for index in settled]
    made = {slot.leaf for slot in slots if not slot.outgoing}
    free = [leaf for index, leaf in enumerate(leaves) if index not in made]
    size = np.sqrt(np.mean(np.concatenate([leaf.ravel() for leaf in free]) ** 2)) if free else 1.0
    size = size or 1.0
    leaves = [leaf if index in made else leaf / size for index, leaf in enumerate(leaves)]
    for name, settled in sequence.items():
        weights = _features(_rows(leaves, groups[name], settled))
        for slot in groups[name].slots:
            blocks = np.tensordot(weights, slot.blocks(leaves[slot.leaf]), 1)
            leaves[slot.leaf] = slot.with_blocks(leaves[slot.leaf], blocks)
    return to_device(np.concatenate([*(leaf.ravel() for leaf in leaves), [np.log(size)]]), float)


@validated(finite=("a", "b"))
def fingerprint_distance(
    a: Float[Array | np.ndarray, " numbers"], b: Float[Array | np.ndarray, " others"]
) -> float:
    """Return |a - b| over the larger of |a| and |b|; infinite if lengths differ.

    Rewrites of one network differ by about the rounding of their weights.
    """
    if a.shape != b.shape:
        return float("inf")
    one, other = (np.asarray(part, np.float64) for part in (a, b))
    size = max(np.linalg.norm(one), np.linalg.norm(other))
    return float(np.linalg.norm(one - other) / size) if size else 0.0


def _reduced(
    model: Any, example: Any, tolerance: float, inputs: Any, call: Any
) -> tuple[Arrays, dict[str, NeuronGroup], dict[str, list[int]]]:
    """Return the arrays of a network after merging, its groups, and by group the slots that order neurons."""
    # A group may shrink to one neuron and must still be found.
    groups = neuron_groups(model, example, call=call, single=True)
    others = [f"{name} ({reason})" for name, group in groups.items() if (reason := _refused(group))]
    if others:
        wanted = (
            "have groups that are homogeneous of degree one, in one way and one copy, "
            "without normalisation"
        )
        fail("model", wanted, f"others: {', '.join(others)}")
    leaves = known_parameters("model", model, "a canonical form is a step")
    for group in groups.values() if inputs is not None else ():
        _silence(leaves, group, model, inputs, call)
    # Sums of the absolute values that were merged into each number. A number that has cancelled up
    # to rounding is small beside its sum, in whichever pass it did.
    sizes = [np.abs(leaf) for leaf in leaves]
    sequence = _sequence(groups)
    for _ in range(PASSES):
        before = list(map(np.count_nonzero, leaves))
        for name, settled in sequence.items():
            _merge(leaves, sizes, groups[name], settled, tolerance)
        if before == list(map(np.count_nonzero, leaves)):
            break
    # An axis must keep one entry.
    kept = [np.flatnonzero(_lengths(leaves, group, _made(group))) for group in groups.values()]
    kept = [each if len(each) else np.zeros(1, int) for each in kept]
    smaller = [
        group for group, each in zip(groups.values(), kept, strict=True) if len(each) < group.size
    ]
    found, places = resized(list(groups.values()), kept)
    for (leaf, axis), old in places.items():
        leaves[leaf] = np.take(leaves[leaf], old, axis)
    if smaller:
        check_resized(model, _with(leaves, model), smaller[0], found, single=True)
    return leaves, dict(zip(groups, found, strict=True)), sequence


def _silence(leaves: Arrays, group: NeuronGroup, model: Any, inputs: Any, call: Any) -> None:
    """Zero the outgoing weights of neurons that are zero on all inputs, in place."""
    silent = np.ones(group.size, bool)
    read = [slot for slot in group.slots if slot.outgoing]
    for slot in read:
        seen = layer_inputs(model, inputs, slot.path, call=call)
        lengths = [size if k in seen.axes else 1 for k, size in enumerate(slot.shape)]
        columns = np.arange(np.prod(lengths, dtype=int)).reshape(lengths)
        silent &= ~slot.rows(np.asarray((seen.rows != 0).any(0))[columns]).any(1)
    _multiply(leaves, read, ~silent)


def _multiply(leaves: Arrays, slots: Sequence[Slot], factors: np.ndarray) -> None:
    """Multiply the weights at each neuron by factors [neurons], in place."""
    for slot in slots:
        own = factors.reshape(-1, *[1] * leaves[slot.leaf].ndim)
        leaves[slot.leaf] = slot.with_blocks(
            leaves[slot.leaf], slot.blocks(leaves[slot.leaf]) * own
        )


def _with(leaves: Arrays, model: Any) -> Any:
    """Return the model with other arrays, in the dtypes of the model."""
    old, tree, rest = parameters_of(model)
    arrays = [to_device(leaf, before.dtype) for leaf, before in zip(leaves, old, strict=True)]
    return refit(eqx.combine(jax.tree.unflatten(tree, arrays), rest))


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
    return np.concatenate(
        [group.slots[index].rows(leaves[group.slots[index].leaf]) for index in slots], 1
    )


def _lengths(leaves: Arrays, group: NeuronGroup, slots: list[int]) -> np.ndarray:
    return np.linalg.norm(_rows(leaves, group, slots), axis=1)


def _made(group: NeuronGroup, side: int = 1) -> list[int]:
    """Return the indices of slots that `scale` multiplies; of those that it divides for `side` -1."""
    exponents: Any = group.scaling
    return np.flatnonzero(side * exponents > 0).tolist()


def _merge(
    leaves: Arrays, sizes: Arrays, group: NeuronGroup, settled: list[int], tolerance: float
) -> None:
    """Normalise and merge neurons of a group, in place; others become zero."""
    exponents: Any = group.scaling
    makes, reads = _made(group), _made(group, -1)
    alive = _lengths(leaves, group, makes) > 0
    # Other groups write to a residual stream too: their scale is theirs, so only settled slots have
    # a length.
    lengths = _lengths(leaves, group, [index for index in settled if index in makes] or makes)
    if (alive & (lengths == 0)).any():
        fail(
            "model",
            f"write to all neurons of {group.name} by its own weights",
            "some of residual branches only",
        )
    lengths = np.where(lengths > 0, lengths, 1.0)
    for arrays in (leaves, sizes):
        for slot, exponent in zip(group.slots, exponents, strict=True):
            _multiply(arrays, [slot], lengths**-exponent)
    label = _clusters(_rows(leaves, group, makes), alive, tolerance)
    known = np.flatnonzero(label >= 0)
    sums = np.zeros((label.max(initial=-1) + 1, group.size))
    sums[label[known], known] = 1.0
    firsts = np.argmax(sums, 1) if len(sums) else np.zeros(0, int)
    norms = []
    for arrays in (leaves, sizes):
        for slot in (group.slots[index] for index in reads):
            blocks = slot.blocks(arrays[slot.leaf])
            blocks[firsts] = np.tensordot(sums, blocks, 1)
            arrays[slot.leaf] = slot.with_blocks(arrays[slot.leaf], blocks)
        norms.append(_lengths(arrays, group, reads)[firsts])
    kept = np.isin(np.arange(group.size), firsts[norms[0] > tolerance * norms[1]])
    for arrays in (leaves, sizes):
        _multiply(arrays, group.slots, kept)


def _clusters(made: np.ndarray, alive: np.ndarray, tolerance: float) -> np.ndarray:
    """Assign numbers to sets of neurons with equal incoming weights, -1 for dead neurons."""
    places = np.flatnonzero(alive)
    unit = made[places] / np.linalg.norm(made[places], axis=1, keepdims=True)
    # |u - v|^2 of unit vectors, from one product of matrices; the floor is its rounding.
    near = 2 - 2 * unit @ unit.T < max(tolerance**2, 64 * np.finfo(float).eps)
    pairs = np.nonzero(near)
    graph = coo_array((np.ones(len(pairs[0])), pairs), shape=near.shape)
    label = np.full(len(made), -1)
    label[places] = connected_components(graph, directed=False)[1]
    return label


def _sequence(groups: Mapping[str, NeuronGroup]) -> dict[str, list[int]]:
    """Return groups from the inputs on, with indices of slots that do not depend on later groups."""
    owners: dict[tuple[int, int], set[str]] = {}
    for name, group in groups.items():
        for slot in group.slots:
            owners.setdefault((slot.leaf, slot.axis), set()).add(name)
    sequence: dict[str, list[int]] = {}
    while left := {name: group for name, group in groups.items() if name not in sequence}:
        sequence |= [_next(left, owners)]
    return sequence


def _next(
    left: Mapping[str, NeuronGroup], owners: Mapping[tuple[int, int], set[str]]
) -> tuple[str, list[int]]:
    # Outgoing weights order a group only if no incoming weights of any group are settled.
    for reading in (False, True):
        for name, group in left.items():
            settled = [
                index
                for index, slot in enumerate(group.slots)
                if slot.outgoing == reading
                and owners[slot.leaf, slot.axis] == {name}
                and left.keys().isdisjoint(_beside(slot, owners))
            ]
            if any(len(group.slots[index].shape) > 1 for index in settled):
                return name, settled
    for name, group in left.items():
        others = {
            other
            for slot in group.slots
            for other in (*owners[slot.leaf, slot.axis], *_beside(slot, owners))
        }
        if left.keys() & others <= {name}:
            return name, list(range(len(group.slots)))
    fail(
        "model",
        "have groups that can be put in order one after another",
        f"{', '.join(left)}, which cannot",
    )


def _beside(slot: Slot, owners: Mapping[tuple[int, int], set[str]]) -> list[str]:
    others = [axis for axis in range(len(slot.shape)) if axis != slot.axis]
    return [name for axis in others for name in owners.get((slot.leaf, axis), ())]


def _features(rows: np.ndarray) -> np.ndarray:
    """Return functions of the incoming weights, as many as neurons, [functions, neurons]."""
    count, size = rows.shape
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rng = np.random.default_rng(count)
    # Edges let neurons near each other differ; a small slope does not amplify rounding from layer
    # to layer.
    phases = (
        rows / np.where(lengths > 0, lengths, 1.0) @ (SLOPE * rng.standard_normal((size, count)))
    )
    waves = np.abs((phases + rng.uniform(0, 2, count)) % 2 - 1) - 0.5
    return (waves * (12 / count) ** 0.5).T
