"""`fit`: from models, a loss and data to trained models and their history."""

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from dissociation import checks, files, sharding
from dissociation.conversion import as_array, as_numbers, check_fits, describe, number_kind
from dissociation.member_map import MEMBER_MAPS
from dissociation.progress import MeterFactory, open_meter
from dissociation.schedule import check_steps, steps_per_epoch
from dissociation.training.run import Batches, History, Run, check_shown
from dissociation.training.steps import MemberInputs, Program, trace_gradient, trace_observation, trace_optimizer
from dissociation.training.traced import Code, Traced
from dissociation.types import PRNGKey, PRNGKeys
from dissociation.validation import validated


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


@validated
def fit(
    models: PyTree,
    loss: Callable[..., Any],
    data: PyTree,
    optimizer: optax.GradientTransformation | Callable[[Any], optax.GradientTransformation],
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None,
    key: PRNGKey | PRNGKeys,
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
    same_program: bool = False,
) -> FitResult:
    """Trains stacked members side by side.

    In every epoch the samples are put in a random order and cut into batches; the last one is smaller if
    `batch_size` does not divide their number. A step is `optax.apply_updates(params, update)` on every inexact
    array of a member; other arrays of a model stay as they are.

    Loss, optimiser and observation are traced at every call, and compiled unless an equal program was before: an
    optimiser or a loss that the caller made anew compiles nothing if it computes the same.

    Args:
        models: An Equinox module, or any PyTree, whose array leaves carry members on the leading axis. Floats
            of half precision are trained, and returned, as float32.
        loss: `loss(model, batch, key) -> scalar` for one member; the key differs by step and member. Arrays that it
            holds or closes over are passed to the compiled program, not baked into it.
        data: A PyTree of finite arrays, samples first, the same for all members.
        optimizer: An Optax transformation, or, with `hyperparams`, a function from one member's to one.
        num_steps: Optimiser steps; give this or `num_epochs`.
        num_epochs: Passes over the data.
        batch_size: Samples in a batch; None takes all of them in every step, in the given order.
        key: One key (members fold in their index), or one key per member, which needs `shared_batches=False`.
        hyperparams: A PyTree of arrays, members first. They are traced: a sweep over them compiles once.
        shared_batches: Whether all members see the same batches in the same order.
        drop_remainder: Whether to drop the last, smaller batch of an epoch.
        observe: `observe(model, step, key) -> PyTree of arrays` for one member, `step` traced.
        observe_at: Steps at which to observe and to call `log`, 0 (before the first update) and the last included
            if wanted; default: the beginning and the end of every epoch, and none without `observe` and `log`.
        member_map: "vmap" (members batched in one program), "scan" (in turn inside the program), "unroll" (in
            turn, one step per call, no loop in the program) or "auto": on a CPU "scan", or "unroll" if the loss
            contains a convolution, which XLA's CPU backend runs slowly inside a loop; elsewhere "vmap".
        members_per_batch: With "vmap", how many members are batched at once; None means all.
        mesh: A mesh from `sharding.member_mesh`, over whose devices the members are laid.
        progress: None, "terminal", "notebook" or a meter factory, see `dissociation.progress`.
        shown: Names of observed numbers, one per member each, for progress to show beside the loss; default: six.
        log: `log(step, records)` on the host at the steps of `observe_at`; `records["loss"]` is each member's mean
            loss since the last record ([members], NaN at the start), `records["observed"]` the observation with
            members first. Returning True (or NumPy's or JAX's form of it)
            stops the run.
        checkpoint: A file. If it exists the run goes on from it, and the outcome equals the uninterrupted one bit
            for bit; it is written as the run goes on, on an interrupt, and at the end. It goes on from the same data,
            models, hyperparameters and key, under the same loss, optimiser and observation; devices, mapping, and the
            number of steps may be others: a finished run is extended by more of them. One that `log` stopped stays
            stopped, unless there is no `log` any more, or no observation at that step. One call at a time has it.
        checkpoint_seconds: The least time between two writes.
        same_program: Take the checkpoint's loss, optimiser and observation for the same, though they are not traced to
            the same operations, as after an update of JAX.

    Returns:
        A `FitResult`.

    Raises:
        ValueError: If arguments contradict each other or the data, or the checkpoint is of another run.
        BlockingIOError: If another call is writing to the checkpoint.
        TypeError: If a count is no Python integer, data are no arrays of numbers, or `optimizer` is no transformation
            (without `hyperparams`) or no function to one (with them).
    """
    began = time.perf_counter()
    data, models = _as_arrays("data", data, "samples", finite=True), _checked_models(models)
    num_samples, num_members = _leading_size("data", data), _leading_size("models", models)
    if hyperparams is not None:
        hyperparams = _as_arrays("hyperparams", hyperparams, "members")
        found = _leading_size("hyperparams", hyperparams)
        checks.check_same_length("models", num_members, "hyperparams", found, "members")
    epoch_steps = steps_per_epoch(num_samples, batch_size, drop_remainder=drop_remainder)
    total = _total_steps(num_steps, num_epochs, epoch_steps)
    if observe_at is None:
        observe_at = _ends_of_epochs(total, epoch_steps) if observe or log else np.zeros(0, int)
    times = check_steps("observe_at", observe_at, total)
    _check_optimizer(optimizer, hyperparams)
    if mesh is not None:
        sharding.check_mesh(mesh)

    order_keys, loss_keys, observe_keys = _split_key(key, num_members, shared_batches)
    params, frozen, static = _split_models(models)
    members = MemberInputs(frozen, jax.tree.map(jnp.asarray, hyperparams), loss_keys, observe_keys)
    data = jax.tree.map(jnp.asarray, data)
    one_params, one = _example(params), _example(members)

    @functools.cache
    def gradient(size: int | None) -> Traced:
        batch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((size or num_samples, *leaf.shape[1:]), leaf.dtype), data
        )
        return trace_gradient(loss, static, one_params, one.frozen, batch, one.loss_key)

    member_map = _choose_map(member_map, members_per_batch, mesh, gradient(batch_size).code)
    traced = (
        *trace_optimizer(optimizer, one.hyperparams, one_params),
        None if observe is None else trace_observation(observe, static, one_params, one.frozen, one.observe_key),
    )
    check_shown(shown, traced[-1])
    # The state is donated to every chunk; the caller's arrays must outlive it.
    params = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
    if mesh is not None:
        params, members = (
            sharding.place_members(sharding.pad_members(tree, mesh.size), mesh) for tree in (params, members)
        )
        data = sharding.replicate(data, mesh)
        if not shared_batches:
            order_keys = sharding.pad_members(order_keys, mesh.size)
    program = Program(*traced, data, members, member_map, members_per_batch, mesh)
    batches = Batches(num_samples, batch_size, epoch_steps, order_keys)
    identity = None
    if checkpoint is not None:
        identity = {
            **_fingerprints(gradient(batch_size), *traced),
            "batch_size": batch_size,
            "drop_remainder": drop_remainder,
            "shared_batches": shared_batches,
            "data": checkpoints.fingerprint(data),
            "models": checkpoints.fingerprint(models),
            "hyperparams": checkpoints.fingerprint(hyperparams),
            "key": checkpoints.fingerprint(key),
        }
    run = Run(program, gradient, params, batches, num_members, checkpoint, identity, checkpoint_seconds)
    with _held(run.path):
        run.resume(total, times, same_program)
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


def _held(path: Path | None) -> AbstractContextManager[None]:
    return nullcontext() if path is None else files.locked(path.with_name(f".{path.name}.lock"), path)


def _as_arrays(name: str, tree: Any, first: str, *, finite: bool = False) -> Any:
    """The tree with an array for every leaf; what is none is named by its place."""

    def one(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float, complex, str, bytes)):
            found = f"{describe(leaf)} at {name}{jax.tree_util.keystr(path)}"
            checks.fail_kind(name, f"hold arrays, {first} first", found, "numpy.asarray makes an array of a list")
        place = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.Array) and number_kind(leaf.dtype) == "key":
            return leaf
        array = as_array(place, leaf, may_be_empty=True)
        check_fits(place, array)
        if finite and number_kind(array.dtype) in ("float", "complex"):
            checks.check_finite(place, array)
        return array

    return jax.tree_util.tree_map_with_path(one, tree)


def _checked_models(models: Any) -> Any:
    """Models whose arrays hold real numbers that JAX keeps, none of them in half precision."""

    def one(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) and not eqx.is_inexact_array(leaf):
            return leaf
        place = f"models{jax.tree_util.keystr(path)}"
        array = as_array(place, leaf, "real numbers", may_be_empty=True)
        check_fits(place, array)
        return as_numbers(place, array, frozenset({"bool", "int", "float"}))

    return jax.tree_util.tree_map_with_path(one, models)


def _leading_size(name: str, tree: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in leaves
        if eqx.is_array(leaf) or isinstance(leaf, np.ndarray)
    ]
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
    if not first[0]:
        checks.fail(name, "not be empty", f"a leading axis of length 0 ({first_path})")
    return int(first[0])


def _total_steps(num_steps: int | None, num_epochs: int | None, epoch_steps: int) -> int:
    if (num_steps is None) == (num_epochs is None):
        checks.fail("num_steps", "be given, or `num_epochs`, but not both", f"{num_steps} and {num_epochs}")
    if num_epochs is not None:
        return checks.check_count("num_epochs", num_epochs) * epoch_steps
    return checks.check_count("num_steps", num_steps)


def _ends_of_epochs(total: int, epoch_steps: int) -> Int[np.ndarray, " times"]:
    return np.union1d(np.arange(0, total + 1, epoch_steps), [total])


def _choose_map(member_map: str, members_per_batch: int | None, mesh: Mesh | None, gradient: Code) -> str:
    """How members are mapped: as asked, or as suits the platform and the gradient's operations."""
    checks.check_choice("member_map", member_map, ("auto", *MEMBER_MAPS))
    if members_per_batch is not None:
        checks.check_count("members_per_batch", members_per_batch, minimum=1)
    if member_map == "auto":
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        in_turn = "unroll" if "conv_general_dilated" in gradient.primitives else "scan"
        member_map = in_turn if platform == "cpu" else "vmap"
    if members_per_batch is not None and member_map != "vmap":
        wanted = f"be None where members go in turn (member_map={member_map!r})"
        checks.fail("members_per_batch", wanted, members_per_batch)
    return member_map


def _fingerprints(gradient: Traced, init: Traced, update: Traced, observe: Traced | None) -> dict[str, Any]:
    """What `same_program=True` skips: the program by its parts, and the precision of matrix products in it."""
    precision = getattr(jax.config, "jax_default_matmul_precision", None)
    return {
        "loss": [gradient.fingerprint(), precision],
        "optimizer": [init.fingerprint(), update.fingerprint(), precision],
        "observe": None if observe is None else [observe.fingerprint(), precision],
    }


def _check_optimizer(optimizer: Any, hyperparams: Any) -> None:
    made = isinstance(optimizer, optax.GradientTransformation)
    if hyperparams is None and not made:
        raise TypeError(
            f"`optimizer` must be an optax.GradientTransformation where `hyperparams` is None, got {optimizer!r}. "
            "Call it, as in optax.adam(1e-3), or give the hyperparameters that it is to be called with."
        )
    if hyperparams is not None and (made or not callable(optimizer)):
        raise TypeError(
            "`optimizer` must be a function of one member's hyperparameters where `hyperparams` is given, got "
            f"{optimizer!r}, which does not use them."
        )


def _split_key(key: Any, num_members: int, shared_batches: bool) -> tuple[Array, Array, Array]:
    """Keys of the order of the data (one, or one per member), of every member's losses and of its observations."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    shared: Any = None
    if key.ndim == 0:
        shared, root = jax.random.split(key)
        key = jax.vmap(lambda i: jax.random.fold_in(root, i))(jnp.arange(num_members))
    elif key.shape != (num_members,):
        checks.fail("key", f"be one key or one per member ({num_members})", f"shape {key.shape}")
    elif shared_batches:
        checks.fail("shared_batches", "be False where every member has a key of its own", shared_batches)
    loss_keys, observe_keys, order_keys = jnp.moveaxis(jax.vmap(lambda k: jax.random.split(k, 3))(key), 1, 0)
    return (shared if shared_batches else order_keys), loss_keys, observe_keys


def _example(tree: Any) -> Any:
    """The arrays of one member, as shapes and dtypes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def _split_models(models: Any) -> tuple[Any, Any, Any]:
    """Trained arrays, other arrays, and all else."""
    models = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, models)
    params, rest = eqx.partition(models, eqx.is_inexact_array)
    return params, *eqx.partition(rest, eqx.is_array)
