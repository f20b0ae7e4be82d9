"""The host's side of a run: chunks of steps, records, checkpoints."""

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation import checkpoint as checkpoints
from dissociation import checks, sharding
from dissociation.training.steps import MAX_CHUNK, Program, initialise, observe_members, permutations, run_chunk
from dissociation.training.traced import Traced

CHUNK_SECONDS = 1.0
"""How long a chunk should take: how often progress is shown and an interrupt is heard."""

MAX_DESCRIBED = 6
"""Observed numbers that progress shows, if nobody says which."""

MAX_ORDER = 65_536
"""The longest order in samples, if it covers more than one epoch."""


class History(NamedTuple):
    """What was recorded along the way.

    Attributes:
        loss: The loss of every step's batch, before the update: [members, steps], NumPy.
        observed_at: The steps of the observations: [times]; step s is the state after s updates.
        observed: The results of `observe`, every leaf [members, times, ...], NumPy; None without `observe`.
    """

    loss: np.ndarray
    observed_at: np.ndarray
    observed: Any


class Batches(NamedTuple):
    """The order of the samples: a permutation per epoch, cut into batches."""

    num_samples: int
    batch_size: int | None
    epoch_steps: int
    keys: Array  # one, or one per member

    @property
    def span(self) -> int:
        """Epochs that one order covers: several if they are short and no smaller batch stands between them."""
        if self.batch_size is None or self.epoch_steps != self.num_samples // self.batch_size:
            return 1
        return max(1, min(MAX_CHUNK // self.epoch_steps, MAX_ORDER // self.num_samples))

    def order(self, block: int) -> Array | None:
        """Of the epochs from block * span on: [samples], or [members, samples] if members do not share their batches.

        None for full batches. Of several epochs, only the samples that are in a batch.
        """
        if self.batch_size is None:
            return None
        draw = permutations if self.keys.ndim == 0 else eqx.filter_vmap(permutations, in_axes=(0, None, None, None))
        kept = self.num_samples if self.span == 1 else self.epoch_steps * self.batch_size
        return draw(self.keys, block * self.span + jnp.arange(self.span), self.num_samples, kept)

    def segment(self, step: int) -> tuple[int | None, int, int]:
        """Batch size at `step`, position of its first sample in the order, and the step up to which both hold."""
        if self.batch_size is None:
            return None, 0, step + MAX_CHUNK
        block_steps = self.span * self.epoch_steps
        block, within = divmod(step, block_steps)
        full, rest = divmod(self.num_samples, self.batch_size)
        if within < self.span * full:
            return self.batch_size, within * self.batch_size, block * block_steps + self.span * full
        return rest, within * self.batch_size, step + 1


class Run:
    """The host's side of one run: where it stands, and what was recorded."""

    def __init__(
        self,
        program: Program,
        gradient: Callable[[int | None], Traced],
        params: Any,
        batches: Batches,
        num_members: int,
        checkpoint: str | Path | None,
        identity: dict[str, Any] | None,
        checkpoint_seconds: float,
    ):
        if not checkpoint_seconds >= 0:
            checks.fail("checkpoint_seconds", "be at least 0", checkpoint_seconds)
        self.program, self.gradient, self.batches, self.num_members = program, gradient, batches, num_members
        self.path = None if checkpoint is None else Path(checkpoint)
        self.identity, self.checkpoint_seconds = identity, checkpoint_seconds
        self.state = initialise(program, params)
        self.step = 0
        self.losses = [np.zeros((num_members, 0), self._loss_dtype())]
        self.observed_at: list[int] = []
        self.observations: list[Any] = []
        self.diverged_at = np.full(num_members, -1)
        self.block, self.order = -1, None
        self.stopped = False
        self.chunk, self.saved_at, self.recorded_at = 1, time.perf_counter(), 0
        self.began, self.earlier_seconds = time.perf_counter(), 0.0

    def seconds(self) -> float:
        """Wall time so far, earlier parts included."""
        return self.earlier_seconds + time.perf_counter() - self.began

    def to_the_end(
        self,
        total: int,
        times: np.ndarray,
        meter: Any,
        log: Callable[..., Any] | None,
        shown: Sequence[str] | None,
    ) -> None:
        """Alternates between chunks of steps and records, until `total` steps are done or `log` returns True."""
        described = ""
        self.stopped = self.stopped and log is not None and self.step in self.observed_at
        try:
            while True:
                if self.step in times and self.step not in self.observed_at:
                    records = self.observe()
                    described = _describe(records, shown)
                    self.stopped = log is not None and _is_true(log(self.step, records))
                meter.advance(self.step, described)
                if self.stopped or self.step == total:
                    break
                later = times[times > self.step]
                with _interrupts_later():
                    self.advance(min([total, *later[:1].tolist()]))
                if not len(times):
                    described = _describe({"loss": self.losses[-1].mean(axis=1)}, shown)
                if time.perf_counter() - self.saved_at >= self.checkpoint_seconds:
                    self.save()
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()

    def advance(self, target: int) -> None:
        """Runs one chunk of steps, up to `target` at the most, and records its losses."""
        batch_size, position, end = self.batches.segment(self.step)
        block = self.step // (self.batches.span * self.batches.epoch_steps)
        if block != self.block:
            self.block, self.order = block, self.batches.order(block)
        count = min(target - self.step, end - self.step, self.chunk, MAX_CHUNK)
        began = time.perf_counter()
        calls, per_call = (count, 1) if self.program.member_map == "unroll" else (1, count)
        gradient = self.gradient(batch_size)

        def steps(program: Program, state: Any, order: Any) -> Any:
            columns = []
            for i in range(calls):
                place = jnp.asarray([self.step + i, position + i * (batch_size or 0), per_call])
                state, losses = run_chunk((program, order, place, batch_size, gradient), state)
                columns.append(losses)
            return state, jnp.concatenate(columns, axis=1)

        if not self._one_by_one:
            self.state, losses = steps(self.program, self.state, self.order)
        else:
            parts = []
            for index in range(self.num_members):
                program, state = self._alone(index, self.state)
                own = self.order is not None and self.order.ndim == 2
                parts.append(steps(program, state, self.order[index : index + 1] if own else self.order))
            self.state, losses = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        losses = np.asarray(losses)
        seconds = time.perf_counter() - began
        self.losses.append(losses[: self.num_members, :count])
        self._notice_divergence(self.losses[-1])
        self.step += count
        if count == self.chunk:  # otherwise the time says nothing about a whole chunk
            self.chunk = int(np.clip(self.chunk * CHUNK_SECONDS / max(seconds, 1e-6), 1, 4 * self.chunk))

    def observe(self) -> dict[str, Any]:
        """Records the observation at the current step and returns what `log` gets."""
        done = np.concatenate(self.losses, axis=1)
        since, self.recorded_at = self.recorded_at, self.step
        mean = done[:, since:].mean(axis=1) if self.step > since else np.full(self.num_members, np.nan, done.dtype)
        observed = None
        if self.program.observe is not None:
            observed = self._observe_all()
            observed = jax.tree.map(lambda leaf: np.asarray(leaf)[: self.num_members], observed)
        self.observed_at.append(self.step)
        self.observations.append(observed)
        return {"loss": mean, "observed": observed}

    def _observe_all(self) -> Any:
        step, params = jnp.asarray(self.step), self.state[0]
        if not self._one_by_one:
            return observe_members((self.program, step), params)
        parts = []
        for index in range(self.num_members):
            program, own = self._alone(index, params)
            parts.append(jax.tree.map(np.asarray, observe_members((program, step), own)))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    @property
    def _one_by_one(self) -> bool:
        """Whether members are unrolled on one device: one member's program serves all, and compiles once.

        Several members in one program may share kernels, in which a member's last bits depend on its company.
        """
        return self.program.member_map == "unroll" and self.program.mesh is None

    def _alone(self, index: int, tree: Any) -> tuple[Program, Any]:
        """The program and arrays of one member."""
        members, own = jax.tree.map(lambda leaf: leaf[index : index + 1], (self.program.members, tree))
        return eqx.tree_at(lambda p: p.members, self.program, members), own

    def history(self) -> History:
        """Everything recorded, stacked."""
        observed = None
        if self.program.observe is not None and self.observations:
            observed = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *self.observations)
        return History(np.concatenate(self.losses, axis=1), np.asarray(self.observed_at, np.int64), observed)

    def save(self) -> None:
        """Writes the checkpoint, if there is one."""
        if self.path is None:
            return
        header = {
            "run": self.identity,
            "jax": jax.__version__,
            "step": self.step,
            "seconds": self.seconds(),
            "observed_at": self.observed_at,
            "stopped": self.stopped,
        }
        state = sharding.drop_padding(self.state, self.num_members)  # the number of devices may change
        checkpoints.save(self.path, (state, *self.history()), header)
        self.saved_at = time.perf_counter()

    def resume(self, total: int, times: np.ndarray, same_program: bool) -> None:
        """Goes back to where the checkpoint stands, if there is one, and drops records at other steps than `times`."""
        if self.path is None or not self.path.exists():
            return
        header = checkpoints.read_header(self.path)
        self._check_identity(header.get("run", {}), header.get("jax"), same_program)
        self.step, recorded = header["step"], header["observed_at"]
        if self.step > total:
            wanted = f"be at least the {self.step} of {self.path}, where the run stands already"
            checks.fail("num_steps", wanted, total, "Delete it or name another file")
        observed, missed = None, [int(time) for time in times if time < self.step and time not in recorded]
        if self.program.observe is not None:
            if missed:
                wanted = f"hold no step before {self.step} at which the run in {self.path} was not observed"
                checks.fail("observe_at", wanted, missed[0])
            shapes = eqx.filter_eval_shape(observe_members, (self.program, jnp.asarray(0)), self.state[0])
            observed = jax.tree.map(
                lambda s: np.zeros((self.num_members, len(recorded), *s.shape[1:]), s.dtype), shapes
            )
        losses = np.zeros((self.num_members, self.step), self._loss_dtype())
        like = History(losses, np.zeros(len(recorded), np.int64), observed if recorded else None)
        state = sharding.drop_padding(self.state, self.num_members)
        self.state, *restored = checkpoints.restore(self.path, (state, *like))
        history = History(*restored)
        if (mesh := self.program.mesh) is not None:
            self.state = sharding.place_members(sharding.pad_members(self.state, mesh.size), mesh)
        self.losses, self.earlier_seconds = [history.loss], header["seconds"]
        self.stopped = header.get("stopped", False)
        kept = [index for index, time in enumerate(recorded) if time in times]
        self.observed_at = [recorded[index] for index in kept]
        self.observations = [jax.tree.map(lambda leaf, i=i: leaf[:, i], history.observed) for i in kept]
        self.recorded_at = max(self.observed_at, default=0)
        bad = ~np.isfinite(history.loss)
        self.diverged_at = np.where(bad.any(axis=1), bad.argmax(axis=1) if self.step else 0, -1)

    def _check_identity(self, found: dict[str, Any], version: str | None, same_program: bool) -> None:
        """Raises unless `found`, of a checkpoint written under JAX `version`, is this run's identity."""
        traced = ("loss", "optimizer", "observe")
        own = {name: value for name, value in (self.identity or {}).items() if not (same_program and name in traced)}
        different = [name for name, value in own.items() if found.get(name, "unknown") != value]
        if not different:
            return
        advice = "Delete it or name another file"
        if set(different) <= set(traced):
            cause = "" if version == jax.__version__ else f" (JAX {version} wrote it, this is {jax.__version__})"
            advice += f"; if it is the same program{cause}, say same_program=True"
        got = f"{self.path}, whose {', '.join(different)} differ"
        checks.fail("checkpoint", "be a file of the same run", got, advice)

    def _loss_dtype(self) -> Any:
        return jax.eval_shape(lambda: jnp.zeros(())).dtype

    def _notice_divergence(self, losses: np.ndarray) -> None:
        bad = ~np.isfinite(losses)
        for member in np.flatnonzero(bad.any(axis=1) & (self.diverged_at < 0)):
            column = int(bad[member].argmax())
            self.diverged_at[member] = self.step + column
            message = f"member {member}: the loss became {losses[member, column]} at step {self.step + column}"
            warnings.warn(f"{message}; the other members go on.", RuntimeWarning, stacklevel=5)


def _is_true(answer: Any) -> bool:
    """Whether it is True, or NumPy's or JAX's form of it; None and all that is no truth value is not."""
    return bool(
        getattr(answer, "dtype", type(answer)) in (bool, np.dtype(bool)) and np.size(answer) == 1 and np.all(answer)
    )


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Holds an interrupt (Ctrl-C) back until what is inside is done: a chunk's donated state must not be lost."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    heard: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if heard:
        handler(*heard[0])


def check_shown(shown: Sequence[str] | None, observe: Traced | None) -> None:
    """Raises unless `shown` names numbers that `observe` gives, one per member."""
    found: dict[str, Any] = {}
    if observe is not None:
        found["observed"] = observe.code.out_tree.unflatten([var.aval for var in observe.code.jaxpr.outvars])
    names = ["loss", *(name.removeprefix("observed.") for name, leaf in _named(found) if leaf.ndim == 0)]
    for name in shown or ():
        checks.check_choice("shown", name, names)


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def _describe(records: dict[str, Any], shown: Sequence[str] | None) -> str:
    """Mean and standard deviation over members of the loss and of some of the numbers observed, in a line."""
    scalars = [(name, leaf) for name, leaf in _named(records) if leaf.ndim == 1]
    known = {name.removeprefix("observed."): leaf[np.isfinite(leaf)].astype(np.float64) for name, leaf in scalars}
    others = [name for name in known if name != "loss"]
    names = ["loss", *(others[:MAX_DESCRIBED] if shown is None else [name for name in shown if name in others])]
    described = [(name, known[name]) for name in names if known[name].size]
    return ", ".join(f"{name} {leaf.mean():.4g} \u00b1 {leaf.std():.2g}" for name, leaf in described)
