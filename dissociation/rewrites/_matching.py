"""Matching the neurons of two networks: the permutations of all groups that bring one closest to another.

Assignments are exact, by SciPy on the host.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import linear_sum_assignment

from dissociation._core.checks import WrongValue, check_choice, check_count, check_takes, fail, fail_kind
from dissociation._core.conversion import as_examples
from dissociation._core.results import printed
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.models._program import called, parameters_in, program_of
from dissociation.rewrites._groups import NeuronGroup, Slot, known_parameters, parameters_of
from dissociation.rewrites._rewrites import permute
from dissociation.rewrites._seen import layer_inputs
from dissociation.similarity._inference import MemberInterval, member_interval
from dissociation.training._members import count, member

SWEEPS = 100
"""Of all groups, at most; a few are enough."""


class Matching(NamedTuple):
    """How the neurons of one network go with those of another.

    Attributes:
        permutations: By group: neuron `permutations[name][i]` of the second network goes with neuron i of the first;
            of a group with copies, [copies, neurons]. They are done in this order: heads, and then what lies in each.
        value: Of what was maximised: the inner product of weights, or the mean correlation of neurons.
        converged: Whether no single group could be improved any more.
    """

    permutations: dict[str, np.ndarray]
    value: float
    converged: bool

    __repr__ = printed

    def apply(self, model: Any, groups: Mapping[str, NeuronGroup]) -> Any:
        """Return the second network, `model`, with its neurons in the order of the first.

        Raises:
            ValueError: If `groups` lacks a group that was matched.
        """
        for name, permutation in self.permutations.items():
            if name not in groups:
                fail("groups", f"hold {name!r}, which was matched", ", ".join(groups) or "none")
            model = permute(groups[name], permutation)(model)
        return model


@validated
def match_weights(
    a: Any, b: Any, groups: dict[str, NeuronGroup], *, num_starts: int = 2, key: PRNGKey | None = None
) -> Matching:
    """Permutations of b that make its weights most like those of a: max sum <a, P(b)> over their parameters.

    Coordinate ascent over groups, each an exact linear assignment, from several starts: b as it is; neurons paired by
    what no permutation of others changes (their sorted weights), which finds a permuted copy at once; random orders.

    Args:
        a: A network.
        b: Another of the same structure.
        groups: From `rewrites.neuron_groups`, of either.
        num_starts: 1 is b as it is, 2 adds the pairing by sorted weights, more add random orders.
        key: Draws the random orders.

    Raises:
        ValueError: If structures differ, or a key is missing.
        TypeError: If the networks are traced: this is a step of the host.

    References:
        Ainsworth, Hayase and Srinivasa (2023), Git Re-Basin: merging models modulo permutation symmetries, algorithm 1.
    """
    check_count("num_starts", num_starts, minimum=1)
    if num_starts > 2 and key is None:
        fail("key", "be given where random orders are drawn", "None", "For instance jax.random.key(0)")
    _check_alike(a, b)
    _check_groups(a, groups)
    first, second = (known_parameters(*named, "assignments are a step") for named in (("a", a), ("b", b)))
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(parameters_in(a))}
    own = {name: tuple(slot for slot in group.slots if slot.path in paths) for name, group in groups.items()}
    groups = _in_order({name: dataclasses.replace(group, slots=own[name]) for name, group in groups.items()})
    still = {name: np.tile(np.arange(group.size), (group.copies, 1)) for name, group in groups.items()}
    starts = [still]
    if num_starts > 1:
        starts.append(_by_signatures(first, second, groups))
    if num_starts > 2 and key is not None:
        rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,), jnp.uint32)))
        starts += [{name: rng.permuted(each, axis=1) for name, each in still.items()} for _ in range(num_starts - 2)]
    return max((_ascended(first, second, groups, start) for start in starts), key=lambda found: found.value)


def _copies_moved(group: NeuronGroup, by: NeuronGroup, permutations: np.ndarray) -> np.ndarray:
    """Which copy of a group comes to the place of each, as another group is permuted: [copies], as heads are."""
    found = np.arange(group.copies)
    for slot in group.slots if group.copies > 1 else ():
        labels = slot.with_blocks(np.full(slot.shape, -1), np.moveaxis(slot.copy, slot.axis, 0)[None])
        moved = labels
        for other in by.slots:
            moved = other.permuted(moved, permutations) if other.leaf == slot.leaf else moved
        found[labels[labels >= 0]] = moved[labels >= 0]
    return found


def _in_order(groups: Mapping[str, NeuronGroup]) -> dict[str, NeuronGroup]:
    """Groups, those that move the copies of others first; what moves in copies of each other has none."""
    left, ordered = dict(groups), {}
    while left:
        free = (k for k, own in left.items() if not any(_moves(by, own) for by in left.values() if by is not own))
        name = next(free, None)
        if name is None:
            name = next(iter(left))
            slots = tuple(slot._replace(copy=np.zeros_like(slot.copy)) for slot in left[name].slots)
            left[name] = dataclasses.replace(left[name], slots=slots, copies=1)
        ordered[name] = left.pop(name)
    return ordered


def _moves(group: NeuronGroup, other: NeuronGroup) -> bool:
    """Whether a group moves the copies of another."""
    turn = np.tile(np.roll(np.arange(group.size), 1), (group.copies, 1))
    return bool((_copies_moved(other, group, turn) != np.arange(other.copies)).any())


def _check_alike(a: Any, b: Any) -> None:
    """Raises unless two networks have arrays of the same shapes."""
    first, second = ([np.shape(leaf) for leaf in parameters_of(model)[0]] for model in (a, b))
    if first != second:
        fail("b", f"have arrays of the shapes that `a` has, {first}", second)


def _check_groups(model: Any, groups: Mapping[str, NeuronGroup]) -> None:
    """Raises unless groups are of networks like this one."""
    paths, leaves, _ = program_of(model, None)
    shapes = dict(zip(paths, map(np.shape, leaves), strict=True))
    for name, group in groups.items():
        for slot in group.slots:
            if shapes.get(slot.path) != slot.shape:
                wanted = f"be of the networks: {name!r} has an array {slot.path} of shape {slot.shape}"
                fail("groups", wanted, shapes.get(slot.path, "none"))


def _rows(leaves: Sequence[np.ndarray], group: NeuronGroup) -> list[list[np.ndarray]]:
    """What lies at each neuron, by copy, and slot by slot: [neurons, numbers]."""
    blocks = [slot.blocks(leaves[slot.leaf]) for slot in group.slots]
    where = [
        np.broadcast_to(np.moveaxis(slot.copy, slot.axis, 0), block.shape[1:])
        for slot, block in zip(group.slots, blocks, strict=True)
    ]
    return [[block[:, own == copy] for block, own in zip(blocks, where, strict=True)] for copy in range(group.copies)]


def _permuted(leaves: list[np.ndarray], group: NeuronGroup, permutations: np.ndarray) -> list[np.ndarray]:
    leaves = list(leaves)
    for slot in group.slots:
        leaves[slot.leaf] = slot.permuted(leaves[slot.leaf], permutations)
    return leaves


def _by_signatures(
    first: list[np.ndarray], second: list[np.ndarray], groups: Mapping[str, NeuronGroup]
) -> dict[str, np.ndarray]:
    """Neurons paired by the sorted numbers at each, group by group."""
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
    first: list[np.ndarray], second: list[np.ndarray], groups: Mapping[str, NeuronGroup], start: dict[str, np.ndarray]
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
            likeness = [sum(one @ other.T for one, other in zip(*each, strict=True)) for each in pairs]
            order = np.stack([_assigned(np.asarray(each)) for each in likeness])
            moved = _permuted(now, group, order)
            better = sum(float(np.vdot(first[leaf], moved[leaf])) for leaf in touched)
            if better > value + 1e-12 * abs(value):
                now, value = moved, better
                found[name] = np.take_along_axis(found[name], order, 1)
                # What was done before in the copies of others is now done in those that came to their places.
                found |= {k: found[k][_copies_moved(other, group, order)] for k, other in groups.items() if k != name}
        if value == before:
            return Matching(_single(found, groups), value, converged=True)
    return Matching(_single(found, groups), value, converged=False)


def _single(found: Mapping[str, np.ndarray], groups: Mapping[str, NeuronGroup]) -> dict[str, np.ndarray]:
    """Permutations without the axis of copies where there is one copy."""
    return {name: each if groups[name].copies > 1 else each[0] for name, each in found.items()}


@validated
def match_activations(a: Any, b: Any, groups: dict[str, NeuronGroup], inputs: Any) -> Matching:
    """Permutations of b that make its neurons correlate most with those of a on data, group by group.

    A neuron's activity is what the layer that reads it sees, at all examples and places. Queries and keys, which no
    layer reads, stay as they are.

    Args:
        a: A network.
        b: Another of the same structure.
        groups: From `rewrites.neuron_groups`.
        inputs: Examples, samples first: an array, or a dictionary or tuple of arrays, as the networks take them.

    Returns:
        The permutations, exact for each copy of each group; the mean correlation of what was paired. Neurons that are
        constant on the data correlate 0.

    Raises:
        TypeError: If the networks do not take the examples.
        ValueError: If structures differ, or a group lies in stacked layers that a loop runs over.

    References:
        Li, Yosinski, Clune, Lipson and Hopcroft (2015); Ainsworth, Hayase and Srinivasa (2023), section 3.1.
    """
    _check_alike(a, b)
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


def _activity(model: Any, inputs: Any, group: NeuronGroup, reads: Sequence[Slot]) -> dict[int, np.ndarray]:
    """Standardised activity of neurons, by copy, in units in which products over rows are correlations.

    Each is [rows, neurons], as seen by the first array that reads the copy; queries and keys, which are multiplied with
    each other alone, are not seen.
    """
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
        others = [axis for axis in range(len(slot.shape)) if axis in seen.axes and axis != slot.axis]
        copy = np.moveaxis(slot.copy, slot.axis, 0)
        copy = copy.reshape([copy.shape[0], 1, *(slot.copy.shape[axis] for axis in others)])
        copy = np.broadcast_to(copy, values.shape[1:])
        for number in sorted(set(slot.copy.flat) - set(found)):
            own = values[:, copy == number].T
            own = own - own.mean(0)
            lengths = np.linalg.norm(own, axis=0)
            found[int(number)] = own / np.where(lengths > 1e-12 * max(lengths.max(), 1e-300), lengths, np.inf)
    if refusal is not None and not found:
        fail("groups", "be of neurons that some layer reads as a whole", f"{group.name!r}: {refusal}")
    return found


@validated
def interpolate(a: Any, b: Any, share: Scalar) -> Any:
    """(1 - share) a + share b, array by array.

    Args:
        a: A network.
        b: Another of the same structure, its neurons in the order of a's (`Matching.apply`).
        share: Of b, from 0 to 1; may be traced.

    Returns:
        The network between them; 0.5 merges the two. Statistics of batch normalisation want to be taken anew
        (`renormalised`).
    """
    _check_alike(a, b)
    arrays, rest = eqx.partition(a, eqx.is_inexact_array)
    others = eqx.filter(b, eqx.is_inexact_array)
    share = jnp.asarray(share, float)

    def between(one: Array, other: Array) -> Array:
        own = share.astype(jnp.asarray(one).dtype)
        return (1 - own) * one + own * other

    return eqx.combine(jax.tree.map(between, arrays, others), rest)


class Barrier(NamedTuple):
    """The loss along the line between two networks.

    Attributes:
        height: The largest excess over the line between the losses at both ends; not negative.
        losses: At the points.
        shares: Of the second network, from 0 to 1.
    """

    height: Float[Array, ""]
    losses: Float[Array, " points"]
    shares: Float[Array, " points"]

    __repr__ = printed


@validated
def barrier(loss: Callable[[Any], Array], a: Any, b: Any, *, num_points: int = 11) -> Barrier:
    """max_t L((1 - t) a + t b) - ((1 - t) L(a) + t L(b)).

    Args:
        loss: From a network to a real number.
        a: A network.
        b: Another of the same structure.
        num_points: On the line, ends included; at least 3.

    References:
        Frankle, Dziugaite, Roy and Carbin (2020), Linear mode connectivity and the lottery ticket hypothesis.
    """
    shares = jnp.linspace(0.0, 1.0, check_count("num_points", num_points, minimum=3))
    _check_alike(a, b)
    found = eqx.filter_eval_shape(loss, a)
    if not hasattr(found, "dtype") or found.shape != () or jnp.issubdtype(found.dtype, jnp.complexfloating):
        fail_kind("loss", "return a single real number", found)
    losses = jax.lax.map(lambda share: jnp.asarray(loss(interpolate(a, b, share)), float), shares)
    excess = losses - ((1 - shares) * losses[0] + shares * losses[-1])
    return Barrier(jnp.max(excess), losses, shares)


class Barriers(NamedTuple):
    """Barriers between all pairs of members.

    Attributes:
        before: Of the networks as they are, [members, members].
        after: After matching, [members, members]. Both are symmetric, with zeros on the diagonal.
        matchings: Of every pair i < j: j's neurons with those of i.
    """

    before: np.ndarray
    after: np.ndarray
    matchings: dict[tuple[int, int], Matching]

    def __repr__(self) -> str:
        pairs = np.triu_indices(len(self.after), 1)
        means = ", ".join(f"{name}={getattr(self, name)[pairs].mean():.4g}" for name in ("before", "after"))
        return f"Barriers({len(pairs[0])} pairs of {len(self.after)} members, means {means})"

    def interval(self, of: str = "after", *, level: float = 0.9) -> MemberInterval:
        """Return the mean barrier of two networks and its interval over networks, see `similarity.member_interval`.

        Args:
            of: "after" matching, "before" it, or its "fall", which each pair has from before to after.
            level: Coverage, between 0 and 1.

        Raises:
            ValueError: If there are fewer than three members, or an option is another.
        """
        check_choice("of", of, ("after", "before", "fall"))
        if len(self.after) < 3:
            fail("models", "be at least 3 members for an interval", len(self.after))
        if of == "fall":
            return member_interval(self.before - self.after, level=level)
        return member_interval(getattr(self, of), level=level, bounds=(0.0, np.inf))


@validated
def barriers(
    loss: Callable[[Any], Array],
    models: Any,
    groups: dict[str, NeuronGroup],
    *,
    num_points: int = 11,
    num_starts: int = 1,
    key: PRNGKey | None = None,
) -> Barriers:
    """Barriers between all pairs of stacked members, before and after weight matching.

    Args:
        loss: From one network to a number.
        models: Stacked networks, members first.
        groups: Of one of them.
        num_points: See `barrier`.
        num_starts: See `match_weights`.
        key: See `match_weights`.

    Raises:
        ValueError: If there is one member alone.
    """
    number = count(models)
    if number < 2:
        fail("models", "be two members or more", number)
    parts = [member(models, index) for index in range(number)]
    before, after = np.zeros((2, number, number))
    matchings = {}
    for i in range(number):
        for j in range(i + 1, number):
            found = match_weights(parts[i], parts[j], groups, num_starts=num_starts, key=key)
            matchings[i, j] = found
            before[i, j] = before[j, i] = _height(loss, parts[i], parts[j], num_points)
            after[i, j] = after[j, i] = _height(loss, parts[i], found.apply(parts[j], groups), num_points)
    return Barriers(before, after, matchings)


@eqx.filter_jit
def _height(loss: Callable[[Any], Array], a: Any, b: Any, num_points: int) -> Array:
    return barrier(loss, a, b, num_points=num_points).height


@validated
def renormalised(model: Any, state: Any, inputs: Any) -> Any:
    """The state of a network with the statistics of its batch normalisations taken anew, on all examples at once.

    All else is in inference mode, so that nothing is dropped. Merged networks have means and variances that are not
    those of their merged weights.

    Args:
        model: A network with `eqx.nn.BatchNorm`, of any mode.
        state: Its `eqx.nn.State`.
        inputs: Examples, samples first: an array, or a dictionary or tuple of arrays, as the network takes them.

    Raises:
        TypeError: If the network does not take the examples.
        ValueError: If the network has no batch normalisation.

    References:
        Jordan, Sedghi, Saukh, Entezari and Neyshabur (2023), REPAIR: renormalizing permuted activations for
        interpolation repair.
    """
    is_norm = lambda part: isinstance(part, eqx.nn.BatchNorm)  # noqa: E731
    norms = [part for part in jax.tree.leaves(model, is_leaf=is_norm) if is_norm(part)]
    if not norms:
        fail("model", "have batch normalisations", "none")
    leaves, tree = jax.tree.flatten(state)
    state = jax.tree.unflatten(tree, leaves)  # the caller's stays in use
    for norm in norms:
        if norm.ema_state_index is not None:
            state = state.set(norm.ema_first_time_index, jnp.array(True))
        else:
            zeros = jax.tree.map(jnp.zeros_like, state.get(norm.batch_state_index))
            state = state.set(norm.batch_counter, jnp.zeros_like(state.get(norm.batch_counter)))
            state = state.set(norm.batch_state_index, zeros)

    def trained(part: Any) -> Any:
        if not is_norm(part):
            return part
        return eqx.tree_at(lambda norm: norm.axis_name, eqx.nn.inference_mode(part, False), "samples")

    training = jax.tree.map(trained, eqx.nn.inference_mode(model), is_leaf=is_norm)
    inputs = as_examples("inputs", inputs, finite=True)
    run = jax.vmap(lambda x, s: training(x, s)[1], in_axes=(0, None), out_axes=None, axis_name="samples")
    check_takes("model", lambda x: called((model, state), x), jax.tree.map(lambda part: part[0], inputs))
    return eqx.filter_jit(run)(inputs, state)
