"""Host's loop of a run: chunks of steps, records, checkpoints."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from dissociation._core import checks
from dissociation._core.conversion import describe, to_device
from dissociation.training import _checkpoint as checkpoints
from dissociation.training import _interrupts as interrupts
from dissociation.training._chunk import (
    MAX_CHUNK,
    drawn,
    largest_batch,
    observe_members,
    run_chunk,
    shapes,
    trace_observation,
    trace_step,
)
from dissociation.training._machine import compiled, run_tasks
from dissociation.training._members import concatenate
from dissociation.training._partition import Partition
from dissociation.training._records import Callback, Record, Save
from dissociation.training._samplers import HostBatches, Sampler, Segment
from dissociation.training._state import Info, State, Step
from dissociation.training._traced import Traced

logger = logging.getLogger(__name__)

CHUNK_SECONDS = 1.0
"""Target time of a chunk, between updates of progress and checks for an interrupt."""
FORMAT = 3
"""Format of a run's header."""
FIRST_WRITE = 5.0
"""Longest time until the first checkpoint, written after a chunk, so that compilation is not lost."""


class Program(NamedTuple):
    """Traced computations of one member.

    Attributes:
        step_of: Function from the size of a batch and a mesh of the data axis to the traced step.
        step: Traced step of the first batch's size, without a mesh.
        observe: Traced observation, or None.
    """

    step_of: Callable[[int | None, Mesh | None], Traced]
    step: Traced
    observe: Traced | None

    @property
    def info(self) -> Info:
        """Return shapes of a step's loss and metrics."""
        return self.step.out[1]

    @property
    def programs(self) -> list[Traced]:
        """Return what runs."""
        return [self.step] if self.observe is None else [self.step, self.observe]


class Batches:
    """Source of batches: the sampler's arrays and the plan of the current block, placed on a partition's devices."""

    def __init__(self, sampler: Sampler, order: Array, step: int):
        self.sampler, self.order = sampler, order
        self.arrays = eqx.filter(sampler, eqx.is_array)
        self.host_blocks: Iterator[Any] = iter(())
        self.host_end = -1
        self.segment = sampler.segment(step)
        self.plan = self.draw(step, self.segment.block)

    def place(self, partition: Partition) -> None:
        """Split arrays of single members into shards, or place those of all members on every device."""
        self.partition = partition
        self.arrays = partition.placed(self.arrays, self.sampler.stacked)
        self.plan = partition.placed(self.plan, not self.sampler.shared)

    def draw(self, step: int, block: int | None) -> Any:
        """Return the plan of a block, or stacked batches of the host from a step on."""
        if not isinstance(self.sampler, HostBatches):
            return drawn(
                self.sampler, self.order, jnp.asarray(block)
            )  # a Python number would be a constant
        with interrupts.waiting():
            if step != self.host_end:
                self.host_blocks = self.sampler.blocks(step)
            self.host_end, batches = next(self.host_blocks, (-1, None))
        if batches is None:
            wanted, advice = (
                f"give a batch for every step, {step} among them",
                "Repeat it with itertools.cycle",
            )
            checks.fail("start", wanted, "an iterator that has ended", advice)
        return batches

    def at(self, step: int) -> Segment:
        """Return the place of a step, whose block's plan is then in `plan`."""
        segment = self.sampler.segment(step)
        if segment.block != self.segment.block or step == self.host_end:
            self.plan = self.partition.placed(
                self.draw(step, segment.block), not self.sampler.shared
            )
        self.segment = segment
        return (
            segment._replace(end=self.host_end)
            if isinstance(self.sampler, HostBatches)
            else segment
        )

    def sources(self, num_shards: int) -> tuple[list[Any], Any]:
        """Return arrays and plan that each shard has of its own, and those of all shards."""
        stacked, of_members = self.sampler.stacked, not self.sampler.shared
        nothing = [None] * num_shards
        per_shard = zip(
            self.arrays if stacked else nothing, self.plan if of_members else nothing, strict=True
        )
        return list(per_shard), (
            None if stacked else self.arrays,
            None if of_members else self.plan,
        )


class Members:
    """States and keys of all members, in shards for devices or worker threads."""

    def __init__(
        self,
        partition: Partition,
        threads: int,
        state: State,
        loss_keys: Array,
        observe_keys: Array,
    ):
        self.partition, self.threads = partition, threads
        shards = partition.split((state, loss_keys, observe_keys))
        self.states, self.loss_keys, self.observe_keys = map(list, zip(*shards, strict=True))

    @property
    def lost(self) -> bool:
        """Return True if a step that failed has consumed the states."""
        arrays = (leaf for leaf in jax.tree.leaves(self.states) if isinstance(leaf, jax.Array))
        return any(leaf.is_deleted() for leaf in arrays)

    def like(self) -> State:
        """Return shapes of the joined states."""
        total = self.partition.total
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((total, *leaf.shape[1:]), leaf.dtype), self.states[0]
        )


class Clock:
    """Wall time of a run and of its last checkpoint, and the length of chunks that follows from it."""

    def __init__(self, began: float):
        self.began = began
        self.saved_at = time.perf_counter()
        self.first_write = FIRST_WRITE
        self.chunk = 1

    def measure(self, count: int, seconds: float) -> None:
        """Adapt the length of chunks to a chunk of `count` steps."""
        if count == self.chunk:  # a shorter chunk does not measure a whole one
            self.chunk = int(
                np.clip(self.chunk * CHUNK_SECONDS / max(seconds, 1e-6), 1, 4 * self.chunk)
            )

    def due(self, seconds: float) -> bool:
        """Return True if the checkpoint should be written."""
        return time.perf_counter() - self.saved_at >= min(seconds, self.first_write)

    def saved(self) -> None:
        self.saved_at = time.perf_counter()
        self.first_write = np.inf


class RunFile(NamedTuple):
    """Checkpoint of a run.

    Attributes:
        path: File.
        identity: Digests of programs and inputs, see `identity_of`.
        same_program: If True, other operations are accepted.
    """

    path: Path
    identity: dict[str, Any]
    same_program: bool

    def header(self) -> dict[str, Any] | None:
        """Return the header, or None without a file; raise unless it is of the same run."""
        if not self.path.exists():
            return None
        header, advice = checkpoints.read_header(self.path), "Delete it or name another file"
        if (written := header.get("format", 0)) != FORMAT:
            checks.fail(
                "checkpoint",
                f"be a file of format {FORMAT}",
                f"{self.path} of format {written}",
                advice,
            )
        traced = {"program", "observe"}
        different = [name for name, value in self.identity.items() if header["run"][name] != value]
        different = [name for name in different if not (self.same_program and name in traced)]
        if different and traced.issuperset(different):
            other = f" (JAX {header['jax']} wrote it, this is {jax.__version__})"
            cause = other if header["jax"] != jax.__version__ else ""
            advice += f"; if it is the same program{cause}, pass same_program=True"
        if different:
            got = f"{self.path}, whose {checks.that_differ(different)}"
            checks.fail("checkpoint", "be a file of the same run", got, advice)
        return header


class Run:
    """Run of all members.

    Attributes:
        step: Number of updates so far.
        members: States, which steps donate, and keys.
        batches: Source of batches.
        program: What is computed.
        record: Losses, metrics and observations.
        clock: Times.
        save: Selection of records.
        callbacks: Callbacks, called on the host.
        file: Checkpoint, or None.
        stopped: True if a callback has ended the run.
        frozen: True for members that a callback has frozen, [members].
    """

    batches_of = Batches

    def __init__(
        self,
        state: State,
        step: Step,
        sampler: Sampler,
        keys: tuple[Array, Array, Array],
        save: Save,
        partition: Partition,
        callbacks: Sequence[Callback],
        began: float = 0.0,
    ):
        order, loss, observe = keys
        self.step = int(np.max(np.asarray(state.step)))
        self.save, self.callbacks, self.file = save, callbacks, None
        self.stopped, self.frozen = False, np.zeros(partition.total, bool)
        self.batches = self.batches_of(sampler, order, self.step)
        self.program = _program_of(self.batches, step, save, state, loss, observe)
        partition, threads = partition.chosen((state, self.batches.arrays), *self.program.programs)
        self.batches.place(partition)
        self.members = Members(partition, threads, state, loss, observe)
        if partition.members_per_batch == "auto":
            fitting = largest_batch(self.example(), self.members.states[0])
            self.members.partition = partition._replace(members_per_batch=fitting)
        self.record = Record(self.step, partition.total, self.program.info)
        self.clock = Clock(began)

    def _inputs(self, segment: Segment, active: Any = None) -> list[Any]:
        """Return the inputs of `run_chunk` for every shard, without the last one: the place of the steps."""
        members = self.members
        count, partition = len(members.states), members.partition
        of_shards, common = self.batches.sources(count)
        shared = partition.how, self.program.step_of(segment.size, partition.data_mesh)
        shards = zip(members.loss_keys, active or [None] * count, of_shards, strict=True)
        return [(*shared, *shard, common) for shard in shards]

    def example(self) -> Any:
        """Return the inputs of `run_chunk` for one step of the first shard."""
        segment = self.batches.at(self.step)
        return *self._inputs(segment)[0], to_device(np.array((self.step, segment.within, 1)))

    def to_the_end(self, total: int, times: np.ndarray) -> None:
        """Alternate chunks and records, until `total` steps are done or a callback ends the run."""
        record = self.record
        past = [(step, record.at(i)) for i, step in enumerate(record.observed_at)]
        listens = any(callback.needs_records for callback in self.callbacks)
        self.stopped = self.stopped and listens and self.step in record.observed_at
        losses = record.infos[0].loss[:, :0]
        try:
            self._tell("begin", self.step, total, past)
            interrupts.check()
            while True:
                if self.step in times and self.step not in record.observed_at:
                    self.observe()
                self._tell("advance", self.step, losses)
                interrupts.check()
                if self.stopped or self.step == total or self.frozen.all():
                    break
                segment = self.batches.at(self.step)
                target = min([total, segment.end, *times[times > self.step][:1].tolist()])
                losses = self.advance(target, segment)
                if self.clock.due(self.save.seconds):
                    self.write()
        except BaseException:
            if not self.members.lost:
                # an iterator, a callback or an interrupt ended the run between two chunks
                self.write()
            raise
        finally:
            self._tell("close")
        self.write()

    def _tell(self, what: str, *words: Any) -> None:
        """Call a method of every callback."""
        for callback in self.callbacks:
            getattr(callback, what)(*words)

    def advance(self, target: int, segment: Segment) -> np.ndarray:
        """Run and record one chunk, at most up to step `target`, and return the losses."""
        members, partition = self.members, self.members.partition
        began, count = time.perf_counter(), min(target - self.step, self.clock.chunk, MAX_CHUNK)
        calls, per_call = (count, 1) if partition.member_map == "unroll" else (1, count)
        places = [
            to_device(np.array((self.step + i, segment.within + i, per_call))) for i in range(calls)
        ]
        active = partition.split(to_device(~self.frozen)) if self.frozen.any() else None
        inputs = self._inputs(segment, active)
        program = compiled(run_chunk, members.threads, (*inputs[0], places[0]), members.states[0])

        def steps(state: State, inputs: Any) -> tuple[State, list[Info]]:
            columns = []
            for where in places:
                state, infos = program((*inputs, where), state)
                columns.append(infos)
            return state, columns

        tasks = [partial(steps, *shard) for shard in zip(members.states, inputs, strict=True)]
        done = run_tasks(tasks, members.threads)
        columns = [concatenate(jax.device_get(columns), axis=1) for _, columns in done]
        infos = jax.tree.map(lambda leaf: leaf[: partition.total, :count], concatenate(columns))
        self.clock.measure(count, time.perf_counter() - began)
        members.states, self.step = [state for state, _ in done], self.step + count
        self.record.add(infos, self.step, self.frozen)
        return infos.loss

    def observe(self) -> None:
        """Record the observation at this step, and call the callbacks."""
        members, observed = self.members, None
        if self.program.observe is not None:
            shared = members.partition.how, self.program.observe, jnp.asarray(self.step)
            example = (*shared, members.observe_keys[0]), members.states[0]
            program = compiled(observe_members, members.threads, *example)

            def observe(keys: Array, state: State) -> Any:
                # On the host before the next, so that a thread decomposes matrices of one member at
                # a time.
                return jax.device_get(program((*shared, keys), state))

            shards = zip(members.observe_keys, members.states, strict=True)
            rows = concatenate(
                run_tasks([partial(observe, *shard) for shard in shards], members.threads)
            )
            observed = jax.tree.map(lambda leaf: leaf[: members.partition.total], rows)
        self.record.observe(self.step, observed)
        self._ask_callbacks(self.record.at(-1))

    def _ask_callbacks(self, records: dict[str, Any]) -> None:
        """Call the callbacks; stop the run or freeze members as they return."""
        interrupted = False
        for callback in self.callbacks:
            try:
                answer = callback.record(self.step, records)
            except KeyboardInterrupt:  # the other callbacks still get the record
                interrupted, answer = True, None
            if answer is None:
                continue
            frozen = np.asarray(answer)
            if frozen.dtype != bool or (frozen.shape != self.frozen.shape and frozen.size != 1):
                wanted = (
                    f"return None, True, or a boolean for each of the {self.frozen.size} members"
                )
                checks.fail("callbacks", wanted, describe(answer))
            self.stopped = self.stopped or bool(frozen.size == 1 and frozen.all())
            if frozen.ndim:
                self.frozen = self.frozen | frozen
        if interrupted:
            raise KeyboardInterrupt

    def write(self) -> None:
        """Write the checkpoint, if there is one."""
        if self.file is None:
            return
        record, members = self.record, self.members
        header = {
            "format": FORMAT,
            "layout": members.partition.stored(),
            "run": self.file.identity,
            "jax": jax.__version__,
            "step": self.step,
            "seconds": time.perf_counter() - self.clock.began,
            "observed_at": record.observed_at,
            "stopped": self.stopped,
            "frozen": self.frozen.tolist(),
            "diverged_at": record.diverged_at.tolist(),
        }
        checkpoints.save(
            self.file.path,
            (members.partition.joined(members.states), *record.history()[:4]),
            header,
        )
        self.clock.saved()

    def resume(self, file: RunFile, total: int, times: np.ndarray) -> None:
        """Keep the run in a checkpoint, and resume from it, if it exists, with its records at `times`."""
        self.file, header = file, file.header()
        if header is None:
            return
        record, members = self.record, self.members
        if header["layout"] != members.partition.stored():
            logger.warning("%s was written under another layout: bits may differ.", file.path)
        step, recorded = header["step"], header["observed_at"]
        if step > total:
            wanted = (
                f"be at least the {step - record.first} of {file.path}, where the run "
                "stands already"
            )
            checks.fail("num_steps", wanted, total - record.first, "Delete it or name another file")
        missed = [int(time) for time in times if time < step and time not in recorded]
        observe = self.program.observe
        if observe is not None and missed:
            wanted = f"hold no step before {step} at which the run in {file.path} was not observed"
            checks.fail("at", wanted, missed[0])
        infos = record.empty(self.program.info, step - record.first)
        observed = (
            record.empty(observe.out, len(recorded)) if observe is not None and recorded else None
        )
        like = (
            members.like(),
            infos.loss,
            np.zeros(len(recorded), np.int64),
            observed,
            infos.metrics,
        )
        state, loss, _, observed, metrics = checkpoints.restore(file.path, like)
        members.states = members.partition.split(state)
        self.step, self.stopped, self.frozen = step, header["stopped"], np.asarray(header["frozen"])
        self.clock.began -= header["seconds"]
        kept = [(time, index) for index, time in enumerate(recorded) if time in times]
        observations = [
            (time, jax.tree.map(lambda leaf, i=i: leaf[:, i], observed)) for time, i in kept
        ]
        record.restore(Info(loss, metrics), observations, np.asarray(header["diverged_at"]))


def _program_of(
    batches: Batches, step: Step, save: Save, state: State, loss: Array, observe: Array
) -> Program:
    """Trace step and observation on the shapes of one member."""
    sampler, one = batches.sampler, shapes(state, 1)
    of_arrays, of_plan = (
        shapes(batches.arrays, int(sampler.stacked)),
        shapes(batches.plan, int(not sampler.shared)),
    )
    example = one, of_arrays, of_plan, jnp.asarray(0), shapes(loss, 1)
    step_of = cache(partial(trace_step, step, sampler, example))
    seen = None
    if save.observe is not None:
        seen = trace_observation(save.observe, one, jnp.asarray(0), shapes(observe, 1))
    return Program(step_of, step_of(batches.segment.size, None), seen)


def identity_of(run: Run, state: State, sampler: Sampler, key: Any) -> dict[str, Any]:
    """Return digests of the programs, with the precision of products, and of the inputs."""
    precision = getattr(jax.config, "jax_default_matmul_precision", None)
    inputs = {
        "models": state.arrays,
        "aux": state.aux,
        "hyperparams": state.hyperparams,
        "key": key,
    }
    fields = {
        name: value for name, value in vars(sampler).items() if isinstance(value, bool | int | str)
    }
    observe, first = run.program.observe, run.record.first
    return {name: checkpoints.fingerprint(part) for name, part in inputs.items()} | {
        "program": [run.program.step.fingerprint(), precision],
        "observe": None if observe is None else [observe.fingerprint(), precision],
        "sampler": [type(sampler).__name__, fields],
        "data": checkpoints.fingerprint(eqx.filter(sampler, eqx.is_array)),
        "begin": [first, checkpoints.fingerprint(state.opt_state) if first else None],
    }
