"""`fit`: from models, a loss and data to trained models and their history."""

import time
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
from dissociation.member_map import MEMBER_MAPS
from dissociation.progress import MeterFactory, open_meter
from dissociation.schedule import check_steps, steps_per_epoch
from dissociation.training.run import Batches, History, Run
from dissociation.training.steps import MemberInputs, Program


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
    shown: Sequence[str] | None = None,
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
        shown: Names of observed numbers, one per member each, for progress to show beside the loss; default: six.
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
    members = MemberInputs(
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
    order_keys = None if shared_batches else member_keys
    if mesh is not None and order_keys is not None:
        order_keys = sharding.pad_members(order_keys, mesh.size)
    program = Program(loss, observe, optimizer, data, static, members, member_map, members_per_batch, mesh)
    batches = Batches(num_samples, batch_size, epoch_steps, data_key, order_keys)
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
    run = Run(program, params, batches, num_members, checkpoint, identity, checkpoint_seconds)
    run.resume()
    run.began = began
    meter = open_meter(progress, total, "training")
    try:
        run.to_the_end(total, times, meter, log, shown)
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


def _leading_size(name: str, tree: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves if eqx.is_array_like(leaf)]
    sizes: dict[str, tuple[int, ...]] = {path: np.shape(leaf)[:1] for path, leaf in arrays}
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
    return int(first[0])


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
