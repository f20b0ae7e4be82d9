"""The host's side of a run: chunks of steps, records, checkpoints."""

import glob
import logging
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from dissociation import checkpoint as checkpoints
from dissociation import checks, distributed, sharding
from dissociation.conversion import describe
from dissociation.files import RefusedFile
from dissociation.members import concatenate, stack, take
from dissociation.memory import program_bytes
from dissociation.shares import Share
from dissociation.threads import Shards, compiled, run_tasks
from dissociation.traced import Traced
from dissociation.training.batches import Batches, example, placed_shards
from dissociation.training.callbacks import Callback, Progress
from dissociation.training.chunk import (
    MAX_CHUNK,
    Layout,
    Source,
    chosen_layout,
    largest_batch,
    observe_members,
    run_chunk,
    stored_layout,
    trace_observation,
    trace_step,
)
from dissociation.training.loop import Streams
from dissociation.training.records import History, Save
from dissociation.training.samplers import Segment
from dissociation.training.state import Info, State, Step

logger = logging.getLogger(__name__)

CHUNK_SECONDS = 1.0
"""How long a chunk should take: how often progress is shown and an interrupt is heard."""
FORMAT = 1
"""Format of a run's header; files from before the layout was stored have none, and are resumed."""
FIRST_WRITE = 5.0
"""The longest time until the first write of a checkpoint, which is after a chunk: compiling is not lost."""


class Run:
    """One run: where it stands, and what was recorded.

    Where members are shared out to several processes, each has the states of its own and the records of all: they take
    chunks of the same length, and exchange what comes of them.

    Args:
        state: Stacked, this process' members; donated to the steps.
        step: One optimiser step.
        batches: What they see.
        keys: Their keys.
        save: What to record.
        layout: Where they lie.
        callbacks: What happens on the way, in the first process.
        share: Which of all members they are.
    """

    def __init__(
        self,
        state: State,
        step: Step,
        batches: Batches,
        keys: Streams,
        save: Save,
        layout: Layout,
        callbacks: Sequence[Callback],
        share: Share,
    ):
        if not save.seconds >= 0:
            checks.fail("save", "have `seconds` of at least 0", save.seconds)
        if save.observe is not None and not callable(save.observe):
            checks.fail_kind("save", "have a function as `observe`", repr(save.observe))
        self.share, self.num_members, own = share, share.bounds[-1], len(keys.loss)
        self.first = self.step = int(np.max(np.asarray(state.step)))
        self.save, self.callbacks, self.batches = save, callbacks, batches
        one, sampler = example(state), batches.sampler
        arrays, plan = batches.one_arrays(), batches.one_plan(self.step)
        size = sampler.segment(self.step).size
        inputs = one, arrays, plan, jnp.asarray(0), keys.loss[0]
        draft = trace_step(step, sampler, size, None, *inputs)
        self.observe, programs, self.info = None, [draft], draft.out[1]
        if save.observe is not None:
            self.observe = trace_observation(save.observe, one, jnp.asarray(0), keys.observe[0])
            programs.append(self.observe)
        self.layout, self.threads = chosen_layout(layout, own, (state, batches.arrays), *programs)
        mesh, devices = self.layout.mesh, self.layout.devices
        if self.layout.member_map == "unroll":  # one member of every device is a shard, so that one program serves all
            self.shards = Shards(own, devices)
        else:
            self.shards = Shards(own, devices * -(-own // (devices * self.layout.threads)))
        kept = {size: draft} if mesh is None or sharding.DATA_AXIS not in mesh.axis_names else {}

        def traced(size: int | None) -> Traced:
            if size not in kept:
                kept[size] = trace_step(step, sampler, size, mesh, *inputs)
            return kept[size]

        self.traced = traced
        # Copies, as steps take their state's memory; and of no weak type, as steps return: one program serves all.
        copied = partial(jnp.array, copy=self.shards.number == 1)  # several shards are copies
        self.states = [jax.tree.map(lambda leaf: copied(leaf, leaf.dtype), part) for part in self._split(state)]
        self.keys = self._split(keys)
        batches.lay(mesh, self.shards)
        if self.layout.members_per_batch == "auto":
            common, (mapped,), place = batches.source(self.step)
            span = jnp.asarray([self.step, 0, 1])
            first = self.layout, traced(place.size), self.keys[0].loss, None, mapped, common, span
            self.layout = self.layout._replace(members_per_batch=largest_batch(first, self.states[0]))
        self.infos = [jax.tree.map(lambda leaf: np.zeros((self.num_members, 0, *leaf.shape), leaf.dtype), self.info)]
        self.observed_at: list[int] = []
        self.observations: list[Any] = []
        self.diverged_at = np.full(self.num_members, -1)
        self.frozen = np.zeros(self.num_members, bool)
        self.stopped = False
        self.chunk, self.saved_at, self.unsaved, self.first_write = 1, time.perf_counter(), 0.0, FIRST_WRITE
        self.began, self.earlier_seconds = time.perf_counter(), 0.0

    def _split(self, tree: Any) -> list[Any]:
        return placed_shards(tree, self.shards, self.layout.mesh)

    def whole_state(self) -> State:
        """The state of all members of this process."""
        return self.shards.joined(self.states)

    def seconds(self) -> float:
        """Wall time so far, earlier parts included."""
        return self.earlier_seconds + time.perf_counter() - self.began

    def to_the_end(self, total: int, times: np.ndarray, checkpoint: "Checkpoint | None") -> None:
        """Alternates between chunks of steps and records, until `total` steps are done or a callback ends the run."""
        past = [(step, self.records(i)) for i, step in enumerate(self.observed_at)]
        listens = any(records_something(callback) for callback in self.callbacks)
        self.stopped = self.stopped and listens and self.step in self.observed_at
        losses = self.infos[0].loss[:, :0]

        def tell(what: str, *words: Any) -> None:
            for callback in self.callbacks:
                getattr(callback, what)(*words)

        with nullcontext() if self.share.alone else distributed.interrupts_together():
            try:
                self.share.on_main(lambda: tell("begin", self.step, total, past))
                while True:
                    if self.step in times and self.step not in self.observed_at:
                        self.record()
                    self.share.on_main(lambda losses=losses: tell("advance", self.step, losses))
                    if self.stopped or self.step == total or self.frozen.all():
                        break
                    later = times[times > self.step]
                    source = self.batches.source(self.step)  # may wait for the host: an interrupt is heard
                    with _interrupts_later():
                        losses = self.advance(min([total, *later[:1].tolist()]), source)
                    if checkpoint is not None and self.unsaved >= min(self.save.seconds, self.first_write):
                        self.write(checkpoint)
            except BaseException as error:
                lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.states) if isinstance(leaf, jax.Array))
                if not lost and (self.share.alone or distributed.is_everywhere(error)):
                    self.write(checkpoint)  # an iterator, a callback or an interrupt ended the run between two chunks
                raise
            finally:
                if self.share.alone or distributed.is_main():
                    tell("close")
            self.write(checkpoint)

    def advance(self, target: int, source: tuple[Source, list[Source], Segment]) -> np.ndarray:
        """Runs one chunk of steps, up to `target` at the most, and records what they say; returns their losses."""
        common, mapped, place = source
        count = min(target - self.step, place.end - self.step, self.chunk, MAX_CHUNK)
        began = time.perf_counter()
        calls, per_call = (count, 1) if self.layout.member_map == "unroll" else (1, count)
        places = [jnp.asarray((self.step + i, place.within + i, per_call)) for i in range(calls)]
        goes = self.share.take(jnp.asarray(~self.frozen))
        active = self._split(goes) if self.frozen.any() else [None] * len(self.states)
        layout, traced = self.layout, self.traced(place.size)
        own = zip(self.keys, active, mapped, strict=True)
        inputs = [(layout, traced, keys.loss, goes_on, mine, common) for keys, goes_on, mine in own]
        program = compiled(run_chunk, self.threads, (*inputs[0], places[0]), self.states[0])

        def steps(state: State, inputs: Any) -> tuple[State, list[Info]]:
            columns = []
            for where in places:
                state, infos = program((*inputs, where), state)
                columns.append(infos)
            return state, columns

        done = run_tasks([partial(steps, *each) for each in zip(self.states, inputs, strict=True)], self.threads)
        columns = [concatenate([_on_host(info) for info in columns], axis=1) for _, columns in done]
        infos = concatenate(columns)
        infos = jax.tree.map(lambda leaf: leaf[:, :count], infos)
        infos, seconds = self._joined(infos, time.perf_counter() - began)
        self.states, self.step = [state for state, _ in done], self.step + count
        self.infos.append(infos)
        if count == self.chunk:  # otherwise the time says nothing about a whole chunk
            self.chunk = int(np.clip(self.chunk * CHUNK_SECONDS / max(seconds, 1e-6), 1, 4 * self.chunk))
        self._notice_divergence(infos.loss)
        return infos.loss

    def _joined(self, infos: Info, seconds: float) -> tuple[Info, float]:
        """What a chunk says of all members, and how long it took where it took longest."""
        own = jax.tree.map(lambda leaf: leaf[: self.shards.num_members], infos)
        self.unsaved = time.perf_counter() - self.saved_at
        if self.share.alone:
            return own, seconds
        times = distributed.exchange((seconds, self.unsaved), "times")
        self.unsaved = times[0][1]
        return self.share.gather(own, "chunks"), max(one for one, _ in times)

    def program_bytes(self) -> int:
        """Return the bytes of the larger program, of a chunk or of an observation, beyond its arguments."""
        common, mapped, place = self.batches.source(self.step)
        where = jnp.asarray((self.step, place.within, 1))
        inputs = self.layout, self.traced(place.size), self.keys[0].loss, None, mapped[0], common, where
        chunk: Any = run_chunk
        observation: Any = observe_members
        found = program_bytes(chunk.lower(inputs, self.states[0]).compile().compiled)
        if self.observe is None:
            return found
        shared = self.layout, self.observe, jnp.asarray(self.step), self.keys[0].observe
        return max(found, program_bytes(observation.lower(shared, self.states[0]).compile().compiled))

    def record(self) -> None:
        """Records the observation at the current step, and asks the callbacks."""
        observed = None
        if self.observe is not None:
            shared = self.layout, self.observe, jnp.asarray(self.step)
            own = list(zip(self.keys, self.states, strict=True))
            program = compiled(observe_members, self.threads, (*shared, own[0][0].observe), own[0][1])

            def observe(keys: Streams, state: State) -> Any:
                # On the host before the next: in one thread, one member's decompositions at a time.
                return _on_host(program((*shared, keys.observe), state))

            observed = concatenate(run_tasks([partial(observe, *each) for each in own], self.threads))
            observed = jax.tree.map(lambda leaf: leaf[: self.shards.num_members], observed)
            observed = self.share.gather(observed, "observations")
        self.observed_at.append(self.step)
        self.observations.append(observed)
        self.infos = [concatenate(self.infos, axis=1)]
        records = self.records(len(self.observed_at) - 1)
        answers, interrupted = self.share.on_main(lambda: self._answers(records), interruptible=False)
        for frozen in answers:
            self.stopped = self.stopped or bool(frozen.size == 1 and frozen.all())
            if frozen.ndim:
                self.frozen = self.frozen | frozen
        if interrupted:
            raise distributed.everywhere(KeyboardInterrupt())

    def _answers(self, records: dict[str, Any]) -> tuple[list[np.ndarray], bool]:
        """What the callbacks say of a record, and whether one was interrupted."""
        answers, interrupted = [], False
        for callback in self.callbacks:
            try:
                answer = callback.record(self.step, records)
            except KeyboardInterrupt:  # the record counts: the others hear of it all the same
                interrupted, answer = True, None
            if answer is None:
                continue
            frozen = np.asarray(answer)
            if frozen.dtype != bool or (frozen.shape != (self.num_members,) and frozen.size != 1):
                wanted = f"return None, True, or a truth value for each of the {self.num_members} members"
                checks.fail("callbacks", wanted, describe(answer))
            answers.append(frozen)
        return answers, interrupted

    def records(self, index: int) -> dict[str, Any]:
        """What callbacks get of a record: means since the one before, and the observation."""
        at, since = self.observed_at[index], self.observed_at[index - 1] if index else self.first
        done: Info = concatenate(self.infos, axis=1)

        def mean(leaf: np.ndarray) -> np.ndarray:
            part = leaf[:, since - self.first : at - self.first]
            kind = np.result_type(leaf.dtype, np.float16)
            return part.mean(axis=1) if at > since else np.full((len(leaf), *leaf.shape[2:]), np.nan, kind)

        return {**jax.tree.map(mean, done)._asdict(), "observed": self.observations[index]}

    def history(self) -> History:
        """Everything recorded, stacked."""
        observed, done = None, concatenate(self.infos, axis=1)
        if self.observe is not None and self.observations:
            observed = stack(self.observations, axis=1)
        return History(done.loss, np.asarray(self.observed_at, np.int64), observed, done.metrics, self.first)

    def write(self, checkpoint: "Checkpoint | None") -> None:
        """Writes the checkpoint, if there is one."""
        if checkpoint is None:
            return
        header = {
            "format": FORMAT,
            "layout": stored_layout(self.layout),
            "run": checkpoint.identity,
            "jax": jax.__version__,
            "step": self.step,
            "seconds": self.seconds(),
            "observed_at": self.observed_at,
            "stopped": self.stopped,
            "frozen": self.frozen.tolist(),
            "diverged_at": self.diverged_at.tolist(),
        }
        state, path, share = None, checkpoint.path, self.share
        pieces: list[Path] = []
        if share.alone:  # the number of devices, of parts or of processes may change
            state = self.whole_state()
        else:
            if share.stop > share.start:
                checkpoints.save(_piece(path, self.step, share.start, share.stop), self.whole_state(), header)
            distributed.exchange(None, "pieces")
            bounds = [pair for pair in zip(share.bounds, share.bounds[1:], strict=False) if pair[1] > pair[0]]
            pieces, header["pieces"] = [_piece(path, self.step, *pair) for pair in bounds], bounds

        def commit() -> None:
            checkpoints.save(path, (state, *self.history()[:4]), header)
            for other in path.parent.glob(f"*{glob.escape(path.name)}.*"):
                if _is_piece(other, path) and other not in pieces and other.is_file():
                    other.unlink(missing_ok=True)

        self.share.on_main(commit, interruptible=False)
        self.saved_at, self.first_write = time.perf_counter(), np.inf

    def resume(self, checkpoint: "Checkpoint", total: int, times: np.ndarray) -> None:
        """Goes back to where the checkpoint stands, if there is one, and drops records at other steps than `times`."""
        path = checkpoint.path
        header = self.share.on_main(lambda: checkpoints.read_header(path) if path.exists() else None)
        if header is None:
            return
        checkpoint.check(header)
        if header.get("layout") != stored_layout(self.layout):
            logger.warning("%s was written under another layout or none is known: bits may differ.", path)
        self.step, recorded = header["step"], header["observed_at"]
        if self.step > total:
            wanted = f"be at least the {self.step - self.first} of {path}, where the run stands already"
            checks.fail("num_steps", wanted, total - self.first, "Delete it or name another file")
        observed, missed = None, [int(time) for time in times if time < self.step and time not in recorded]
        if self.observe is not None:
            if missed:
                wanted = f"hold no step before {self.step} at which the run in {path} was not observed"
                checks.fail("at", wanted, missed[0])
            inputs = (self.layout, self.observe, jnp.asarray(0), self.keys[0].observe)
            shapes = eqx.filter_eval_shape(observe_members, inputs, self.states[0])
            observed = jax.tree.map(
                lambda s: np.zeros((self.num_members, len(recorded), *s.shape[1:]), s.dtype), shapes
            )
        done = self.step - self.first
        infos = jax.tree.map(lambda leaf: np.zeros((self.num_members, done, *leaf.shape), leaf.dtype), self.info)
        like = infos.loss, np.zeros(len(recorded), np.int64), observed if recorded else None, infos.metrics
        pieces = header.get("pieces")
        shaped = None if pieces else self._with_rows(self.num_members)
        state, loss, _, observed, metrics = checkpoints.restore(path, (shaped, *like))
        if pieces:
            cuts = [(bounds, self.share.cut(*bounds)) for bounds in pieces]
            mine = [take(self._restored(path, header, bounds), cut) for bounds, cut in cuts if cut is not None]
            state = concatenate(mine)
        else:
            state = self.share.take(state)
        self.states = self._split(state)
        self.infos, self.earlier_seconds = [Info(loss, metrics)], header["seconds"]
        self.stopped, self.frozen = header["stopped"], np.asarray(header["frozen"])
        self.diverged_at = np.asarray(header["diverged_at"])
        kept = [index for index, time in enumerate(recorded) if time in times]
        self.observed_at = [recorded[index] for index in kept]
        self.observations = [jax.tree.map(lambda leaf, i=i: leaf[:, i], observed) for i in kept]

    def _restored(self, path: Path, header: dict[str, Any], bounds: Sequence[int]) -> Any:
        """The states of a piece of the run with this header."""
        start, stop = bounds
        piece = _piece(path, header["step"], start, stop)
        if piece.is_dir():
            raise RefusedFile(f"{piece} must be a file, got Orbax' folder. Delete it and {path} to start from scratch.")
        own = checkpoints.read_header(piece) if piece.exists() else {}
        if any(own.get(name) != header[name] for name in ("run", "step")):
            raise RefusedFile(f"{piece} must hold members {start} to {stop - 1} of {path}. Delete both to begin anew.")
        return checkpoints.restore(piece, self._with_rows(stop - start))

    def _with_rows(self, rows: int) -> Any:
        """Return the shapes and dtypes of states of another number of members."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), self.states[0])

    def _notice_divergence(self, losses: np.ndarray) -> None:
        bad = ~np.isfinite(losses)
        for member in np.flatnonzero(bad.any(axis=1) & (self.diverged_at < 0) & ~self.frozen):
            column = int(bad[member].argmax())
            self.diverged_at[member] = self.step - losses.shape[1] + column
            if self.share.alone or distributed.is_main():
                message = (
                    f"member {member}: the loss became {losses[member, column]} at step {self.diverged_at[member]}"
                )
                checks.warn(f"{message}; the other members go on.")


def _on_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def _piece(path: Path, step: int, start: int, stop: int) -> Path:
    """Where the states of some members at a step are kept beside the file that has the rest of a run."""
    return path.with_name(f"{path.name}.{step}.{start}-{stop}")


def _is_piece(other: Path, path: Path) -> bool:
    """Whether this is a piece of the run in `path`, or what a write of one left that was killed."""
    scratch = r"\.[0-9a-f]{8}\.tmp"
    piece = rf"{re.escape(path.name)}\.\d+\.\d+-\d+"
    return re.fullmatch(rf"{piece}|\.{piece}{scratch}", other.name) is not None


class Checkpoint(NamedTuple):
    """A run's file: where it lies, what it belongs to, and whether to take its program for the same."""

    path: Path
    identity: dict[str, Any]
    same_program: bool

    def check(self, header: dict[str, Any]) -> None:
        """Raise unless the file with this header is this run's."""
        if header.get("format", 0) > FORMAT:
            wanted = f"be a file of format {FORMAT} or lower"
            checks.fail("checkpoint", wanted, f"{self.path} of format {header['format']}", "Update this package")
        traced, stored, version = ("loss", "optimizer", "step", "observe"), header.get("run", {}), header.get("jax")
        wanted = {k: value for k, value in self.identity.items() if not (self.same_program and k in traced)}
        different = [name for name, value in wanted.items() if stored.get(name, "unknown") != value]
        if not different:
            return
        advice = "Delete it or name another file"
        if set(different) <= set(traced):
            cause = "" if version == jax.__version__ else f" (JAX {version} wrote it, this is {jax.__version__})"
            advice += f"; if it is the same program{cause}, say same_program=True"
        got = f"{self.path}, whose {checks.that_differ(different)}"
        checks.fail("checkpoint", "be a file of the same run", got, advice)


def records_something(callback: Callback) -> bool:
    """Whether a callback wants records for more than a line of text."""
    return type(callback).record is not Callback.record and not isinstance(callback, Progress)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Holds a signal back until what is inside is done: a chunk's donated state must not be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with ExitStack() as held:
        for number in [number for number, handler in handlers.items() if callable(handler)]:
            held.callback(signal.signal, number, handlers[number])
            signal.signal(number, lambda number, frame: heard.append((number, frame)))
        yield
    if heard:
        handlers[heard[0][0]](*heard[0])


@contextmanager
def terminations_interrupt() -> Iterator[None]:
    """Inside, the first SIGTERM is a `KeyboardInterrupt`; afterwards the handler that was there before is called.

    Without such a handler the process ends as it would have ended at once. Only the main thread can take signals, and
    one of several processes must not stop alone.
    """
    before = signal.getsignal(signal.SIGTERM)
    alone = threading.current_thread() is threading.main_thread() and distributed.number() == 1
    if not alone or before in (None, signal.SIG_IGN):
        yield
        return
    heard: list[tuple[int, Any]] = []

    def interrupt(number: int, frame: Any) -> None:
        heard.append((number, frame))
        if len(heard) == 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is interrupt:  # or somebody has set another one meanwhile
            signal.signal(signal.SIGTERM, before)
        if heard and callable(before):
            before(*heard[0])
        elif heard:
            signal.raise_signal(signal.SIGTERM)
