"""Host's loop of a run: chunks of steps, records, checkpoints."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core import checks
from dissociation._core.conversion import describe, to_device
from dissociation.training import _checkpoint as checkpoints
from dissociation.training import _distributed as distributed
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
from dissociation.training._members import concatenate, stack, take
from dissociation.training._partition import Partition
from dissociation.training._records import Callback, History, Save
from dissociation.training._samplers import HostBatches, Sampler, Segment
from dissociation.training._state import Info, State, Step

logger = logging.getLogger(__name__)

CHUNK_SECONDS = 1.0
"""Target time of a chunk, between updates of progress and checks for an interrupt."""
FORMAT = 3
"""Format of a run's header."""
FIRST_WRITE = 5.0
"""Longest time until the first checkpoint, written after a chunk, so that compilation is not lost."""


class Run:
    """Run of this process' members: the state and the records of all members.

    Processes take chunks of the same length, then all-gather losses, metrics, stops and a hash of the arguments.
    Process 0 calls the callbacks. State, which steps donate, sampler and `keys` (of the data order, losses and
    observations) are of all members.
    """

    def __init__(
        self,
        state: State,
        step: Step,
        sampler: Sampler,
        keys: tuple[Array, Array, Array],
        save: Save,
        partition: Partition,
        callbacks: Sequence[Callback],
    ):
        order, loss, observe = keys
        state, loss, observe = partition.take((state, loss, observe))
        self.sampler = sampler = partition.take(sampler) if sampler.stacked else sampler
        self.order = order if sampler.shared else partition.take(order)
        self.num_members, self.save = partition.total, save
        self.callbacks = [] if partition.process else callbacks
        self.file: Path | None = None
        self.identity: dict[str, Any] = {}
        self.arguments, self.same_program, self.error = "", False, None
        self.first = self.step = int(np.max(np.asarray(state.step)))
        data, segment = eqx.filter(sampler, eqx.is_array), sampler.segment(self.step)
        self.block, self.host_blocks, self.host_end = segment.block, iter(()), -1
        plan, one = self._drawn(segment.block), shapes(state, 1)
        of_data, of_plan = shapes(data, int(sampler.stacked)), shapes(plan, int(not sampler.shared))
        inputs = one, of_data, of_plan, jnp.asarray(0), shapes(loss, 1)
        self.traced = cache(partial(trace_step, step, sampler, inputs))
        self.program, self.observe = self.traced(segment.size, None), None
        self.info = self.program.out[1]
        if save.observe is not None:
            self.observe = trace_observation(save.observe, one, jnp.asarray(0), shapes(observe, 1))
        programs = [each for each in (self.program, self.observe) if each is not None]
        self.partition, self.threads = partition.chosen((state, data), *programs)
        shards = self.partition.split((state, loss, observe))
        self.states, self.loss_keys, self.observe_keys = map(list, zip(*shards, strict=True))
        self.data = self.partition.placed(data, sampler.stacked)
        self.plan = self.partition.placed(plan, not sampler.shared)
        if self.partition.members_per_batch == "auto":
            fitting = largest_batch(self.example(), self.states[0])
            self.partition = self.partition._replace(members_per_batch=fitting)
        self.infos = [self._empty(self.info, 0)]
        self.observed_at: list[int] = []
        self.observations: list[Any] = []
        self.diverged_at = np.full(self.num_members, -1)
        self.frozen = np.zeros(self.num_members, bool)
        self.stopped, self.written_at = False, None
        self.chunk, self.unsaved, self.first_write = 1, 0.0, FIRST_WRITE
        self.began = self.saved_at = time.perf_counter()

    def _empty(self, tree: Any, columns: int) -> Any:
        """Return NumPy zeros [members, columns, ...] for the shapes of one member."""
        return jax.tree.map(lambda leaf: np.zeros((self.num_members, columns, *leaf.shape), leaf.dtype), tree)

    def _drawn(self, block: int) -> Any:
        """Return the plan of a block, or stacked batches of the host from the next step on."""
        if not isinstance(self.sampler, HostBatches):
            return drawn(self.sampler, self.order, jnp.asarray(block))  # a Python number would be a constant
        if self.step != self.host_end:
            self.host_blocks = self.sampler.blocks(self.step)
        self.host_end, batches = next(self.host_blocks, (-1, None))
        if batches is None:
            wanted, advice = f"give a batch for every step, {self.step} among them", "Repeat it with itertools.cycle"
            checks.fail("start", wanted, "an iterator that has ended", advice)
        return batches

    def _segment(self) -> Segment:
        """Return the place of the next step, whose block's plan is then in `self.plan`."""
        segment = self.sampler.segment(self.step)
        if segment.block != self.block or self.step == self.host_end:
            self.plan = self.partition.placed(self._drawn(segment.block), not self.sampler.shared)
            self.block = segment.block
        return segment._replace(end=self.host_end) if isinstance(self.sampler, HostBatches) else segment

    def _inputs(self, segment: Segment, active: Any = None) -> list[Any]:
        """Return the inputs of `run_chunk` for every shard, without the last one: the place of the steps."""
        count, stacked, own = len(self.states), self.sampler.stacked, not self.sampler.shared
        common = None if stacked else self.data, None if own else self.plan
        mapped = zip(self.data if stacked else [None] * count, self.plan if own else [None] * count, strict=True)
        shared = self.partition.how, self.traced(segment.size, self.partition.data_mesh)
        shards = zip(self.loss_keys, active or [None] * count, mapped, strict=True)
        return [(*shared, *shard, common) for shard in shards]

    def example(self) -> Any:
        """Return the inputs of `run_chunk` for one step of the first shard."""
        segment = self._segment()
        return *self._inputs(segment)[0], to_device(np.array((self.step, segment.within, 1)))

    def to_the_end(self, total: int, times: np.ndarray) -> None:
        """Alternate chunks and records, until `total` steps are done or a callback ends the run."""
        past = [(step, self.records(i)) for i, step in enumerate(self.observed_at)]
        listens = any(callback.needs_records for callback in self.callbacks)
        self.stopped = self.stopped and listens and self.step in self.observed_at
        losses = self.infos[0].loss[:, :0]

        try:
            self._call(self._tell, "begin", self.step, total, past)
            self._agreed(None)
            while True:
                if self.step in times and self.step not in self.observed_at:
                    self.record()
                self._call(self._tell, "advance", self.step, losses)
                self.stopped, frozen = self._agreed([self.stopped, self.frozen.tolist()])[0]
                self.frozen = np.asarray(frozen)
                if self.stopped or self.step == total or self.frozen.all():
                    break
                with interrupts.waiting() if self.partition.alone else nullcontext():
                    segment = self._segment()
                target = min([total, segment.end, *times[times > self.step][:1].tolist()])
                losses = self.advance(target, segment)
                if self.unsaved >= min(self.save.seconds, self.first_write):
                    self.write()
        except BaseException as error:
            lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.states) if isinstance(leaf, jax.Array))
            if not lost:
                self.write()  # an iterator, a callback or an interrupt ended the run between two chunks
            if not self.partition.alone:
                with suppress(BaseException):  # the others get the error, after all have written
                    distributed.all_gather(b"", error)
            raise
        finally:
            self._tell("close")
        self.write()

    def _tell(self, what: str, *words: Any) -> None:
        """Call a method of every callback."""
        for callback in self.callbacks:
            getattr(callback, what)(*words)

    def _call(self, function: Callable[..., Any], *words: Any) -> None:
        """Call `function(*words)`; several processes store its error until `_agreed`."""
        try:
            function(*words)
        except BaseException as error:
            if self.partition.alone:
                raise
            self.error = self.error or error

    def _agreed(self, value: Any) -> list[Any]:
        """Return every process' value; raise in all if one has an error, an interrupt or other arguments."""
        self._call(interrupts.check)
        if self.partition.alone:
            return [value]
        said = distributed.all_values([self.arguments, value], self.error)
        if different := [i for i, (arguments, _) in enumerate(said) if arguments != said[0][0]]:
            wanted = "be called with the same models, hyperparameters, key and steps in all processes"
            checks.fail("fit", wanted, f"other arguments in process {different[0]} than in process 0")
        return [own for _, own in said]

    def advance(self, target: int, segment: Segment) -> np.ndarray:
        """Run and record one chunk, at most up to step `target`, and return the losses."""
        began, count = time.perf_counter(), min(target - self.step, self.chunk, MAX_CHUNK)
        calls, per_call = (count, 1) if self.partition.member_map == "unroll" else (1, count)
        places = [to_device(np.array((self.step + i, segment.within + i, per_call))) for i in range(calls)]
        active = self.partition.split(self.partition.take(to_device(~self.frozen))) if self.frozen.any() else None
        inputs = self._inputs(segment, active)
        program = compiled(run_chunk, self.threads, (*inputs[0], places[0]), self.states[0])

        def steps(state: State, inputs: Any) -> tuple[State, list[Info]]:
            columns = []
            for where in places:
                state, infos = program((*inputs, where), state)
                columns.append(infos)
            return state, columns

        done = run_tasks([partial(steps, *each) for each in zip(self.states, inputs, strict=True)], self.threads)
        columns, rows = [concatenate(jax.device_get(columns), axis=1) for _, columns in done], self.partition.number
        infos = jax.tree.map(lambda leaf: leaf[:rows, :count], concatenate(columns))
        seconds, self.unsaved = time.perf_counter() - began, time.perf_counter() - self.saved_at
        if not self.partition.alone:
            times = distributed.all_values([seconds, self.unsaved])
            seconds, self.unsaved = max(one for one, _ in times), times[0][1]
            infos = self.partition.gather(infos)
        self.states, self.step = [state for state, _ in done], self.step + count
        self.infos.append(infos)
        if count == self.chunk:  # a shorter chunk does not measure a whole one
            self.chunk = int(np.clip(self.chunk * CHUNK_SECONDS / max(seconds, 1e-6), 1, 4 * self.chunk))
        self._notice_divergence(infos.loss)
        return infos.loss

    def record(self) -> None:
        """Record the observation at this step, and call the callbacks."""
        observed = None
        if self.observe is not None:
            shared = self.partition.how, self.observe, jnp.asarray(self.step)
            program = compiled(observe_members, self.threads, (*shared, self.observe_keys[0]), self.states[0])

            def observe(keys: Array, state: State) -> Any:
                # On the host before the next, so that a thread decomposes matrices of one member at a time.
                return jax.device_get(program((*shared, keys), state))

            own = zip(self.observe_keys, self.states, strict=True)
            observed = concatenate(run_tasks([partial(observe, *each) for each in own], self.threads))
            observed = self.partition.gather(take(observed, np.arange(self.partition.number)))
        self.observed_at.append(self.step)
        self.observations.append(observed)
        records = self.records(len(self.observed_at) - 1)
        self._call(self._ask_callbacks, records)

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
            if frozen.dtype != bool or (frozen.shape != (self.num_members,) and frozen.size != 1):
                wanted = f"return None, True, or a boolean for each of the {self.num_members} members"
                checks.fail("callbacks", wanted, describe(answer))
            self.stopped = self.stopped or bool(frozen.size == 1 and frozen.all())
            if frozen.ndim:
                self.frozen = self.frozen | frozen
        if interrupted:
            raise KeyboardInterrupt

    def _done(self) -> Info:
        """Return losses and metrics of all steps of this run."""
        self.infos = [concatenate(self.infos, axis=1)]
        return self.infos[0]

    def records(self, index: int) -> dict[str, Any]:
        """Return a record for callbacks: means since the last one, and the observation."""
        at, since = self.observed_at[index], self.observed_at[index - 1] if index else self.first

        def mean(leaf: np.ndarray) -> np.ndarray:
            part = leaf[:, since - self.first : at - self.first]
            kind = np.result_type(leaf.dtype, np.float16)
            return part.mean(axis=1) if at > since else np.full((len(leaf), *leaf.shape[2:]), np.nan, kind)

        return {**jax.tree.map(mean, self._done())._asdict(), "observed": self.observations[index]}

    def history(self) -> History:
        done, recorded = self._done(), self.observe is not None and self.observations
        observed = stack(self.observations, axis=1) if recorded else None
        return History(done.loss, np.asarray(self.observed_at, np.int64), observed, done.metrics, self.first)

    def write(self) -> None:
        """Write the checkpoint, if there is one."""
        if self.file is None:
            return
        header = {
            "format": FORMAT,
            "layout": self.partition.stored(),
            "run": self.identity,
            "jax": jax.__version__,
            "step": self.step,
            "seconds": time.perf_counter() - self.began,
            "observed_at": self.observed_at,
            "stopped": self.stopped,
            "frozen": self.frozen.tolist(),
            "diverged_at": self.diverged_at.tolist(),
        }
        if not self.partition.alone and self.file.exists() and self.written_at != self.step:
            os.replace(self.file, checkpoints.before(self.file))
        checkpoints.save(self.file, (self.partition.joined(self.states), *self.history()[:4]), header)
        self.written_at = self.step
        self.saved_at, self.first_write = time.perf_counter(), np.inf

    def resume(self, path: Path, total: int, times: np.ndarray) -> None:
        """Resume from the checkpoint, if there is one, with its records at `times`."""
        self.file, found = path, {}
        self._call(lambda: found.update(checkpoints.files_by_step(path, self.check)))
        steps = self._agreed([*found])
        common = set.intersection(*map(set, steps))
        if not common:
            if any(steps):
                logger.warning("The processes have no step of %s in common: they start from scratch.", path)
            return
        newest = found[max(common)]
        header = checkpoints.read_header(newest)
        if header["layout"] != self.partition.stored():
            logger.warning("%s was written under another layout: bits may differ.", path)
        if newest != path:  # another process was killed before it wrote the newer one
            os.replace(newest, path)
        self.step, recorded = header["step"], header["observed_at"]
        if self.step > total:
            wanted = f"be at least the {self.step - self.first} of {path}, where the run stands already"
            checks.fail("num_steps", wanted, total - self.first, "Delete it or name another file")
        missed, observed = [int(time) for time in times if time < self.step and time not in recorded], None
        if self.observe is not None and missed:
            checks.fail("at", f"hold no step before {self.step} at which the run in {path} was not observed", missed[0])
        if self.observe is not None and recorded:
            observed = self._empty(self.observe.out, len(recorded))
        infos = self._empty(self.info, self.step - self.first)
        like = infos.loss, np.zeros(len(recorded), np.int64), observed, infos.metrics
        rows = self.partition.number
        own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), self.states[0])
        state, loss, _, observed, metrics = checkpoints.restore(path, (own, *like))
        self.states, self.written_at = self.partition.split(state), self.step
        self.infos, self.began = [Info(loss, metrics)], self.began - header["seconds"]
        self.stopped, self.frozen = header["stopped"], np.asarray(header["frozen"])
        self.diverged_at = np.asarray(header["diverged_at"])
        kept = [index for index, time in enumerate(recorded) if time in times]
        self.observed_at = [recorded[index] for index in kept]
        self.observations = [jax.tree.map(lambda leaf, i=i: leaf[:, i], observed) for i in kept]

    def identify(self, state: State, sampler: Sampler, key: Any, same_program: bool) -> None:
        """Set the identity: digests of the programs, with the precision of products, and of the inputs."""
        self.same_program, precision = same_program, getattr(jax.config, "jax_default_matmul_precision", None)
        given = {"models": state.arrays, "aux": state.aux, "hyperparams": state.hyperparams, "key": key}
        fields = {name: value for name, value in vars(sampler).items() if isinstance(value, bool | int | str)}
        self.identity = {name: checkpoints.fingerprint(part) for name, part in given.items()} | {
            "program": [self.program.fingerprint(), precision],
            "observe": None if self.observe is None else [self.observe.fingerprint(), precision],
            "sampler": [type(sampler).__name__, fields],
            "data": checkpoints.fingerprint(eqx.filter(sampler, eqx.is_array)),
            "begin": [self.first, checkpoints.fingerprint(state.opt_state) if self.first else None],
        }

    def check(self, path: Path, header: dict[str, Any]) -> None:
        """Raise unless a file with this header is of the same run."""
        advice = "Delete it or name another file"
        if (written := header.get("format", 0)) != FORMAT:
            checks.fail("checkpoint", f"be a file of format {FORMAT}", f"{path} of format {written}", advice)
        traced = {"program", "observe"}
        different = [name for name, value in self.identity.items() if header["run"][name] != value]
        different = [name for name in different if not (self.same_program and name in traced)]
        if not different:
            return
        if traced.issuperset(different):
            other = f" (JAX {header['jax']} wrote it, this is {jax.__version__})"
            cause = other if header["jax"] != jax.__version__ else ""
            advice += f"; if it is the same program{cause}, pass same_program=True"
        checks.fail("checkpoint", "be a file of the same run", f"{path}, whose {checks.that_differ(different)}", advice)

    def _notice_divergence(self, losses: np.ndarray) -> None:
        bad = ~np.isfinite(losses)
        for member in np.flatnonzero(bad.any(axis=1) & (self.diverged_at < 0) & ~self.frozen):
            column = int(bad[member].argmax())
            self.diverged_at[member] = self.step - losses.shape[1] + column
            became = f"the loss became {losses[member, column]} at step {self.diverged_at[member]}"
            if not self.partition.process:
                checks.warn(f"member {member}: {became}; the other members go on.")
