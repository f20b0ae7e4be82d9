"""One network for all that differ by rewrites: dead neurons dropped, copies merged, lengths one, in a stable order.

On the host, in float64. Two networks that compute the same function for every input because one was rewritten into the
other (permuted, scaled, duplicated, neurons without effect added, alone or in sets that cancel) have one canonical form
up to rounding. Pairs of neurons that are affine together, relu(z) - relu(-z) = z, are not looked for.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dissociation.checks import check_positive, fail, is_traced
from dissociation.validation import validated
from dissociation.weights.axes import spread
from dissociation.weights.groups import NeuronGroup, Slot, neuron_groups, parameters_of
from dissociation.weights.rewrites import current
from dissociation.weights.sizes import refit

PASSES = 50
"""Over all groups, at most: what is dropped in one may leave neurons of another dead."""


@validated
def canonical(
    model: Any, example: Any, *, tolerance: float = 1e-5, call: Callable[[Any, Any], Any] | None = None
) -> Any:
    """The canonical form of a network.

    To a fixed point, group by group: neurons that nothing reads or makes are dropped; what makes each neuron is scaled
    to length one, and what reads it by the inverse; neurons made alike are merged into one, and dropped if what reads
    them cancels. Then groups are ordered, from the inputs on, by what makes their neurons.

    Args:
        model: A network whose groups are all homogeneous of degree one and may grow: perceptrons, convolutional and
            residual ones with ReLU and the like, without normalisation; not stacks of layers in a scan, which would
            have to drop as many neurons in each.
        example: One example, see `groups.neuron_groups`.
        tolerance: Distance between what makes two neurons, of length one, below which they are one; and share of what
            reads them that counts as nothing.
        call: See `groups.neuron_groups`.

    Returns:
        A network of the same function, of the same dtypes.

    Raises:
        ValueError: If a group is of another kind; it is named.
        TypeError: If the network is traced.
    """
    check_positive("tolerance", tolerance)
    groups = neuron_groups(model, example, call=call)
    others = [
        name
        for name, group in groups.items()
        if group.degree != 1
        or len(group.scalings) != 1
        or group.sharing is None
        or not group.cancelling
        or group.copies > 1
    ]
    if others:
        wanted = "have groups that are homogeneous of degree one, in one way and one copy, without normalisation"
        fail("model", wanted, f"others: {', '.join(others)}")
    leaves, tree, rest = parameters_of(model)
    if any(np.iscomplexobj(leaf) for leaf in leaves):
        fail("model", "have real parameters", "complex ones")
    if any(is_traced(leaf) for leaf in leaves):
        raise TypeError("`model` must be known: a canonical form is a step of the host, got traced arrays.")
    dtypes = [jnp.asarray(leaf).dtype for leaf in leaves]
    exact = eqx.combine(jax.tree.unflatten(tree, [np.asarray(leaf, np.float64) for leaf in leaves]), rest)
    sizes = [np.abs(np.asarray(leaf, np.float64)) for leaf in leaves]
    sequence = _sequence(groups)
    for _ in range(PASSES):
        changed = False
        for name, settled in sequence.items():
            exact, fewer = _reduced(exact, sizes, current(groups[name], exact), settled, tolerance)
            changed |= fewer
        if not changed:
            break
    exact = _ordered(exact, {name: current(group, exact) for name, group in groups.items()}, sequence)
    leaves, tree, rest = parameters_of(exact)
    leaves = [jnp.asarray(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    return eqx.combine(jax.tree.unflatten(tree, leaves), rest)


@validated
def fingerprint(
    model: Any, example: Any, *, tolerance: float = 1e-5, call: Callable[[Any, Any], Any] | None = None
) -> Float[Array, " numbers"]:
    """All numbers of a network's canonical form, to be compared by `fingerprint_distance`.

    Args:
        model: See `canonical`.
        example: See `canonical`.
        tolerance: See `canonical`.
        call: See `canonical`.

    Returns:
        [numbers]; networks with other numbers of neurons have others.

    Raises:
        ValueError: As `canonical`.
        TypeError: As `canonical`.
    """
    leaves = parameters_of(canonical(model, example, tolerance=tolerance, call=call))[0]
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])


@validated(finite=("a", "b"))
def fingerprint_distance(a: Float[Array | np.ndarray, " numbers"], b: Float[Array | np.ndarray, " others"]) -> float:
    """|a - b| of two fingerprints over the larger of their lengths; infinite if they have other numbers of neurons.

    Args:
        a: A fingerprint.
        b: Another.

    Returns:
        About the rounding of their dtype for rewrites of one network.
    """
    if a.shape != b.shape:
        return float("inf")
    one, other = (np.asarray(part, np.float64) for part in (a, b))
    size = max(np.linalg.norm(one), np.linalg.norm(other))
    return float(np.linalg.norm(one - other) / size) if size else 0.0


def _with_rows(leaf: np.ndarray, slot: Slot, rows: np.ndarray) -> np.ndarray:
    moved = np.moveaxis(leaf, slot.axis, 0).copy()
    moved[slot.positions] = rows.reshape(*slot.positions.shape, *moved.shape[1:])
    return np.moveaxis(moved, 0, slot.axis)


def _sides(group: NeuronGroup) -> tuple[list[Slot], list[Slot]]:
    """Slots that make the neurons, and those that read them."""
    exponents: Any = group.scaling
    pairs = list(zip(group.slots, exponents, strict=True))
    return [slot for slot, e in pairs if e > 0], [slot for slot, e in pairs if e < 0]


def _reduced(
    model: Any, sizes: list[np.ndarray], group: NeuronGroup, settled: list[int], tolerance: float
) -> tuple[Any, bool]:
    """One group with lengths one, and without dead neurons and copies; and whether there were any.

    Lengths are of what is `settled`: of a residual stream without what other groups write to it, whose scale is theirs.
    `sizes` are sums of the absolute values that were merged into the model's arrays, and are brought along: what has
    cancelled but for rounding is small beside them, however long ago it did.
    """
    leaves, tree, rest = parameters_of(model)
    makes, reads = _sides(group)
    whole = np.linalg.norm(np.concatenate([slot.rows(leaves[slot.leaf]) for slot in makes], 1), axis=1)
    firm = [
        group.slots[index].rows(leaves[group.slots[index].leaf]) for index in settled if not group.slots[index].outgoing
    ]
    lengths = np.linalg.norm(np.concatenate(firm, 1), axis=1) if firm else whole
    safe = np.where(lengths > 0, lengths, 1.0)[:, None]
    for arrays in (leaves, sizes):
        for slot in makes:
            arrays[slot.leaf] = _with_rows(arrays[slot.leaf], slot, slot.rows(arrays[slot.leaf]) / safe)
        for slot in reads:
            arrays[slot.leaf] = _with_rows(arrays[slot.leaf], slot, slot.rows(arrays[slot.leaf]) * safe)
    label = _clusters(np.concatenate([slot.rows(leaves[slot.leaf]) for slot in makes], 1), whole > 0, tolerance)
    known = np.flatnonzero(label >= 0)
    sums = np.zeros((label.max(initial=-1) + 1, len(label)))
    sums[label[known], known] = 1.0
    firsts = np.argmax(sums, 1) if len(sums) else np.zeros(0, int)
    norms = np.zeros((2, len(sums)))
    for index, arrays in enumerate((leaves, sizes)):
        for slot in reads:
            rows = slot.rows(arrays[slot.leaf]).copy()
            rows[firsts] = sums @ rows
            norms[index] += (rows[firsts] ** 2).sum(1)
            arrays[slot.leaf] = _with_rows(arrays[slot.leaf], slot, rows)
    kept = np.sort(firsts[np.sqrt(norms[0]) > tolerance * np.sqrt(norms[1])])
    if len(kept) == 0:
        kept = firsts[:1] if len(firsts) else np.zeros(1, int)  # an axis without entries is no axis
    if len(kept) == group.size:
        return eqx.combine(jax.tree.unflatten(tree, leaves), rest), False
    for arrays in (leaves, sizes):
        for (leaf, axis), own in group.by_axis().items():
            slots = [group.slots[index] for index in own]
            places, _ = spread(slots[0].layout, {slot.name: kept for slot in slots})
            arrays[leaf] = np.take(arrays[leaf], places, axis)
    return refit(eqx.combine(jax.tree.unflatten(tree, leaves), rest)), True


def _clusters(made: np.ndarray, alive: np.ndarray, tolerance: float) -> np.ndarray:
    """Numbers of sets of neurons made alike, -1 for dead ones."""
    places = np.flatnonzero(alive)
    unit = made[places] / np.linalg.norm(made[places], axis=1, keepdims=True)
    near = 2 - 2 * unit @ unit.T < max(tolerance**2, 64 * np.finfo(float).eps)
    pairs = np.nonzero(near)
    graph = coo_array((np.ones(len(pairs[0])), pairs), shape=near.shape)
    label = np.full(len(made), -1)
    label[places] = connected_components(graph, directed=False)[1]
    return label


def _sequence(groups: Mapping[str, NeuronGroup]) -> dict[str, list[int]]:
    """Groups from the inputs on, with the slots that say of each what does not depend on those that come later."""
    owners: dict[tuple[int, int], set[str]] = {}
    for name, group in groups.items():
        for slot in group.slots:
            owners.setdefault((slot.leaf, slot.axis), set()).add(name)
    sequence: dict[str, list[int]] = {}
    left = dict(groups)
    while left:
        name, slots = _next(left, owners)
        sequence[name] = slots
        del left[name]
    return sequence


def _next(left: Mapping[str, NeuronGroup], owners: Mapping[tuple[int, int], set[str]]) -> tuple[str, list[int]]:
    for reading in (False, True):
        for name, group in left.items():
            settled = [
                index
                for index, slot in enumerate(group.slots)
                if slot.outgoing == reading
                and owners[slot.leaf, slot.axis] == {name}
                and not any(
                    owners.get((slot.leaf, axis), set()) & set(left)
                    for axis in range(len(slot.shape))
                    if axis != slot.axis
                )
            ]
            if any(len(group.slots[index].shape) > 1 for index in settled):
                return name, settled
    name, group = next(iter(left.items()))
    return name, list(range(len(group.slots)))


def _ordered(model: Any, groups: Mapping[str, NeuronGroup], sequence: Mapping[str, list[int]]) -> Any:
    """All groups in the order of a projection of what makes their neurons, those next to the inputs first."""
    leaves, tree, rest = parameters_of(model)
    for name, settled in sequence.items():
        group = groups[name]
        rows = np.concatenate([group.slots[index].rows(leaves[group.slots[index].leaf]) for index in settled], 1)
        order = np.argsort(rows @ _direction(rows.shape[1]), kind="stable")
        for slot in group.slots:
            leaves[slot.leaf] = _with_rows(leaves[slot.leaf], slot, slot.rows(leaves[slot.leaf])[order])
    return eqx.combine(jax.tree.unflatten(tree, leaves), rest)


def _direction(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal(size)
