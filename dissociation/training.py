"""Training many members at once: optimiser steps compiled in chunks, members mapped inside, the host in between.

A member is one seed or one setting of a sweep. Between chunks the host shows progress, records observations, writes
checkpoints and can stop; neither where the chunks end nor where a run was interrupted changes a single bit of it.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree

from dissociation import checkpoint as checkpoints
from dissociation import checks, sharding
from dissociation.member_map import MEMBER_MAPS, map_members
from dissociation.progress import MeterFactory, open_meter
from dissociation.schedule import check_steps, log_spaced_steps, steps_per_epoch

__all__ = ["FitResult", "History", "fit", "log_spaced_steps", "steps_per_epoch"]

CHUNK_SECONDS = 1.0
MAX_CHUNK = 512
"""The longest chunk in steps: the length of the buffer that a compiled chunk writes its losses to."""


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


class FitResult(NamedTuple):
    """The outcome of `fit`.

    Attributes:
        models: The trained models, members stacked as they came.
        history: What was recorded.
        diverged_at: Per member, the first step whose loss was not finite, or -1: [members], NumPy.
        num_steps: Steps done in all; fewer than asked for if `log` stopped the run.
        member_map: How the members were mapped: "vmap", "scan" or "unroll".
        seconds: Wall time, compilation and the earlier parts of a resumed run included.
    """

    models: Any
    history: History
    diverged_at: np.ndarray
    num_steps: int
    member_map: str
    seconds: float


class _MemberInputs(NamedTuple):
    """What belongs to a member and stays as it is; arrays carry members first until they are mapped."""

    frozen: Any
    hyperparams: Any
    loss_key: Array
    observe_key: Array


class _Program(eqx.Module):
    """What one run's compiled functions share."""

    loss: Callable[..., Any]
    observe: Callable[..., Any] | None
    optimizer: Any
    data: Any
    static: Any
    members: _MemberInputs
    member_map: str = eqx.field(static=True)
    members_per_batch: int | None = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True)


def fit(
    models: PyTree,
    loss: Callable[..., Any],
    data: PyTree,
    optimizer: optax.GradientTransformation | Callable[[Any], optax.GradientTransformation],
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None,
    key: Array,
    hyperparams: PyTree = None,
    shared_batches: bool = True,
    drop_remainder: bool = False,
    observe: Callable[..., Any] | None = None,
    observe_at: Sequence[int] | Int[np.ndarray, " times"] | None = None,
    member_map: str = "auto",
    members_per_batch: int | None = None,
    mesh: Mesh | None = None,
    progress: str | MeterFactory | None = None,
    log: Callable[[int, dict[str, Any]], Any] | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 60.0,
) -> FitResult:
    """Trains stacked members side by side.

    In every epoch the samples are put in a random order and cut into batches; the last one is smaller if
    `batch_size` does not divide their number. A step is `optax.apply_updates(params, update)` on every inexact
    array of a member; other arrays of a model stay as they are.

    Args:
        models: An Equinox module, or any PyTree, whose array leaves carry members on the leading axis.
        loss: `loss(model, batch, key) -> scalar` for one member; the key differs by step and member. It may be a
            PyTree with arrays (an Equinox module): they are passed to the compiled program, not baked into it.
        data: A PyTree of arrays, samples first, the same for all members.
        optimizer: An Optax transformation, or a function from one member's hyperparameters to one.
        num_steps: Optimiser steps; give this or `num_epochs`.
        num_epochs: Passes over the data.
        batch_size: Samples in a batch; None takes all of them in every step, in the given order.
        key: One key (members fold in their index), or one key per member, which needs `shared_batches=False`.
        hyperparams: A PyTree of arrays, members first. They are traced: a sweep over them compiles once.
        shared_batches: Whether all members see the same batches in the same order.
        drop_remainder: Whether to drop the last, smaller batch of an epoch.
        observe: `observe(model, step, key) -> PyTree of arrays` for one member, `step` traced.
        observe_at: Steps at which to observe and to call `log`, 0 (before the first update) and the last included
            if wanted; default: the beginning and the end of every epoch.
        member_map: "vmap" (members batched in one program), "scan" (in turn inside the program), "unroll" (in
            turn, one step per call, no loop in the program) or "auto": on a CPU "scan", or "unroll" if the loss
            contains a convolution, which XLA's CPU backend runs slowly inside a loop; elsewhere "vmap".
        members_per_batch: With "vmap", how many members are batched at once; None means all.
        mesh: A mesh from `sharding.member_mesh`, over whose devices the members are laid.
        progress: None, "terminal", "notebook" or a meter factory, see `dissociation.progress`.
        log: `log(step, records)` on the host at the steps of `observe_at`; `records["loss"]` is each member's mean
            loss since the last record ([members], NaN at the start), `records["observed"]` the observation with
            members first. Returning True stops the run.
        checkpoint: A file. If it exists the run goes on from it, and the outcome equals the uninterrupted one bit
            for bit; it is written as the run goes on, on an interrupt, and at the end.
        checkpoint_seconds: The least time between two writes.

    Returns:
        A `FitResult`.

    Raises:
        ValueError: If arguments contradict each other or the data, or the checkpoint is of another run.
        TypeError: If a count is no Python integer.
    """
    began = time.perf_counter()
    num_samples, num_members = _leading_size("data", data), _leading_size("models", models)
    if hyperparams is not None:
        found = _leading_size("hyperparams", hyperparams)
        checks.check_same_length("models", num_members, "hyperparams", found, "members")
    epoch_steps = steps_per_epoch(num_samples, batch_size, drop_remainder=drop_remainder)
    total = _total_steps(num_steps, num_epochs, epoch_steps)
    if observe_at is None:
        observe_at = np.union1d(np.arange(0, total + 1, epoch_steps), [total])
    times = check_steps("observe_at", observe_at, total)
    checks.check_choice("member_map", member_map, ("auto", *MEMBER_MAPS))
    if members_per_batch is not None:
        checks.check_count("members_per_batch", members_per_batch, minimum=1)
    if mesh is not None:
        sharding.check_mesh(mesh)

    data_key, member_keys = _split_key(key, num_members, shared_batches)
    params, frozen, static = _split_models(models)
    members = _MemberInputs(
        frozen,
        jax.tree.map(jnp.asarray, hyperparams),
        jax.vmap(lambda k: jax.random.fold_in(k, 0))(member_keys),
        jax.vmap(lambda k: jax.random.fold_in(k, 1))(member_keys),
    )
    data = jax.tree.map(jnp.asarray, data)
    has_convolution = _has_convolution(loss, eqx.combine(params, frozen, static), data, batch_size)
    if member_map == "auto":
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        member_map = "vmap" if platform != "cpu" else "unroll" if has_convolution else "scan"
    if members_per_batch is not None and member_map != "vmap":
        checks.fail(
            "members_per_batch", f"be None where members go in turn (member_map={member_map!r})", members_per_batch
        )
    # The state is donated to every chunk; the caller's arrays must outlive it.
    params = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
    if mesh is not None:
        params, members = (
            sharding.place_members(sharding.pad_members(tree, mesh.size), mesh) for tree in (params, members)
        )
        data = sharding.replicate(data, mesh)
    program = _Program(loss, observe, optimizer, data, static, members, member_map, members_per_batch, mesh)
    batches = _Batches(num_samples, batch_size, epoch_steps, data_key, None if shared_batches else member_keys)
    identity = None
    if checkpoint is not None:
        settings = {"num_steps": total, "batch_size": batch_size, "drop_remainder": drop_remainder}
        identity = {
            **settings,
            "shared_batches": shared_batches,
            "observe_at": [int(step) for step in times],
            "data": checkpoints.fingerprint(data),
            "models": checkpoints.fingerprint(models),
            "hyperparams": checkpoints.fingerprint(hyperparams),
            "key": checkpoints.fingerprint(key),
        }
    run = _Run(program, params, batches, num_members, checkpoint, identity, checkpoint_seconds)
    run.resume()
    run.began = began
    meter = open_meter(progress, total, "training")
    try:
        run.to_the_end(total, times, meter, log)
    finally:
        meter.close()
    trained = sharding.drop_padding(run.state[0], num_members)
    return FitResult(
        models=eqx.combine(trained, frozen, static),
        history=run.history(),
        diverged_at=run.diverged_at,
        num_steps=run.step,
        member_map=member_map,
        seconds=run.seconds(),
    )


class _Batches(NamedTuple):
    """The order of the samples: a permutation per epoch, cut into batches."""

    num_samples: int
    batch_size: int | None
    epoch_steps: int
    data_key: Array
    member_keys: Array | None

    def order(self, epoch: int) -> Array | None:
        """[samples], or [members, samples] if members do not share their batches; None for full batches."""
        if self.batch_size is None:
            return None
        keys = self.data_key if self.member_keys is None else self.member_keys
        orders = _permutation if self.member_keys is None else eqx.filter_vmap(_permutation, in_axes=(0, None, None))
        return orders(keys, jnp.asarray(epoch), self.num_samples)

    def segment(self, step: int) -> tuple[int | None, int, int]:
        """Batch size at `step`, position of its first sample in the order, and the step up to which both hold."""
        if self.batch_size is None:
            return None, 0, step + MAX_CHUNK
        epoch, within = divmod(step, self.epoch_steps)
        full, rest = divmod(self.num_samples, self.batch_size)
        if within < full:
            return self.batch_size, within * self.batch_size, epoch * self.epoch_steps + full
        return rest, within * self.batch_size, step + 1


class _Run:
    """The host's side of one run: where it stands, and what was recorded."""

    def __init__(
        self,
        program: _Program,
        params: Any,
        batches: _Batches,
        num_members: int,
        checkpoint: str | Path | None,
        identity: dict[str, Any] | None,
        checkpoint_seconds: float,
    ):
        self.program, self.batches, self.num_members = program, batches, num_members
        self.path = None if checkpoint is None else Path(checkpoint)
        self.identity, self.checkpoint_seconds = identity, checkpoint_seconds
        self.state = _initialise(program, params)
        self.step = 0
        self.losses = [np.zeros((num_members, 0), self._loss_dtype())]
        self.observed_at: list[int] = []
        self.observations: list[Any] = []
        self.diverged_at = np.full(num_members, -1)
        self.epoch, self.order = -1, None
        self.chunk, self.saved_at, self.recorded_at = 1, time.perf_counter(), 0
        self.began, self.earlier_seconds = time.perf_counter(), 0.0

    def seconds(self) -> float:
        """Wall time so far, earlier parts included."""
        return self.earlier_seconds + time.perf_counter() - self.began

    def to_the_end(self, total: int, times: np.ndarray, meter: Any, log: Callable[..., Any] | None) -> None:
        """Alternates between chunks of steps and records, until `total` steps are done or `log` returns True."""
        stopped, described = False, ""
        try:
            while True:
                if self.step in times and self.step not in self.observed_at:
                    records = self.observe()
                    described = _describe(records)
                    stopped = log is not None and log(self.step, records) is True
                meter.advance(self.step, described)
                if stopped or self.step == total:
                    break
                later = times[times > self.step]
                self.advance(min([total, *later[:1].tolist()]))
                if time.perf_counter() - self.saved_at >= self.checkpoint_seconds:
                    self.save()
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()

    def advance(self, target: int) -> None:
        """Runs one chunk of steps, up to `target` at the most, and records its losses."""
        batch_size, position, end = self.batches.segment(self.step)
        epoch = self.step // self.batches.epoch_steps
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self.batches.order(epoch)
        count = min(target - self.step, end - self.step, self.chunk, MAX_CHUNK)
        began = time.perf_counter()
        calls, per_call = (count, 1) if self.program.member_map == "unroll" else (1, count)
        columns = []
        for i in range(calls):
            place = jnp.asarray([self.step + i, position + i * (batch_size or 0), per_call])
            self.state, losses = _chunk((self.program, self.order, place, batch_size), self.state)
            columns.append(losses)
        losses = np.concatenate([np.asarray(column) for column in columns], axis=1)
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
            observed = _observe((self.program, jnp.asarray(self.step)), self.state[0])
            observed = jax.tree.map(lambda leaf: np.asarray(leaf)[: self.num_members], observed)
        self.observed_at.append(self.step)
        self.observations.append(observed)
        return {"loss": mean, "observed": observed}

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
            "step": self.step,
            "seconds": self.seconds(),
            "recorded_at": self.recorded_at,
            "observed_at": self.observed_at,
        }
        checkpoints.save(self.path, (self.state, *self.history()), header)
        self.saved_at = time.perf_counter()

    def resume(self) -> None:
        """Goes back to where the checkpoint stands, if there is one."""
        if self.path is None or not self.path.exists():
            return
        header = checkpoints.read_header(self.path)
        identity = self.identity or {}
        different = [name for name, value in identity.items() if header["run"].get(name) != value]
        if different:
            checks.fail(
                "checkpoint",
                "be a file of the same run",
                f"{self.path}, whose {', '.join(different)} differ",
                "Delete it or name another file",
            )
        self.step, self.recorded_at = header["step"], header["recorded_at"]
        self.observed_at, self.earlier_seconds = header["observed_at"], header["seconds"]
        times = len(self.observed_at)
        observed = None
        if self.program.observe is not None and times:
            shapes = eqx.filter_eval_shape(_observe, (self.program, jnp.asarray(0)), self.state[0])
            observed = jax.tree.map(lambda s: np.zeros((self.num_members, times, *s.shape[1:]), s.dtype), shapes)
        like = History(np.zeros((self.num_members, self.step), self._loss_dtype()), np.zeros(times, np.int64), observed)
        self.state, *recorded = checkpoints.restore(self.path, (self.state, *like))
        history = History(*recorded)
        if self.program.mesh is not None:
            self.state = sharding.place_members(self.state, self.program.mesh)
        self.losses = [history.loss]
        self.observations = [jax.tree.map(lambda leaf, i=i: leaf[:, i], history.observed) for i in range(times)]
        bad = ~np.isfinite(history.loss)
        self.diverged_at = np.where(bad.any(axis=1), bad.argmax(axis=1) if self.step else 0, -1)

    def _loss_dtype(self) -> Any:
        return jax.eval_shape(lambda: jnp.zeros(())).dtype

    def _notice_divergence(self, losses: np.ndarray) -> None:
        bad = ~np.isfinite(losses)
        for member in np.flatnonzero(bad.any(axis=1) & (self.diverged_at < 0)):
            column = int(bad[member].argmax())
            self.diverged_at[member] = self.step + column
            message = f"member {member}: the loss became {losses[member, column]} at step {self.step + column}"
            warnings.warn(f"{message}; the other members go on.", RuntimeWarning, stacklevel=5)


# --- Compiled ------------------------------------------------------------------------------------------------------


def _over_members(program: _Program, function: Callable[..., Any], shared: Any, stacked: Any) -> Any:
    how = {"members_per_batch": program.members_per_batch, "mesh": program.mesh}
    return map_members(function, shared, stacked, member_map=program.member_map, **how)


def _transformation(program: _Program, member: _MemberInputs) -> optax.GradientTransformation:
    if isinstance(program.optimizer, optax.GradientTransformation):
        return program.optimizer
    return program.optimizer(member.hyperparams)


@eqx.filter_jit
def _initialise(program: _Program, params: Any) -> Any:
    def one(program: _Program, stacked: Any) -> Any:
        member, own_params = stacked
        return jax.tree.map(jnp.asarray, _transformation(program, member).init(own_params))

    return params, _over_members(program, one, program, (program.members, params))


@eqx.filter_jit(donate="all-except-first")
def _chunk(inputs: Any, state: Any) -> Any:
    """Several steps of every member, or one where members are unrolled: the new state, and the steps' losses."""
    program, order, place, batch_size = inputs
    own_orders, shared_order = (order, None) if order is not None and order.ndim == 2 else (None, order)

    def one(shared: Any, stacked: Any) -> Any:
        program, shared_order, (start, position, count) = shared
        member, own_state, own_order = stacked
        order = shared_order if own_order is None else own_order

        def step(i: Array | int, state: Any) -> Any:
            batch = program.data
            if batch_size is not None:
                chosen = jax.lax.dynamic_slice_in_dim(order, position + i * batch_size, batch_size)
                batch = jax.tree.map(lambda leaf: leaf.at[chosen].get(mode="promise_in_bounds"), program.data)
            return _step(program, member, state, batch, jax.random.fold_in(member.loss_key, start + i))

        def body(i: Array, carry: Any) -> Any:
            state, losses = carry
            state, value = step(i, state)
            return state, losses.at[i].set(value.astype(losses.dtype))

        if program.member_map == "unroll":
            own_state, value = step(0, own_state)
            return own_state, value[None]
        return jax.lax.fori_loop(0, count, body, (own_state, jnp.zeros(MAX_CHUNK)))

    return _over_members(program, one, (program, shared_order, place), (program.members, state, own_orders))


def _step(program: _Program, member: _MemberInputs, state: Any, batch: Any, key: Array) -> Any:
    """One optimiser step of one member: the new state, and the loss before it."""
    params, opt_state = state

    def objective(params: Any) -> Array:
        return program.loss(eqx.combine(params, member.frozen, program.static), batch, key)

    value, gradient = jax.value_and_grad(objective)(params)
    updates, opt_state = _transformation(program, member).update(gradient, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value


@eqx.filter_jit
def _observe(inputs: Any, params: Any) -> Any:
    program, step = inputs

    def one(shared: Any, stacked: Any) -> Any:
        program, step = shared
        member, own_params = stacked
        model = eqx.combine(own_params, member.frozen, program.static)
        observed = program.observe(model, step, jax.random.fold_in(member.observe_key, step))
        return jax.tree.map(jnp.asarray, observed)

    return _over_members(program, one, (program, step), (program.members, params))


@eqx.filter_jit
def _permutation(key: Array, epoch: Array, num_samples: int) -> Array:
    return jax.random.permutation(jax.random.fold_in(key, epoch), num_samples)


# --- Arguments -----------------------------------------------------------------------------------------------------


def _leading_size(name: str, tree: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves if eqx.is_array_like(leaf)]
    sizes = {path: np.shape(leaf)[:1] for path, leaf in arrays}
    if not sizes:
        checks.fail(name, "hold at least one array", "none")
    first_path, first = next(iter(sizes.items()))
    for path, size in sizes.items():
        if size != first or not size:
            checks.fail(
                name,
                f"agree in the leading axis of all arrays ({first_path}: {first})",
                f"{path} with {size or 'no axis'}",
            )
    return first[0]


def _total_steps(num_steps: int | None, num_epochs: int | None, epoch_steps: int) -> int:
    if (num_steps is None) == (num_epochs is None):
        checks.fail("num_steps", "be given, or `num_epochs`, but not both", f"{num_steps} and {num_epochs}")
    if num_epochs is not None:
        return checks.check_count("num_epochs", num_epochs) * epoch_steps
    return checks.check_count("num_steps", num_steps)


def _split_key(key: Array, num_members: int, shared_batches: bool) -> tuple[Array, Array]:
    """One key for the order of the data, and one for every member."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        data_key, member_root = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
        return data_key, jax.vmap(lambda i: jax.random.fold_in(member_root, i))(jnp.arange(num_members))
    if key.shape != (num_members,):
        checks.fail("key", f"be one key or one per member ({num_members})", f"shape {key.shape}")
    if shared_batches:
        checks.fail("shared_batches", "be False where every member has a key of its own", shared_batches)
    return key[0], key


def _split_models(models: Any) -> tuple[Any, Any, Any]:
    """Trained arrays, other arrays, and all else."""
    models = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, models)
    params, rest = eqx.partition(models, eqx.is_inexact_array)
    return params, *eqx.partition(rest, eqx.is_array)


def _has_convolution(loss: Callable[..., Any], models: Any, data: Any, batch_size: int | None) -> bool:
    """Traces the loss for one member, raises unless it is a scalar, and looks for a convolution in it."""

    def first(tree: Any, index: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[index] if eqx.is_array(leaf) else leaf, tree)

    inputs = first(models, 0), first(data, slice(batch_size)), jax.random.key(0)
    jaxpr, shape, _ = eqx.filter_make_jaxpr(loss)(*inputs)
    if getattr(shape, "shape", None) != ():
        checks.fail("loss", "return a scalar for one member and one batch", shape)
    return "conv_general_dilated" in str(jaxpr)


def _describe(records: dict[str, Any]) -> str:
    """Mean and standard deviation over members of the loss and of every scalar observed, in a line."""
    leaves = jax.tree_util.tree_leaves_with_path(records)
    scalars = [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves if leaf.ndim == 1
    ]
    shown = [
        (name.removeprefix("observed.") or name, leaf[np.isfinite(leaf)].astype(np.float64)) for name, leaf in scalars
    ]
    return ", ".join(f"{name} {leaf.mean():.4g} \u00b1 {leaf.std():.2g}" for name, leaf in shown if leaf.size)
