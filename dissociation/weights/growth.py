"""Rewrites that give a group more neurons: copies of those that are there, and ones without effect.

See `rewrites`. What a program counts, or a module keeps beside its arrays, must follow (`sizes.refitted`): a model that
was not the same program with more neurons is refused.
"""

import math
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jaxtyping import Array, Float

from dissociation.checks import check_count, check_non_negative, fail, fail_kind, is_traced
from dissociation.models.program import bound, program_of
from dissociation.types import PRNGKey, Scalar
from dissociation.validation import validated
from dissociation.weights.axes import spread
from dissociation.weights.flow import FEW
from dissociation.weights.groups import NeuronGroup, group_report, neuron_groups, parameters_of
from dissociation.weights.neurons import copies_of, least_squares
from dissociation.weights.rewrites import Rewrite, current
from dissociation.weights.seen import layer_inputs
from dissociation.weights.sizes import refit


class Duplicate(Rewrite):
    """See `duplicate`."""

    multiplier: float = eqx.field(static=True)
    group: NeuronGroup = eqx.field(static=True)

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        group = current(self.group, model)
        _check_grows(group, new=False)
        original = copies_of(group.size, self.multiplier)
        copies = np.bincount(original, minlength=group.size)[original]
        exponents: Any = group.sharing

        def change(array: Array, axis: int, owners: dict[int, np.ndarray]) -> Array:
            for index, owner in owners.items():
                vector = np.where(owner >= 0, copies[owner] ** float(exponents[index]), 1.0)
                array = array * _along(jnp.asarray(vector, array.dtype), array, axis)
            return array

        return _resized(model, group, original, change)


def _along(vector: Array, array: Array, axis: int) -> Array:
    """A vector along one axis of an array."""
    return vector.reshape([-1 if k == axis else 1 for k in range(array.ndim)])


@validated
def duplicate(group: NeuronGroup, multiplier: float | int = 2.0) -> Duplicate:
    """Repeats the neurons of a group, and shares what reads them out equally over the copies of each.

    The copies come as whole groups one after another; see `neurons.duplicate_neurons`.

    Args:
        group: Of the model.
        multiplier: Of the number of neurons, at least 1; a plain number, as it sets shapes.

    Returns:
        The rewrite.

    Raises:
        TypeError: If `multiplier` is traced.
        ValueError: If the group cannot grow, or `multiplier` is below 1.
    """
    _check_grows(group, new=False)
    copies_of(group.size, multiplier, "multiplier")
    return Duplicate(float(multiplier), group)


def _check_grows(group: NeuronGroup, neurons_per_group: int = 1, *, new: bool = True) -> None:
    if group.sharing is None:
        why = "a statistic is taken over its neurons" if group.normalised else "no product is summed over its neurons"
        fail("group", "be one that can grow", f"{group.name}, which cannot: {why}")
    if new and not (group.sharing.min() < 0 and np.all((group.sharing >= -1) & (group.sharing <= 0))):
        fail("group", "be one whose neurons are silent where what reads them is zero", group.name)
    if neurons_per_group > 1 and not group.cancelling:
        wanted = f"be 1 for {group.name}, as what reads it is not multiplied and summed just as it stands"
        fail("neurons_per_group", wanted, neurons_per_group)


LOOPS = ("scan", "while")
"""What is handed to the programs of these is not what they begin with each time."""

Fill = Callable[[Array, int, dict[int, np.ndarray]], Array]
Owners = dict[tuple[int, int], dict[int, np.ndarray]]


def _resized(model: Any, group: NeuronGroup, original: np.ndarray, fill: Fill) -> Any:
    """The model with other neurons in a group.

    Args:
        model: The model.
        group: Current in it.
        original: Which old neuron each new one takes over.
        fill: From an array with the new neurons along an axis, and, for the group's slots there, which of the new
            neurons each place belongs to, or -1.
    """
    leaves, tree, rest = parameters_of(model)
    owners: Owners = {}
    for (leaf, axis), own in group.by_axis().items():
        slots = [group.slots[index] for index in own]
        places, by_name = spread(slots[0].layout, {slot.name: original for slot in slots})
        leaves[leaf] = jnp.take(jnp.asarray(leaves[leaf]), places, axis=axis)
        owners[leaf, axis] = {index: by_name[slot.name] for index, slot in zip(own, slots, strict=True)}
    # What reads the new neurons comes last, so that they are without effect on each other too.
    for (leaf, axis), own in sorted(owners.items(), key=lambda item: group.slots[min(item[1])].outgoing):
        leaves[leaf] = fill(leaves[leaf], axis, own)
    grown = eqx.combine(jax.tree.unflatten(tree, leaves), rest)
    one, other = (refit(grown, more_groups=more) for more in (False, True))
    try:
        _check_same(model, one, group, owners, len(original))
    except (TypeError, ValueError):
        if jax.tree.structure(one) == jax.tree.structure(other):
            raise
        _check_same(model, other, group, owners, len(original))
        return other
    return one


def check_same_program(before: Any, after: Any, group: NeuronGroup) -> None:
    """Raises unless both are one program, without anything in it that depends on how many neurons a group has."""
    one, other = (list(_operations(model, group)) for model in (before, after))
    lengths = [group_report(model, group.example, call=group.call).lengths for model in (before, after)]
    if len(one) != len(other) or not all(map(_same_operation, one, other)) or lengths[0] != lengths[1]:
        fail("group", "be one whose number of neurons the function does not depend on", group.name)


def _check_same(before: Any, after: Any, group: NeuronGroup, owners: Owners, size: int) -> None:
    check_same_program(before, after, group)
    _check_same_places(after, group, owners, size)


def _check_same_places(rewritten: Any, group: NeuronGroup, owners: Owners, size: int) -> None:
    """Raises unless the neurons are a group of the grown model, at the places that they were given."""
    wanted: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for place, own in owners.items():
        pairs = (zip(owner.tolist(), range(len(owner)), strict=True) for owner in own.values())
        wanted[place] = {pair for some in pairs for pair in some if pair[0] >= 0}
    for other in neuron_groups(rewritten, group.example, call=group.call).values():
        if other.size == size and {(slot.leaf, slot.axis) for slot in other.slots} == set(wanted):
            found: dict[tuple[int, int], set[tuple[int, int]]] = {place: set() for place in wanted}
            for slot in other.slots:
                rows = enumerate(slot.positions.tolist())
                found[slot.leaf, slot.axis] |= {(neuron, place) for neuron, row in rows for place in row}
            if found == wanted:
                return
    fail("group", "be one whose neurons the program does not count", group.name)


PARTIAL = {"sqrt", "rsqrt", "log", "log1p", "pow", "div", "integer_pow", "acos", "asin", "acosh", "atanh", "erf_inv"}
"""Operations that are not finite, or not numbers, everywhere."""


def _check_defined(before: Any, after: Any, group: NeuronGroup) -> None:
    """Raises if outputs are no longer numbers because of new neurons, whose weight of zero does not silence NaN."""
    numbers = [jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)) for model in (before, after)]
    if any(map(is_traced, [*numbers[0], *numbers[1]])):
        return
    if PARTIAL.isdisjoint(operation.name for operation in _operations(after, group)):
        return
    examples = jax.tree.map(_drawn_like, group.example)
    runs = [program_of(model, group.call) for model in (before, after)]
    one, other = ([np.isfinite(y) for y in jax.vmap(run, (None, 0))(leaves, examples)] for _, leaves, run in runs)
    if any((kept & ~still).any() for kept, still in zip(one, other, strict=True)):
        wanted = "be one whose new neurons are finite, whatever weights are drawn"
        fail("group", wanted, group.name, "What it passes through is not defined for these weights")


def _drawn_like(leaf: Any) -> Any:
    """Examples to try, half of them without negative numbers; zeros where they are no real numbers."""
    shape, kind = (64, *np.shape(leaf)), jax.dtypes.result_type(leaf)
    if not jnp.issubdtype(kind, jnp.floating):
        return jnp.zeros(shape, kind)
    drawn = jax.random.normal(jax.random.key(0), shape, kind)
    return drawn.at[::2].set(jnp.abs(drawn[::2]))


class _Operation(NamedTuple):
    """What an operation of a program is told.

    Attributes:
        name: Of the primitive.
        given: Shapes of its operands.
        made: Shapes of its results.
        params: How it works, but for programs within it.
        numbers: What is known of its operands.
    """

    name: str
    given: tuple[Any, ...]
    made: tuple[Any, ...]
    params: dict[str, Any]
    numbers: tuple[np.ndarray, ...]


def _operations(model: Any, group: NeuronGroup) -> Iterator[_Operation]:
    _, leaves, program = program_of(model, group.call)
    shapes = [jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves]
    try:
        jaxpr = jax.make_jaxpr(program)(shapes, group.example)
    except Exception as error:
        advice = "If a module keeps its size, `weights.sizes.refitted.register` what makes it anew"
        fail_kind(
            "model", f"run with another number of neurons in {group.name}", f"{type(error).__name__}: {error}", advice
        )
    return _operations_in(jaxpr)


def _operations_in(
    closed: Any, given: list[Any] | None = None, *, handed_on: bool = False
) -> Generator[_Operation, None, list[Any]]:
    """The operations of a program that depend on its inputs, in order; what follows from constants is computed.

    Returns:
        What is known of the results.
    """
    known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, map(_as_known, closed.consts), strict=True))
    known |= {} if given is None else dict(zip(closed.jaxpr.invars, given, strict=True))

    def read(variable: Any) -> Any:
        return _as_known(variable.val) if isinstance(variable, jex.Literal) else known.get(variable)

    for equation in closed.jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        parts = [inner for value in equation.params.values() for inner in _programs_in(value)]
        if not parts and all(operand is not None for operand in operands) and _few(equation.outvars):
            with jax.ensure_compile_time_eval():
                results = bound(equation, [jnp.asarray(operand) for operand in operands])
            known |= dict(zip(equation.outvars, map(_as_known, results), strict=True))
            continue
        yield _operation(equation, operands)
        for inner in parts:
            whole = (
                len(parts) == 1 and len(inner.jaxpr.invars) == len(operands) and equation.primitive.name not in LOOPS
            )
            into = operands if whole else [None] * len(inner.jaxpr.invars)
            results = yield from _operations_in(inner, into, handed_on=whole)
            known |= dict(zip(equation.outvars, results, strict=True)) if whole else {}
    shapes = tuple(variable.aval.shape for variable in closed.jaxpr.outvars)
    results = [read(variable) for variable in closed.jaxpr.outvars]
    numbers = () if handed_on else tuple(value for value in results if value is not None)
    yield _Operation("results", (), (), {"shapes": shapes} if given is None else {}, numbers)
    return results


def _operation(equation: Any, operands: list[Any]) -> _Operation:
    shapes = [tuple(getattr(variable.aval, "shape", ())) for variable in (*equation.invars, *equation.outvars)]
    params = {name: value for name, value in equation.params.items() if _is_plain(value)}
    count = len(equation.invars)
    numbers = tuple(operand for operand in operands if operand is not None)
    return _Operation(equation.primitive.name, tuple(shapes[:count]), tuple(shapes[count:]), params, numbers)


def _is_plain(value: Any) -> bool:
    """Whether a parameter is numbers or words, and no function or program, which are other objects each time."""
    plain = isinstance(value, int | float | str | tuple)
    return plain and not list(_programs_in(value)) and " at 0x" not in repr(value)


def _same_operation(one: _Operation, other: _Operation) -> bool:
    if one.name != other.name or len(one.numbers) != len(other.numbers):
        return False
    if not all(map(_same_numbers, one.numbers, other.numbers)):
        return False
    if one.given == other.given and one.name != "broadcast_in_dim":  # nothing in it has neurons
        return one.made == other.made and one.params == other.params
    # Shapes and slices follow the neurons; other numbers do not, but for the groups of a convolution.
    plain = [{k: v for k, v in each.params.items() if isinstance(v, int | float | str)} for each in (one, other)]
    return plain[0] == plain[1] or one.name == "conv_general_dilated"


def _same_numbers(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether constants are the same, whatever the length of an axis."""
    if one.shape == other.shape:
        return one.tobytes() == other.tobytes()
    return np.array_equal(np.unique(one), np.unique(other), equal_nan=one.dtype.kind in "fc")


def _as_known(value: Any) -> np.ndarray | None:
    if is_traced(value) or jnp.issubdtype(jnp.asarray(value).dtype, jax.dtypes.prng_key):
        return None
    return np.asarray(value)


def _few(variables: Any) -> bool:
    return all(math.prod(getattr(variable.aval, "shape", ())) <= FEW for variable in variables)


def _programs_in(value: Any) -> Iterator[Any]:
    for inner in value if isinstance(value, tuple) else (value,):
        if isinstance(inner, jex.Jaxpr):
            yield jex.ClosedJaxpr(inner, ())
        elif isinstance(inner, jex.ClosedJaxpr):
            yield inner


class AddNuisance(Rewrite):
    """See `add_nuisance`."""

    key: PRNGKey
    incoming_std: Scalar
    outgoing_std: Scalar | None
    num_groups: int = eqx.field(static=True)
    neurons_per_group: int = eqx.field(static=True)
    group: NeuronGroup = eqx.field(static=True)

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        group = current(self.group, model)
        _check_grows(group, self.neurons_per_group)
        count, size = self.num_groups * self.neurons_per_group, self.neurons_per_group
        if count == 0:
            return model
        original = np.concatenate([np.arange(group.size), np.zeros(count, int)])
        made = [index for index, slot in enumerate(group.slots) if not slot.outgoing]
        read = [index for index, slot in enumerate(group.slots) if slot.outgoing]
        firsts, others = jax.random.split(self.key)
        keys = dict(zip((*made, *read), (*_keys(firsts, len(made)), *_keys(others, len(read))), strict=True))
        member = np.repeat(np.arange(self.num_groups), size)

        def change(array: Array, axis: int, owners: dict[int, np.ndarray]) -> Array:
            array = jnp.moveaxis(array, axis, 0)
            for index, owner in sorted(owners.items(), key=lambda item: group.slots[item[0]].outgoing):
                new = owner >= group.size
                columns = int(new.sum()) // count
                shape = (count, columns, *array.shape[1:])
                order = np.argsort(owner[new], kind="stable")
                places = np.flatnonzero(new)[order].reshape(count, columns)
                if group.slots[index].outgoing:
                    values = self._cancelling(keys[index], shape, array, places)
                elif math.prod(array.shape[1:]) == 1:  # one number each, such as a variance: as others have it
                    pick = jax.random.randint(keys[index], (self.num_groups,), 0, group.size)
                    values = array[jnp.asarray(_rows_of(owner, group.size))[pick]][member]
                else:
                    drawn = jax.random.normal(keys[index], (self.num_groups, *shape[1:]), array.dtype)
                    old = array[jnp.asarray(np.setdiff1d(np.arange(len(owner)), places))]
                    drawn = jnp.where(jnp.all(old > 0), jnp.abs(drawn), drawn)
                    values = (jnp.asarray(self.incoming_std, array.dtype) * drawn)[member]
                array = array.at[places].set(values)
            return jnp.moveaxis(array, 0, axis)

        grown = _resized(model, group, original, change)
        _check_defined(model, grown, group)
        return grown

    def _cancelling(self, key: Array, shape: tuple[int, ...], array: Array, places: np.ndarray) -> Array:
        """Outgoing weights that add up to zero in each group of new neurons."""
        size = self.neurons_per_group
        if size == 1:
            return jnp.zeros(shape, array.dtype)
        known = np.setdiff1d(np.arange(array.shape[0]), places)
        std = jnp.sqrt(jnp.mean(array[known] ** 2)) if self.outgoing_std is None else self.outgoing_std
        drawn = jax.random.normal(key, (self.num_groups, size, *shape[1:]), array.dtype)
        centred = drawn - jnp.mean(drawn, axis=1, keepdims=True)
        return (jnp.asarray(std, array.dtype) * (size / (size - 1)) ** 0.5 * centred).reshape(shape)


def _keys(key: Array, count: int) -> list[Array]:
    return [key] if count == 1 else list(jax.random.split(key, count)) if count else []


def _rows_of(owner: np.ndarray, size: int) -> np.ndarray:
    """Places of the old neurons along an axis with one place for each."""
    known = (owner >= 0) & (owner < size)
    places = np.flatnonzero(known)
    return places[np.argsort(owner[known], kind="stable")].reshape(size, -1)


@validated
def add_nuisance(
    group: NeuronGroup,
    num_groups: int = 3,
    neurons_per_group: int = 1,
    *,
    key: PRNGKey,
    incoming_std: Scalar = 1.0,
    outgoing_std: Scalar | None = None,
) -> AddNuisance:
    """Appends random neurons without effect to a group, in sets that cancel out.

    Neurons of one set share what makes them: draws of N(0, incoming_std^2) for matrices and kernels (their magnitudes
    where all that is there is positive), and for arrays with one number per neuron (biases, gains, variances) those of
    a neuron that is there. What reads them adds up to
    zero over each set: zero for sets of one, draws less their mean for larger ones; see
    `neurons.add_random_zero_neurons`.

    Args:
        group: Of the model.
        num_groups: Sets, 0 or more.
        neurons_per_group: Neurons of each, 1 or more.
        key: A PRNG key of either kind.
        incoming_std: Standard deviation of incoming weights; may be traced.
        outgoing_std: Standard deviation of outgoing weights of larger sets; None is the root mean square of those that
            are there.

    Returns:
        The rewrite.

    Raises:
        TypeError: If a count is no integer.
        ValueError: If the group cannot grow, or an option is out of range; the rewrite raises it too where its new
            neurons are not finite, as behind a logarithm of what is drawn.
    """
    check_count("num_groups", num_groups)
    check_count("neurons_per_group", neurons_per_group, minimum=1)
    _check_grows(group, neurons_per_group)
    check_non_negative("incoming_std", incoming_std)
    if outgoing_std is not None:
        check_non_negative("outgoing_std", outgoing_std)
    return AddNuisance(key, incoming_std, outgoing_std, num_groups, neurons_per_group, group)


class AddPhantom(Rewrite):
    """See `add_phantom`."""

    incoming: Float[Array, "new features"]
    bias: Float[Array, " new"] | None
    group: NeuronGroup = eqx.field(static=True)

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        group = current(self.group, model)
        _check_grows(group)
        count = len(self.incoming)
        original = np.concatenate([np.arange(group.size), np.zeros(count, int)])

        def change(array: Array, axis: int, owners: dict[int, np.ndarray]) -> Array:
            array = jnp.moveaxis(array, axis, 0)
            for index, owner in sorted(owners.items(), key=lambda item: group.slots[item[0]].outgoing):
                new = np.flatnonzero(owner >= group.size)
                values: Any = 0.0
                if not group.slots[index].outgoing:
                    values = self.bias if array.ndim == 1 else self.incoming.reshape(count, *array.shape[1:])
                array = array.at[new].set(values)
            return jnp.moveaxis(array, 0, axis)

        return _resized(model, group, original, change)


@validated(finite=("pattern",))
def add_phantom(
    group: NeuronGroup,
    model: Any,
    inputs: Any,
    pattern: Float[Array | np.ndarray, "vectors new"],
    *,
    rtol: Scalar | None = None,
) -> AddPhantom:
    """Appends neurons without effect to a group, whose preactivations show a pattern on inputs of the model.

    Args:
        group: Of the model; made by one matrix, and a bias or none.
        model: The model.
        inputs: Examples, see `seen.layer_inputs`.
        pattern: The preactivations wanted of the new neurons, one column each.
        rtol: See `neurons.add_phantom_zero_neurons`.

    Returns:
        The rewrite.

    Raises:
        ValueError: If the group cannot grow, is made by anything else, or sees several vectors for each example.
    """
    _check_grows(group)
    made = [slot for slot in group.slots if not slot.outgoing]
    matrices = [slot for slot in made if len(slot.shape) == 2]
    biases = [slot for slot in made if len(slot.shape) == 1]
    if len(matrices) != 1 or len(biases) > 1 or len(made) > 2 or matrices[0].positions.shape[1] != 1:
        fail("group", "be made by one matrix, and a bias or none", group)
    seen = layer_inputs(model, inputs, matrices[0].path, call=group.call)
    if len(seen.rows) != len(pattern):
        fail("pattern", f"have a row for every vector that {group.name} sees ({len(seen.rows)})", len(pattern))
    rows = jnp.concatenate([seen.rows, jnp.ones((len(seen.rows), len(biases)), seen.rows.dtype)], 1)
    found = least_squares(rows, jnp.asarray(pattern, rows.dtype), rtol).T
    width = seen.rows.shape[1]
    return AddPhantom(found[:, :width], found[:, width] if biases else None, group)
