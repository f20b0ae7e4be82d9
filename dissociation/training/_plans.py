"""Members of a sweep, and the groups in which they fit in memory."""

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
from dissociation.training import _machine as machine
from dissociation.training._chunk import observe_members, run_chunk
from dissociation.training._fitting import prepared
from dissociation.training._members import take
from dissociation.training._partition import Partition
from dissociation.training._progress import MeterFactory, open_meter
from dissociation.training._records import Save, record_steps
from dissociation.training._run import Run
from dissociation.training._samplers import Sampler
from dissociation.training._state import Step
from dissociation.training._sweeps import Grid


class Sweep(NamedTuple):
    """Arguments of all groups of `fit_grid`."""

    init: Callable[..., Any]
    step: Step
    sampler: Sampler
    grid: Grid
    keys: Array
    order: Array
    shapes: tuple[str, ...]  # quantities that set a model's shape
    shape_of: list[tuple[Any, ...]]  # values of them, by member
    hyperparams: dict[str, Array]  # all other quantities but the seed, [members] each
    aux: Any
    length: dict[str, int | None]  # number of steps or epochs
    save: Save
    how: dict[str, Any]  # mesh and mapping of the members

    def _fresh(self, make: Callable[..., Any], members: Sequence[int]) -> PyTree:
        """Return what `make`, called as `init` is, returns for members of one shape, stacked."""
        fixed = dict(zip(self.shapes, self.shape_of[members[0]], strict=True))
        return _fresh(make, fixed, self.keys[jnp.asarray(members), 0])

    def start(self, members: Sequence[int]) -> tuple[PyTree, PyTree]:
        """Return initial models and `aux` of members of one shape, stacked."""
        aux = self._fresh(self.aux, members) if makes(self.aux) else take(self.aux, np.asarray(members))
        return self._fresh(self.init, members), aux

    def arguments(self, members: Sequence[int]) -> tuple[PyTree, dict[str, Any]]:
        """Return the models of members of one shape, and the arguments of `fit` that determine their training."""
        where, (models, aux) = jnp.asarray(members), self.start(members)
        keys = self.keys[where, 1]
        own: Any = (self.order, keys) if self.sampler.shared else keys
        return models, {"aux": aux, "hyperparams": take(self.hyperparams, where) or None, "key": own, **self.length}


@eqx.filter_jit
def _fresh(make: Callable[..., Any], fixed: dict[str, Any], keys: Array) -> PyTree:
    return eqx.filter_vmap(lambda key: make(key, **fixed))(keys)


def makes(aux: Any) -> bool:
    """Return True if `aux` is a function of one member, not arrays of all members."""
    return callable(aux) and not jax.tree.leaves(eqx.filter(aux, eqx.is_array))


class Plan(NamedTuple):
    """Groups of members that are trained at once, by index in the grid."""

    groups: tuple[tuple[int, ...], ...]
    peak_bytes: int  # estimate for the largest group, without the memory of the compiler
    budget: int
    devices: int  # of this process, which train members

    def __str__(self) -> str:
        members, most = sum(map(len, self.groups)), max(map(len, self.groups))
        size = f"{self.peak_bytes / 2**20:.0f} MiB of {self.budget / 2**20:.0f}"
        return f"{members} members, {most} at once on {self.devices} device(s), at most {size}"


def planned(sweep: Sweep, budget: int | None, *, keeps: bool, progress: str | MeterFactory | None) -> Plan:
    """Return groups that fit in memory; `keeps` is True if trained models stay in memory."""
    given = None if budget is None else checks.check_count("memory_budget", budget, minimum=1, maximum=None)
    room, alike = given or machine.free_memory([]), dict[Any, list[int]]()
    for member, shape in enumerate(sweep.shape_of):
        alike.setdefault(shape, []).append(member)
    groups, peak, kept, devices = [], 0, 0, 1
    with closing(open_meter(progress, len(alike), "planning")) as meter:
        for done, members in enumerate(alike.values()):
            meter.advance(done, "compiling")  # most of a short sweep's time
            fixed, each, model, threads = estimated_bytes(sweep, members)
            kept += model * len(members) if keeps else 0
            size = min(len(members), (room - fixed - kept) // each)
            if size < 1:
                wanted = f"be at least {fixed + kept + each} bytes, which one member takes with its data"
                checks.fail("memory_budget", wanted, room)
            size = math.ceil(len(members) / math.ceil(len(members) / size))  # groups of equal size share a program
            devices, peak = max(devices, threads), max(peak, fixed + each * size + kept)
            groups += [tuple(members[start : start + size]) for start in range(0, len(members), size)]
        meter.advance(len(alike), "")
    return Plan(tuple(groups), peak, room, devices)


def estimated_bytes(sweep: Sweep, members: Sequence[int]) -> tuple[int, int, int, int]:
    """Estimate the memory of members of one shape, from programs of 2 and 4 of them on one device.

    Returns:
        Bytes of data and programs for any number of members, bytes per member, bytes of a trained model, and the number
        of devices or worker threads of this process. The compiler's memory is left out.
    """
    four, (step, sampler, save) = (list(members) * 4)[:4], (sweep.step, sweep.sampler, sweep.save)
    models, given = sweep.arguments(four)
    state, first, total, (order, *own) = prepared(models, step, sampler, **given)
    programs: list[int] = []
    for size in (2, 4):
        few, *keys = take((state, *own), slice(size))
        keys = order if sampler.shared else order[:size], *keys
        run = Run(few, step, sampler, keys, save, Partition(size, **{**sweep.how, "mesh": None}), [])
        calls: list[Any] = [(run_chunk, run.example())]
        if run.observe is not None:
            calls.append((observe_members, (run.partition.how, run.observe, jnp.asarray(first), run.observe_keys[0])))
        compiled = [function.lower(inputs, run.states[0]).compile().compiled for function, inputs in calls]
        programs.append(max(map(machine.program_bytes, compiled)))  # chunk or observation
    each = max(0, programs[1] - programs[0]) // 2
    times = len(record_steps(save, [], first, total, sampler.epoch_steps))
    recorded = (run.info, total - first), (run.observe and run.observe.out, times)
    history = 16 * sum(math.prod(leaf.shape) * times for tree, times in recorded for leaf in jax.tree.leaves(tree))
    spread = jax.default_backend() == "cpu" and run.partition.member_map != "vmap"
    threads = min(jax.local_device_count(), machine.available_cores()) if spread else 1
    fixed = _bytes(sampler) + _bytes(run.observe) + threads * max(0, programs[0] - 2 * each)
    # At most three copies of a state are in memory: given, trained and returned.
    per_member = 3 * _bytes(state) // len(four) + each + history
    return fixed, per_member, _bytes(state.arrays) // len(four), threads


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf) or isinstance(leaf, np.ndarray))
