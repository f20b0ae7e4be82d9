"""Host's loop of a run: chunks of steps, records, checkpoints.

A cycle of `Run.to_the_end` observes and records if the step is listed, calls the callbacks'
`advance`, and ends the run if it is interrupted, stopped or complete. Else it takes the batches of
the block, runs one chunk up to the block's end or the next record, and writes the checkpoint if it
is due.
"""

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
from dissociation.training import _checkpoint_file as checkpoints
from dissociation.training import _interrupts as interrupts
from dissociation.training._chunk import (
    MAX_CHUNK,
    ChunkInputs,
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
CHECKPOINT_FORMAT = 3
"""Format of a run's header."""
FIRST_WRITE = 5.0
"""Longest time until the first checkpoint, after a chunk, so that compilation is not lost."""


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
        """Return the traced step, and the traced observation if there is one."""
        if self.observe is None:
            return [self.step]
        return [self.step, self.observe]


class Batches:
    """Source of batches: the sampler's arrays and the plan of the current block, on devices."""

    def __init__(self, sampler: Sampler, order: Array, step: int):
        self.sampler = sampler
        self.order = order
        self.arrays = eqx.filter(sampler, eqx.is_array)
        self.host_blocks: Iterator[Any] = iter(())
        self.host_end = -1
        self.segment = sampler.segment(step)
        self.plan = self.draw(step, self.segment.block)

    def place(self, partition: Partition) -> None:
        """Split arrays of single members into shards; place arrays of all members everywhere."""
        self.partition = partition
        self.arrays = partition.placed(self.arrays, self.sampler.stacked)
        self.plan = partition.placed(self.plan, not self.sampler.shared)

    def draw(self, step: int, block: int | None) -> Any:
        """Return the plan of a block, or stacked batches of the host from a step on."""
        if not isinstance(self.sampler, HostBatches):
            number = jnp.asarray(block)  # a Python number would be a constant
            return drawn(self.sampler, self.order, number)
        with interrupts.waiting():
            if step != self.host_end:
                self.host_blocks = self.sampler.blocks(step)
            self.host_end, batches = next(self.host_blocks, (-1, None))
        if batches is None:
            checks.fail(
                "start",
                f"give a batch for every step, {step} among them",
                "an iterator that has ended",
                "Repeat it with itertools.cycle",
            )
        return batches

    def at(self, step: int) -> Segment:
        """Return the place of a step, whose block's plan is then in `plan`."""
        segment = self.sampler.segment(step)
        if segment.block != self.segment.block or step == self.host_end:
            plan = self.draw(step, segment.block)
            self.plan = self.partition.placed(plan, not self.sampler.shared)
        self.segment = segment
        if isinstance(self.sampler, HostBatches):
            return segment._replace(end=self.host_end)
        return segment

    def sources(self, num_shards: int) -> tuple[list[Any], Any]:
        """Return arrays and plan of every shard's members, and those of all members."""
        shard_arrays, common_arrays = _by_shard(self.arrays, self.sampler.stacked, num_shards)
        shard_plans, common_plan = _by_shard(self.plan, not self.sampler.shared, num_shards)
        shard_sources = list(zip(shard_arrays, shard_plans, strict=True))
        return shard_sources, (common_arrays, common_plan)


def _by_shard(placed: Any, is_split: bool, num_shards: int) -> tuple[list[Any], Any]:
    """Return a tree for every shard, or Nones, and a tree for all shards, or None."""
    if is_split:
        return placed, None
    return [None] * num_shards, placed


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
        self.partition = partition
        self.threads = threads
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
    """Wall time of a run and of its last checkpoint, and the length of chunks."""

    def __init__(self, began: float):
        self.began = began
        self.saved_at = time.perf_counter()
        self.first_write = FIRST_WRITE
        self.chunk = 1

    def measure(self, count: int, seconds: float) -> None:
        """Adapt the length of chunks to a chunk of `count` steps."""
        if count == self.chunk:  # a shorter chunk does not measure a full one
            scaled = self.chunk * CHUNK_SECONDS / max(seconds, 1e-6)
            self.chunk = int(np.clip(scaled, 1, 4 * self.chunk))

    def due(self, seconds: float) -> bool:
        """Return True if the checkpoint should be written."""
        return time.perf_counter() - self.saved_at >= min(seconds, self.first_write)

    def saved(self) -> None:
        self.saved_at = time.perf_counter()
        self.first_write = np.inf


class Contents(NamedTuple):
    """Arrays of a run's checkpoint; `Run.write` sets the header: format, step, records' steps.

    The file holds them as a plain tuple, whose leaves are named by their positions.

    Attributes:
        states: States of all members.
        loss: Loss of every step, [members, steps].
        observed_at: Steps of the observations, [times].
        observed: Observations, every leaf [members, times, ...]; or None.
        metrics: Metrics of every step, every leaf [members, steps, ...]; or None.
    """

    states: State
    loss: Any
    observed_at: Any
    observed: Any
    metrics: Any


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
        header = checkpoints.read_header(self.path)
        advice = "Delete it or name another file"
        written = header.get("format", 0)
        if written != CHECKPOINT_FORMAT:
            checks.fail(
                "checkpoint",
                f"be a file of format {CHECKPOINT_FORMAT}",
                f"{self.path} of format {written}",
                advice,
            )

        different = [
            name for name, digest in self.identity.items() if header["run"][name] != digest
        ]
        traced = {"program", "observe"}
        if self.same_program:
            different = [name for name in different if name not in traced]
        if not different:
            return header

        if traced.issuperset(different):
            cause = ""
            if header["jax"] != jax.__version__:
                cause = f" (JAX {header['jax']} wrote it, this is {jax.__version__})"
            advice += f"; if it is the same program{cause}, pass same_program=True"
        return checks.fail(
            "checkpoint",
            "be a file of the same run",
            f"{self.path}, whose {checks.that_differ(different)}",
            advice,
        )


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

    # Source of batches; the memory estimate of `_plan.py` replaces it by batches of zeros.
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
        self.save = save
        self.callbacks = callbacks
        self.file = None
        self.stopped = False
        self.frozen = np.zeros(partition.total, bool)

        self.batches = self.batches_of(sampler, order, self.step)
        # Step and observation are traced on the shapes of one member.
        member_state = shapes(state, 1)
        sampler_arrays = shapes(self.batches.arrays, int(sampler.stacked))
        plan = shapes(self.batches.plan, int(not sampler.shared))
        number = jnp.asarray(0)
        example = (member_state, sampler_arrays, plan, number, shapes(loss, 1))
        step_of = cache(partial(trace_step, step, sampler, example))
        first_step = step_of(self.batches.segment.size, None)
        observation = None
        if save.observe is not None:
            member_key = shapes(observe, 1)
            observation = trace_observation(save.observe, member_state, number, member_key)
        self.program = Program(step_of, first_step, observation)

        arrays = (state, self.batches.arrays)
        partition, threads = partition.chosen(arrays, *self.program.programs)
        self.batches.place(partition)
        self.members = Members(partition, threads, state, loss, observe)
        if partition.members_per_batch == "auto":
            fitting = largest_batch(self.example(), self.members.states[0])
            self.members.partition = partition._replace(members_per_batch=fitting)
        self.record = Record(self.step, partition.total, self.program.info)
        self.clock = Clock(began)

    def _inputs(self, segment: Segment, active: Any = None) -> list[ChunkInputs]:
        """Return the inputs of `run_chunk` for every shard, without `span`."""
        members = self.members
        num_shards = len(members.states)
        if active is None:
            active = [None] * num_shards
        how = members.partition.how
        step = self.program.step_of(segment.size, members.partition.data_mesh)
        shard_sources, common_source = self.batches.sources(num_shards)
        shards = zip(members.loss_keys, active, shard_sources, strict=True)
        return [ChunkInputs(how, step, *shard, common_source) for shard in shards]

    def example(self) -> ChunkInputs:
        """Return the inputs of `run_chunk` for one step of the first shard."""
        segment = self.batches.at(self.step)
        inputs = self._inputs(segment)
        return inputs[0]._replace(span=to_device(np.array((self.step, segment.within, 1))))

    def to_the_end(self, total: int, times: np.ndarray) -> None:
        """Alternate chunks and records, until `total` steps are done or a callback ends the run."""
        record = self.record
        past = [(step, record.at(i)) for i, step in enumerate(record.observed_at)]
        needs_records = any(callback.needs_records for callback in self.callbacks)
        self.stopped = self.stopped and needs_records and self.step in record.observed_at
        losses = record.infos[0].loss[:, :0]  # [members, 0] before the first chunk
        try:
            self._call_hooks("begin", self.step, total, past)
            interrupts.check()
            while True:
                if self.step in times and self.step not in record.observed_at:
                    self.observe()
                self._call_hooks("advance", self.step, losses)
                interrupts.check()
                if self.stopped or self.step == total or self.frozen.all():
                    break

                segment = self.batches.at(self.step)
                next_times = times[times > self.step]
                target = min([total, segment.end, *next_times[:1].tolist()])
                losses = self.advance(target, segment)
                if self.clock.due(self.save.seconds):
                    self.write()
        except BaseException:
            if not self.members.lost:
                # an iterator, a callback or an interrupt ended the run between two chunks
                self.write()
            raise
        finally:
            self._call_hooks("close")
        self.write()

    def _call_hooks(self, hook: str, *arguments: Any) -> None:
        """Call a method of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(*arguments)

    def advance(self, target: int, segment: Segment) -> np.ndarray:
        """Run and record one chunk, at most up to step `target`, and return the losses."""
        members = self.members
        partition = members.partition
        began = time.perf_counter()
        count = min(target - self.step, self.clock.chunk, MAX_CHUNK)
        num_calls = 1
        if partition.member_map == "unroll":
            num_calls = count
        spans = []
        for i in range(num_calls):
            span = np.array((self.step + i, segment.within + i, count // num_calls))
            spans.append(to_device(span))

        active = None
        if self.frozen.any():
            active = partition.split(to_device(~self.frozen))
        inputs = self._inputs(segment, active)
        example = inputs[0]._replace(span=spans[0])
        program = compiled(run_chunk, members.threads, example, members.states[0])

        def steps(state: State, inputs: ChunkInputs) -> tuple[State, list[Info]]:
            columns = []
            for span in spans:
                state, infos = program(inputs._replace(span=span), state)
                columns.append(infos)
            return state, columns

        shards = zip(members.states, inputs, strict=True)
        tasks = [partial(steps, *shard) for shard in shards]
        states = []
        rows = []
        for state, columns in run_tasks(tasks, members.threads):
            states.append(state)
            rows.append(concatenate(jax.device_get(columns), axis=1))
        infos = jax.tree.map(lambda leaf: leaf[: partition.total, :count], concatenate(rows))

        self.clock.measure(count, time.perf_counter() - began)
        members.states = states
        self.step += count
        self.record.add(infos, self.step, self.frozen)
        return infos.loss

    def observe(self) -> None:
        """Record the observation at this step, and call the callbacks."""
        observed = None
        if self.program.observe is not None:
            observed = self._observed(self.program.observe)
        self.record.observe(self.step, observed)
        self._call_record_hooks(self.record.at(-1))

    def _observed(self, observation: Traced) -> Any:
        """Return the observations of all members at this step, on the host."""
        members = self.members
        total = members.partition.total
        shared = (members.partition.how, observation, jnp.asarray(self.step))
        example = (*shared, members.observe_keys[0])
        program = compiled(observe_members, members.threads, example, members.states[0])

        def observe(keys: Array, state: State) -> Any:
            # On the host before the next, so that a thread decomposes matrices of one member at
            # a time.
            return jax.device_get(program((*shared, keys), state))

        shards = zip(members.observe_keys, members.states, strict=True)
        tasks = [partial(observe, *shard) for shard in shards]
        rows = concatenate(run_tasks(tasks, members.threads))
        return jax.tree.map(lambda leaf: leaf[:total], rows)

    def _call_record_hooks(self, records: dict[str, Any]) -> None:
        """Call `record` of every callback; stop the run or freeze members as the hooks return."""
        interrupted = False
        for callback in self.callbacks:
            answer = None
            try:
                answer = callback.record(self.step, records)
            except KeyboardInterrupt:  # the other callbacks still get the record
                interrupted = True
            if answer is None:
                continue

            frozen = np.asarray(answer)
            if frozen.dtype != bool or (frozen.shape != self.frozen.shape and frozen.size != 1):
                requirement = (
                    f"return None, True, or a boolean for each of the {self.frozen.size} members"
                )
                checks.fail("callbacks", requirement, describe(answer))
            self.stopped = self.stopped or bool(frozen.size == 1 and frozen.all())
            if frozen.ndim:
                self.frozen = self.frozen | frozen
        if interrupted:
            raise KeyboardInterrupt

    def write(self) -> None:
        """Write the checkpoint, if there is one."""
        if self.file is None:
            return
        record = self.record
        members = self.members
        header = {
            "format": CHECKPOINT_FORMAT,
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
        states = members.partition.joined(members.states)
        loss, observed_at, observed, metrics, _ = record.history()
        contents = Contents(states, loss, observed_at, observed, metrics)
        checkpoints.save(self.file.path, tuple(contents), header)
        self.clock.saved()

    def resume(self, file: RunFile, total: int, times: np.ndarray) -> None:
        """Keep the run in a file; if the file exists, resume with its records at `times`."""
        header = file.header()
        self.file = file
        if header is None:
            return
        record = self.record
        members = self.members
        if header["layout"] != members.partition.stored():
            logger.warning("%s was written under another layout: bits may differ.", file.path)
        step = header["step"]
        observed_at = header["observed_at"]
        if step > total:
            requirement = (
                f"be at least the {step - record.first} of {file.path}, where the run "
                "stands already"
            )
            checks.fail(
                "num_steps", requirement, total - record.first, "Delete it or name another file"
            )
        observe = self.program.observe
        missed = [int(time) for time in times if time < step and time not in observed_at]
        if observe is not None and missed:
            requirement = (
                f"hold no step before {step} at which the run in {file.path} was not observed"
            )
            checks.fail("at", requirement, missed[0])

        infos = record.empty(self.program.info, step - record.first)
        observed = None
        if observe is not None and observed_at:
            observed = record.empty(observe.out, len(observed_at))
        like = Contents(
            states=members.like(),
            loss=infos.loss,
            observed_at=np.zeros(len(observed_at), np.int64),
            observed=observed,
            metrics=infos.metrics,
        )
        contents = Contents(*checkpoints.restore(file.path, tuple(like)))

        members.states = members.partition.split(contents.states)
        self.step = step
        self.stopped = header["stopped"]
        self.frozen = np.asarray(header["frozen"])
        self.clock.began -= header["seconds"]
        observations = []
        for index, observed_step in enumerate(observed_at):
            if observed_step in times:
                observation = jax.tree.map(lambda leaf, i=index: leaf[:, i], contents.observed)
                observations.append((observed_step, observation))
        infos = Info(contents.loss, contents.metrics)
        record.restore(infos, observations, np.asarray(header["diverged_at"]))


def identity_of(run: Run, state: State, sampler: Sampler, key: Any) -> dict[str, Any]:
    """Return digests of the programs, with the precision of products, and of the inputs."""
    precision = getattr(jax.config, "jax_default_matmul_precision", None)
    observe = run.program.observe
    first = run.record.first
    fields = vars(sampler).items()
    settings = {name: field for name, field in fields if isinstance(field, bool | int | str)}
    return {
        "models": checkpoints.fingerprint(state.arrays),
        "aux": checkpoints.fingerprint(state.aux),
        "hyperparams": checkpoints.fingerprint(state.hyperparams),
        "key": checkpoints.fingerprint(key),
        "program": [run.program.step.fingerprint(), precision],
        "observe": None if observe is None else [observe.fingerprint(), precision],
        "sampler": [type(sampler).__name__, settings],
        "data": checkpoints.fingerprint(eqx.filter(sampler, eqx.is_array)),
        "begin": [first, checkpoints.fingerprint(state.opt_state) if first else None],
    }
