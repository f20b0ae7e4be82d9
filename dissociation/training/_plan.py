"""Plans of sweeps: which members are trained at once, by an estimate of the memory that they take."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
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
from dissociation.training._fitting import FitResult, fit, prepared
from dissociation.training._members import gathered, take
from dissociation.training._partition import Partition
from dissociation.training._progress import MeterFactory, open_meter
from dissociation.training._records import Callback, Save, record_steps
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
        members, most = sum(map(len, self.groups)), max(map(len, self.groups))
        size = f"{self.peak_bytes / 2**20:.0f} MiB of {self.budget / 2**20:.0f}"
        return f"{members} members, {most} at once on {self.devices} device(s), at most {size}"


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
        """Return initial models, `aux` and keys of the training of members of one shape, stacked."""
        places = np.asarray(members)
        make_aux = self.aux if makes(self.aux) else None
        fixed = dict(self.shape_of[members[0]])
        models, aux, keys = _fresh((self.init, make_aux), fixed, self.keys, to_device(places))
        return models, aux if make_aux is not None else take(self.aux, places), keys

    def arguments(self, members: Sequence[int]) -> tuple[PyTree, dict[str, Any]]:
        """Return the models of members of one shape, and the arguments of `fit` that determine their training."""
        models, aux, keys = self.start(members)
        own: Any = (self.order, keys) if self.sampler.shared else keys
        hyperparams = take(self.hyperparams, np.asarray(members)) or None
        return models, {"aux": aux, "hyperparams": hyperparams, "key": own, **self.length}

    def fit(
        self,
        members: Sequence[int],
        how: dict[str, Any],
        checkpoint: Path | None,
        callback: Callback,
        *,
        same_program: bool = False,
    ) -> FitResult:
        """Train members of one shape, or read them from a finished checkpoint."""
        models, arguments = self.arguments(members)
        options = {"save": self.save, "callbacks": [callback], "same_program": same_program, **how}
        return fit(models, self.step, self.sampler, **arguments, **options, checkpoint=checkpoint)


@eqx.filter_jit
def _fresh(
    make: tuple[Any, Any], fixed: dict[str, Any], keys: Array, members: Array
) -> tuple[PyTree, PyTree, Array]:
    """Return what both functions (the second may be None) return for members, stacked, and keys of training."""
    of_model, of_training = gathered(keys, members).T

    def stacked(function: Callable[..., Any]) -> PyTree:
        return eqx.filter_vmap(lambda key: function(key, **fixed))(of_model)

    make_model, make_aux = make
    return stacked(make_model), None if make_aux is None else stacked(make_aux), of_training


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
    """Return groups that fit in memory, at least `num_groups`; `keeps` is True if trained models stay in memory."""
    given = (
        None
        if budget is None
        else checks.check_count("memory_budget", budget, minimum=1, maximum=None)
    )
    room, alike = given or machine.free_memory([]), dict[Any, list[int]]()
    for member, shape in enumerate(sweep.shape_of):
        alike.setdefault(shape, []).append(member)
    groups, peak, kept, devices = [], 0, 0, 1
    most = _largest_group(list(map(len, alike.values())), num_groups or 1)
    # A stated budget is compared with what programs take.
    ample = 0 if given else room // (4 * len(alike))
    with closing(open_meter(progress, len(alike), "planning")) as meter:
        for done, members in enumerate(alike.values()):
            meter.advance(done, "compiling")  # most of a short sweep's time
            fixed, each, model, threads = estimated_bytes(sweep, members, ample)
            kept += model * len(members) if keeps else 0
            size = min(len(members), most, (room - fixed - kept) // each)
            if size < 1:
                wanted = (
                    f"be at least {fixed + kept + each} bytes, which one member takes with its data"
                )
                checks.fail("memory_budget", wanted, room)
            size = math.ceil(
                len(members) / math.ceil(len(members) / size)
            )  # groups of equal size share a program
            devices, peak = max(devices, threads), max(peak, fixed + each * size + kept)
            groups += [
                tuple(members[start : start + size]) for start in range(0, len(members), size)
            ]
        meter.advance(len(alike), "")
    return Plan(tuple(groups), peak, room, devices)


def _largest_group(counts: list[int], num_groups: int) -> int:
    """Return the largest number of members in a group with which members of equal shape form enough groups."""
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
    four, (step, sampler, save) = (list(members) * 4)[:4], (sweep.step, sweep.sampler, sweep.save)

    def begin() -> tuple[Any, ...]:
        models, arguments = sweep.arguments(four)
        return prepared(models, step, sampler, **arguments)

    shapes, first, total, (order, *own) = eqx.filter_eval_shape(begin)

    def run_of(size: int) -> Run:
        state, *keys = _zeros((shapes, *own), size)
        keys = _zeros(order, None if sampler.shared else size), *keys
        return _Estimate(
            state, step, sampler, keys, save, Partition(size, **{**sweep.how, "mesh": None}), []
        )

    def compiled_bytes(run: Run) -> int:
        calls: list[Any] = [(run_chunk, run.example())]
        members, observe = run.members, run.program.observe
        if observe is not None:
            inputs = members.partition.how, observe, jnp.asarray(first), members.observe_keys[0]
            calls.append((observe_members, inputs))
        compiled = [
            function.lower(inputs, members.states[0]).compile().compiled
            for function, inputs in calls
        ]
        return max(map(machine.program_bytes, compiled))  # chunk or observation

    run = run_of(2)
    state, program = run.members.states[0], run.program
    state_bytes = _bytes(state) // 2
    # Programs free most results of their operations, and copy some.
    each = sum(2 * result_bytes(traced.code.jaxpr) for traced in program.programs)
    of_program = 0
    if _bytes(sampler) + len(members) * (3 * state_bytes + each) > ample:
        programs = [compiled_bytes(run), compiled_bytes(run_of(4))]
        each = max(0, programs[1] - programs[0]) // 2
        of_program = max(0, programs[0] - 2 * each)
    times = len(record_steps(save, [], first, total, sampler.epoch_steps))
    recorded = (program.info, total - first), (program.observe and program.observe.out, times)
    history = 16 * sum(
        math.prod(leaf.shape) * times for tree, times in recorded for leaf in jax.tree.leaves(tree)
    )
    spread = jax.default_backend() == "cpu" and run.members.partition.member_map != "vmap"
    threads = min(jax.local_device_count(), machine.available_cores()) if spread else 1
    fixed = _bytes(sampler) + _bytes(program.observe) + threads * of_program
    # At most three copies of a state are in memory: given, trained and returned.
    per_member = 3 * state_bytes + each + history
    return fixed, per_member, _bytes(state.arrays) // 2, threads


def result_bytes(jaxpr: Any) -> int:
    """Return the size of the results of all operations of a jaxpr, each counted once in the body of a loop."""
    total = 0
    for equation in jaxpr.eqns:
        total += sum(
            math.prod(result.aval.shape) * result.aval.dtype.itemsize for result in equation.outvars
        )
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, jex.ClosedJaxpr | jex.Jaxpr):
                    total += result_bytes(inner)
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
        shape = leaf.shape if size is None else (size, *leaf.shape[1:])
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return to_device(np.zeros(shape, leaf.dtype))
        implementations: list[Any] = []
        jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), leaf)
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, leaf.dtype))
        return jax.random.wrap_key_data(
            to_device(np.zeros(words.shape, words.dtype)), impl=implementations[0]
        )

    return jax.tree.map(zeros, shapes)


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))
