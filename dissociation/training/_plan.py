"""Plans of sweeps: groups of members that are trained at once, by an estimate of their memory."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from dissociation._core import checks
from dissociation._core._compat import jex
from dissociation._core.conversion import to_device
from dissociation.training import _machine as machine
from dissociation.training._chunk import drawn, observe_members, run_chunk
from dissociation.training._fitting import prepared
from dissociation.training._members import gathered, take
from dissociation.training._partition import Partition
from dissociation.training._progress import MeterFactory, open_meter
from dissociation.training._records import Save, record_steps
from dissociation.training._run import Batches, Run
from dissociation.training._samplers import HostBatches, Sampler
from dissociation.training._state import Step
from dissociation.training._sweeps import Grid


class Plan(NamedTuple):
    """Groups of members that are trained at once, by index in the grid."""

    groups: tuple[tuple[int, ...], ...]
    peak_bytes: int  # estimate for the largest group, without the memory of the compiler
    budget: int
    devices: int  # which train members

    def __str__(self) -> str:
        sizes = list(map(len, self.groups))
        members = f"{sum(sizes)} members, {max(sizes)} at once on {self.devices} device(s)"
        return f"{members}, at most {self.peak_bytes / 2**20:.0f} MiB of {self.budget / 2**20:.0f}"


class Sweep(NamedTuple):
    """Arguments of all groups of `fit_grid`."""

    init: Callable[..., Any]
    step: Step
    sampler: Sampler
    grid: Grid
    keys: Array
    order: Array
    shape_of: list[tuple[tuple[str, Any], ...]]  # quantities that set a model's shape, by member
    hyperparams: dict[str, np.ndarray]  # all other quantities but the seed, [members] each
    aux: Any
    length: dict[str, Any]  # number of steps or epochs
    save: Save
    how: dict[str, Any]  # mesh and mapping of the members

    @property
    def num_steps(self) -> int:
        """Return the number of steps of each member."""
        if self.length["num_steps"] is not None:
            return self.length["num_steps"]
        return self.length["num_epochs"] * self.sampler.epoch_steps

    def start(self, members: Sequence[int]) -> tuple[PyTree, PyTree, Array]:
        """Return stacked initial models, `aux` and training keys of members of one shape."""
        indices = np.asarray(members)
        make_aux = self.aux if makes(self.aux) else None
        quantities = dict(self.shape_of[members[0]])
        models, aux, keys = _fresh((self.init, make_aux), quantities, self.keys, to_device(indices))
        if make_aux is None:
            aux = take(self.aux, indices)
        return models, aux, keys

    def arguments(self, members: Sequence[int]) -> tuple[PyTree, dict[str, Any]]:
        """Return the models of members of one shape, and `fit`'s arguments for their training."""
        models, aux, keys = self.start(members)
        hyperparams = take(self.hyperparams, np.asarray(members)) or None
        key: Any = keys
        if self.sampler.shared:
            key = (self.order, keys)
        return models, {"aux": aux, "hyperparams": hyperparams, "key": key, **self.length}


@eqx.filter_jit
def _fresh(
    make: tuple[Any, Any], quantities: dict[str, Any], keys: Array, members: Array
) -> tuple[PyTree, PyTree, Array]:
    """Return stacked models and `aux` of members from two functions, and keys of training.

    The second function may be None.
    """
    make_model, make_aux = make
    model_keys, training_keys = gathered(keys, members).T
    models = eqx.filter_vmap(lambda key: make_model(key, **quantities))(model_keys)
    aux = None
    if make_aux is not None:
        aux = eqx.filter_vmap(lambda key: make_aux(key, **quantities))(model_keys)
    return models, aux, training_keys


def makes(aux: Any) -> bool:
    """Return True if `aux` is a function of one member, not arrays of all members."""
    return callable(aux) and not jax.tree.leaves(eqx.filter(aux, eqx.is_array))


def planned(
    sweep: Sweep,
    budget: int | None,
    num_groups: int | None = None,
    *,
    keeps: bool = False,
    progress: str | MeterFactory | None = None,
) -> Plan:
    """Return groups that fit in memory, at least `num_groups`.

    `keeps` is True if trained models stay in memory.
    """
    is_stated = budget is not None
    if budget is None:
        budget = machine.free_memory([])
    else:
        budget = checks.check_count("memory_budget", budget, minimum=1, maximum=None)

    members_of_shape: dict[Any, list[int]] = {}
    for member, shape in enumerate(sweep.shape_of):
        members_of_shape.setdefault(shape, []).append(member)
    num_shapes = len(members_of_shape)
    counts = [len(members) for members in members_of_shape.values()]
    max_size = _largest_group(counts, num_groups or 1)
    # A stated budget is compared with what programs take.
    ample = 0 if is_stated else budget // (4 * num_shapes)

    groups = []
    peak = 0
    kept_bytes = 0
    devices = 1
    with closing(open_meter(progress, num_shapes, "planning")) as meter:
        for num_planned, members in enumerate(members_of_shape.values()):
            meter.advance(num_planned, "compiling")  # most of a short sweep's time
            fixed_bytes, member_bytes, model_bytes, threads = estimated_bytes(sweep, members, ample)
            if keeps:
                kept_bytes += model_bytes * len(members)
            fixed_bytes += kept_bytes
            size = min(len(members), max_size, (budget - fixed_bytes) // member_bytes)
            if size < 1:
                least_bytes = fixed_bytes + member_bytes
                requirement = (
                    f"be at least {least_bytes} bytes, which one member takes with its data"
                )
                checks.fail("memory_budget", requirement, budget)

            # Groups of equal size share a program.
            size = math.ceil(len(members) / math.ceil(len(members) / size))
            devices = max(devices, threads)
            peak = max(peak, fixed_bytes + member_bytes * size)
            for start in range(0, len(members), size):
                groups.append(tuple(members[start : start + size]))
        meter.advance(num_shapes, "")
    return Plan(tuple(groups), peak, budget, devices)


def _largest_group(counts: list[int], num_groups: int) -> int:
    """Return the largest size of a group with which there are at least `num_groups`.

    `counts` holds the number of members of each shape.
    """
    for size in range(max(counts), 0, -1):
        if sum(-(-count // size) for count in counts) >= num_groups:
            return size
    return checks.fail("num_groups", f"be at most the number of members, {sum(counts)}", num_groups)


def estimated_bytes(
    sweep: Sweep, members: Sequence[int], ample: int = 0
) -> tuple[int, int, int, int]:
    """Estimate the memory of members of one shape, from programs of 2 and 4 of them on one device.

    If an upper bound for all members is below `ample` bytes, nothing is compiled, and the bound is
    the estimate.

    Returns:
        Bytes of data and programs for any number of members, bytes per member, bytes of a trained
        model, and the number of devices or worker threads. The compiler's memory is left out.
    """
    step = sweep.step
    sampler = sweep.sampler
    save = sweep.save
    four_members = (list(members) * 4)[:4]

    def prepare() -> tuple[Any, ...]:
        models, arguments = sweep.arguments(four_members)
        return prepared(models, step, sampler, **arguments)

    shapes, first, total, (order, *member_keys) = eqx.filter_eval_shape(prepare)

    def run_of(size: int) -> Run:
        state, *keys = _zeros((shapes, *member_keys), size)
        order_size = None if sampler.shared else size
        order_key = _zeros(order, order_size)
        partition = Partition(size, **{**sweep.how, "mesh": None})
        return _Estimate(state, step, sampler, (order_key, *keys), save, partition, [])

    def compiled_bytes(run: Run) -> int:
        """Return the bytes of the chunk's or the observation's program, if that takes more."""
        stacked = run.members
        observe = run.program.observe
        calls: list[Any] = [(run_chunk, run.example())]
        if observe is not None:
            inputs = (stacked.partition.how, observe, jnp.asarray(first), stacked.observe_keys[0])
            calls.append((observe_members, inputs))

        sizes = []
        for function, inputs in calls:
            program = function.lower(inputs, stacked.states[0]).compile()
            sizes.append(machine.program_bytes(program.compiled))
        return max(sizes)

    run = run_of(2)
    state = run.members.states[0]
    program = run.program
    state_bytes = _bytes(state) // 2
    # Programs free most results of their operations, and copy some.
    temporary_bytes = sum(2 * result_bytes(traced.code.jaxpr) for traced in program.programs)
    program_bytes = 0
    if _bytes(sampler) + len(members) * (3 * state_bytes + temporary_bytes) > ample:
        bytes_of_two = compiled_bytes(run)
        bytes_of_four = compiled_bytes(run_of(4))
        temporary_bytes = max(0, bytes_of_four - bytes_of_two) // 2
        program_bytes = max(0, bytes_of_two - 2 * temporary_bytes)

    num_records = len(record_steps(save, [], first, total, sampler.epoch_steps))
    num_recorded = _size(program.info) * (total - first)
    if program.observe is not None:
        num_recorded += _size(program.observe.out) * num_records

    threads = 1
    if jax.default_backend() == "cpu" and run.members.partition.member_map != "vmap":
        threads = min(jax.local_device_count(), machine.available_cores())
    fixed_bytes = _bytes(sampler) + _bytes(program.observe) + threads * program_bytes
    # At most three copies of a state are in memory: given, trained and returned.
    member_bytes = 3 * state_bytes + temporary_bytes + 16 * num_recorded
    return fixed_bytes, member_bytes, _bytes(state.arrays) // 2, threads


def result_bytes(jaxpr: Any) -> int:
    """Return the size of all operations' results in a jaxpr, once for the body of a loop."""
    total = 0
    for equation in jaxpr.eqns:
        for result in equation.outvars:
            total += math.prod(result.aval.shape) * result.aval.dtype.itemsize
        for parameter in equation.params.values():
            candidates = parameter if isinstance(parameter, tuple) else (parameter,)
            for candidate in candidates:
                if isinstance(candidate, jex.ClosedJaxpr | jex.Jaxpr):
                    total += result_bytes(candidate)
    return total


class _ZeroBatches(Batches):
    """Source with zeros as plans."""

    def draw(self, step: int, block: int | None) -> Any:
        if isinstance(self.sampler, HostBatches):
            return super().draw(step, block)
        return _zeros(eqx.filter_eval_shape(drawn, self.sampler, self.order, block))


class _Estimate(Run):
    """Run whose programs are compiled but not called, with zeros as arrays."""

    batches_of = _ZeroBatches


def _zeros(shapes: PyTree, size: int | None = None) -> PyTree:
    """Return zeros of these shapes, or keys; `size` replaces the length of the first axis."""

    def zeros(leaf: Any) -> Any:
        shape = leaf.shape
        if size is not None:
            shape = (size, *shape[1:])
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return to_device(np.zeros(shape, leaf.dtype))

        implementations: list[Any] = []
        jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), leaf)
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, leaf.dtype))
        zero_words = to_device(np.zeros(words.shape, words.dtype))
        return jax.random.wrap_key_data(zero_words, impl=implementations[0])

    return jax.tree.map(zeros, shapes)


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


def _size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
