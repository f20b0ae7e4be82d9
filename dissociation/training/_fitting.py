"""Training of stacked members by `fit`."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from dissociation._core import checks, files
from dissociation._core.conversion import to_device
from dissociation._core.keys import typed
from dissociation._core.results import Labelled, Over, check_names, dataset_of
from dissociation._core.types import PRNGKey, PRNGKeys, PyTree
from dissociation._core.validation import validated
from dissociation.training import _checkpoint_file as checkpoints
from dissociation.training._chunk import shapes
from dissociation.training._interrupts import interruptible
from dissociation.training._members import member_devices
from dissociation.training._partition import Partition
from dissociation.training._records import Callback, History, OfFunction, Save, record_steps
from dissociation.training._run import CHECKPOINT_FORMAT, Run, RunFile, identity_of
from dissociation.training._samplers import Sampler, as_arrays, leading_size
from dissociation.training._state import (
    State,
    Static,
    Step,
    checked_models,
    first_opt_state,
)
from dissociation.training._traced import Traced, trace

if TYPE_CHECKING:
    import xarray

logger = logging.getLogger(__name__)


class FitResult(NamedTuple):
    """Outcome of `fit`.

    Attributes:
        models: Trained models, members stacked as given.
        history: Records of the run.
        diverged_at: First step whose loss was not finite, or -1: [members], NumPy.
        num_steps: Updates in all; fewer than asked for if a callback ended the run.
        member_map: Mapping of the members: "vmap", "scan" or "unroll".
        seconds: Wall time in seconds, with compilation and the earlier parts of a resumed run.
        state: State after training: `fit(result.state, ...)` continues.
    """

    models: Any
    history: History
    diverged_at: np.ndarray
    num_steps: int
    member_map: str
    seconds: float
    state: State

    def to_xarray(self, over: Over = None) -> "xarray.Dataset":
        """Return the history, see `History.to_xarray`, and `diverged_at` [members]."""
        attrs = {
            "num_steps": self.num_steps,
            "member_map": self.member_map,
            "seconds": self.seconds,
        }
        return dataset_of_fit(self.history, self.diverged_at, over).assign_attrs(attrs)

    to_dataframe = Labelled.to_dataframe
    save = Labelled.save

    def __repr__(self) -> str:
        num_diverged = np.sum(self.diverged_at >= 0)
        members = f"{self.diverged_at.size} of {type(self.models).__name__}"
        return (
            f"FitResult({members}, {num_diverged} diverged, {self.num_steps} steps by "
            f"{self.member_map}, "
            f"{self.seconds:.3g} s, {self.history})"
        )


def dataset_of_fit(history: History, diverged_at: np.ndarray, over: Over) -> "xarray.Dataset":
    """Return a history, see `History.to_xarray`, and `diverged_at` [members]."""
    if over is None:
        over = "members"
    return history.to_xarray(over).merge(dataset_of({"diverged_at": diverged_at}, over))


@validated
def fit(
    models: PyTree,
    step: Step,
    sampler: Sampler,
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    key: PRNGKey | PRNGKeys | tuple[PRNGKey, PRNGKeys],
    hyperparams: PyTree = None,
    aux: PyTree = None,
    save: Save = Save(),  # noqa: B008  # a tuple of constants
    mesh: Any = "auto",
    member_map: str = "auto",
    members_per_batch: int | str | None = None,
    callbacks: Sequence[Any] = (),
    checkpoint: str | Path | None = None,
    same_program: bool = False,
) -> FitResult:
    """Train stacked members in compiled chunks of steps, driven by the host.

    Every call traces step and observation, and compiles them unless an equal program was compiled
    before: a new optimiser or loss that computes the same compiles nothing. Arrays that it holds or
    closes over are arguments of the compiled program, not constants.

    Args:
        models: PyTree, such as an Equinox module, whose array leaves carry members on the leading
            axis. Half-precision floats are trained, and returned, as float32. Or the `state` of
            another result, to continue with the same or another step: its optimiser state is kept
            if it fits this optimiser, else initialised, and its hyperparameters are kept if the
            optimiser is a function of them.
        step: Step of `make_step`: loss and optimiser.
        sampler: Batches: `training.Epochs`, `FullBatch`, `Online`, `HostBatches`.
        num_steps: Optimiser steps; give this or `num_epochs`.
        num_epochs: Passes over the data.
        key: One key (members fold in their index), or one key per member, for samplers that members
            do not share, or both: for the order of the data and for each member.
        hyperparams: PyTree of arrays, members first, for an optimiser that is a function of one
            member's. They are traced: a sweep over them compiles once.
        aux: PyTree that the loss carries beside the model, members first: an `eqx.nn.State`,
            multipliers.
        save: Records and their steps.
        mesh: Mesh of `dissociation.member_mesh`: devices of this process over which members are
            split, and, along the axis "data" if there is one, the samples of every batch. None: one
            device and one thread. "auto": one device; with sequential mapping on a CPU, worker
            threads train shards of the members in parallel, one per device.
            `dissociation.use_all_cores` makes every core a device.
        member_map: "vmap" (members batched in one program), "scan" (sequentially inside the
            program), "unroll" (sequentially, one step per call, no loop in the program) or "auto".
            On a CPU "auto" is "scan", or "unroll" if a step has a convolution, which XLA runs
            slowly inside a loop there; elsewhere it is "vmap".
        members_per_batch: With "vmap", number of members batched at once. None: all. "auto": as
            many as fit in the free memory, measured by one more compilation.
        callbacks: Functions `callback(step, records)`, or `Callback`s.
        checkpoint: File, or a link to one, written during the run and at its end, also after an
            interrupt (Ctrl-C, or SIGTERM, whose handler is called afterwards) or an error of a
            callback or an iterator. If it exists, the run resumes from it; under the same layout
            (mapping, devices and shards) the outcome equals the uninterrupted one bit for bit.
            Data, models, hyperparameters, key, step, sampler and observation must be the same.
            Layout, callbacks and number of steps may differ: more steps extend a finished run. The
            values of "auto" arguments are taken from the file; another layout may change bits,
            which is logged. A run that a callback ended stays ended, unless no callback records any
            more, or no record is made at that step. One call at a time uses the file.
        same_program: If True, accept a checkpoint whose program has other operations, as after an
            update of JAX.

    Raises:
        ValueError: If arguments contradict each other or the data, a record has a name that no file
            of results can hold, or the checkpoint is of another run.
        BlockingIOError: If another call is writing to the checkpoint.
        TypeError: If an argument is traced, a count is not a Python integer, data are not arrays of
            numbers, or the optimiser is not a transformation (without `hyperparams`) or not a
            function to one (with them).
    """
    began = time.perf_counter()
    checks.check_known(
        "`fit` is driven by the host",
        advice="Inside of a transformation use `train`",
        models=models,
        sampler=sampler,
        hyperparams=hyperparams,
        key=key,
    )
    state, first, total, keys = prepared(
        models,
        step,
        sampler,
        key=key,
        num_steps=num_steps,
        num_epochs=num_epochs,
        hyperparams=hyperparams,
        aux=aux,
    )
    hooks = []
    for i, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            callback = OfFunction(i, callback)
        hooks.append(callback)
    times = record_steps(save, hooks, first, total, sampler.epoch_steps)

    path = None
    header = {}
    if checkpoint is not None:
        path = files.followed(checkpoint)
        if path.exists():
            header = checkpoints.read_header(path)
    partition = Partition(len(state.step), member_map, members_per_batch, mesh)
    if header.get("format") == CHECKPOINT_FORMAT:  # `RunFile.header` raises for another one
        partition = partition.resumed(header["layout"])

    with interruptible(), ExitStack() as locks:
        run = Run(state, step, sampler, keys, save, partition, hooks, began)
        members = run.members
        partition = members.partition
        observe = run.program.observe
        check_names("save", observe and observe.out, "observed", "observed_at")
        check_names("step", run.program.info.metrics, "metrics")
        logger.info(
            "%d members by %s, %d threads, %d devices",
            partition.total,
            partition.member_map,
            members.threads,
            member_devices(partition.devices),
        )
        if path is not None:
            file = RunFile(path, identity_of(run, state, sampler, key), same_program)
            lock = files.locked(path.with_name(f".{path.name}.lock"), path)
            locks.enter_context(lock)
            run.resume(file, total, times)
        del state  # steps donate it
        run.to_the_end(total, times)

    state = jax.tree.map(to_device, partition.joined(members.states))
    return FitResult(
        models=state.model,
        history=run.record.history(),
        diverged_at=run.record.diverged_at,
        num_steps=run.step,
        member_map=partition.member_map,
        seconds=time.perf_counter() - run.clock.began,
        state=state,
    )


def prepared(
    models: Any,
    step: Step,
    sampler: Sampler,
    *,
    key: Any,
    num_steps: int | None,
    num_epochs: int | None,
    hyperparams: Any,
    aux: Any,
) -> tuple[State, int, int, tuple[Array, Array, Array]]:
    """Check arguments of `fit`; return stacked states, first and last step, and keys.

    The states are copies. Keys are those of `_split_key`.
    """
    is_continued = isinstance(models, State)
    stacked_models = models.arrays if is_continued else models
    try:
        count = leading_size("models", stacked_models)
    except checks.WrongValue as error:
        advice = (
            "Stack them: models = eqx.filter_vmap(init)(jax.random.split(key, 8)), "
            "init(key) being one model"
        )
        raise checks.WrongValue(f"{error} {advice}.") from None
    member_data = eqx.filter(sampler, eqx.is_array) if sampler.stacked else None
    stacked = {"hyperparams": hyperparams, "aux": aux, "sampler": member_data}
    for name, tree in stacked.items():
        if tree is not None:
            size = leading_size(name, as_arrays(name, tree, "members"))
            checks.check_same_length("models", count, name, size, "members")

    aux, hyperparams = jax.tree.map(to_device, (aux, hyperparams))
    first = 0
    if is_continued:
        state = models
        if aux is not None:
            state = state.replace(aux=aux)
        if hyperparams is not None or isinstance(step.optimizer, optax.GradientTransformation):
            state = state.replace(hyperparams=hyperparams)
        first = int(np.max(np.asarray(models.step)))
    else:
        arrays, static = eqx.partition(checked_models(models), eqx.is_array)
        zero_steps = to_device(np.zeros(count, int))
        static = Static(*jax.tree.flatten(static))
        state = State(arrays, aux, None, hyperparams, zero_steps, static)

    start = partial(first_opt_state, step.optimizer)
    begin = trace(start, *shapes((state.arrays, state.hyperparams), 1))
    # An optimiser's state of another call stays if it fits.
    fresh = jax.tree.flatten(begin.out)
    if is_continued and jax.tree.flatten(shapes(state.opt_state, 1)) == fresh:
        begin = None
    state = _copied(state, begin)

    if (num_steps is None) == (num_epochs is None):
        checks.fail(
            "num_steps", "be given, or `num_epochs`, but not both", f"{num_steps} and {num_epochs}"
        )
    if num_epochs is None:
        total = first + checks.check_count("num_steps", num_steps)
    else:
        maximum = (2**31 - 1) // sampler.epoch_steps
        num_epochs = checks.check_count("num_epochs", num_epochs, maximum=maximum)
        total = first + sampler.epoch_steps * num_epochs
    return state, first, total, _split_key(key, count, sampler.shared)


@eqx.filter_jit
def _copied(state: State, begin: Traced | None) -> State:
    """Return copies without weak types, as steps return them.

    If `begin` is not None, it initialises the optimiser's state of one member.
    """
    if begin is not None:
        opt_state = jax.vmap(begin)(state.arrays, state.hyperparams)
        state = dataclasses.replace(state, opt_state=opt_state)
    # Steps donate the state, and one program serves all steps.
    return jax.tree.map(lambda leaf: jnp.array(leaf, leaf.dtype), state)


def _split_key(key: Any, num_members: int, shared: bool) -> tuple[Array, Array, Array]:
    """Return keys of the data order, of the members' losses and of their observations.

    There is one key of the order if it is shared, else one per member.
    """
    order: Any = None
    if isinstance(key, tuple):
        order, key = map(typed, key)
        if not shared:
            checks.fail(
                "key",
                "be one per member if the sampler is not shared",
                "another one for the order of the data",
            )
    key = typed(key)
    if key.ndim and key.shape != (num_members,):
        checks.fail("key", f"be one key or one per member ({num_members})", f"shape {key.shape}")
    if key.ndim and shared and order is None:
        checks.fail("shared", "be False in the sampler if every member has its own key", shared)
    return _member_streams(order, key, num_members, shared)


@partial(jax.jit, static_argnums=(2, 3))
def _member_streams(
    order: Any, key: Array, num_members: int, shared: bool
) -> tuple[Array, Array, Array]:
    if key.ndim == 0:
        order, root = jax.random.split(key)
        key = jax.vmap(jax.random.fold_in, (None, 0))(root, jnp.arange(num_members))
    split = partial(jax.random.split, num=3)
    loss_keys, observe_keys, order_keys = jax.vmap(split, out_axes=1)(key)
    if not shared:
        order = order_keys
    return order, loss_keys, observe_keys
