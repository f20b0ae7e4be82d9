"""Sweeps over a grid by `fit_grid`, stored group by group."""

import inspect
import logging
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PyTree

from dissociation._core import checks
from dissociation._core.conversion import to_device
from dissociation._core.keys import typed
from dissociation._core.results import Labelled, Over
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.training import _checkpoint as checkpoints
from dissociation.training._executor import submitting
from dissociation.training._fitting import dataset_of_fit
from dissociation.training._interrupts import interruptible
from dissociation.training._members import concatenate, stack, take
from dissociation.training._plan import Plan, Sweep, makes, planned
from dissociation.training._progress import MeterFactory, open_meter
from dissociation.training._records import Callback, History, Save
from dissociation.training._samplers import Sampler, as_arrays, leading_size
from dissociation.training._state import Step
from dissociation.training._sweep_folder import SweepFolder, opened
from dissociation.training._sweeps import Grid, folded

if TYPE_CHECKING:
    import xarray

RESERVED = ("loss", "steps", "observed", "observed_at", "metrics", "members", "diverged_at")
"""Names of axes and arrays of results."""

logger = logging.getLogger(__name__)


class GridResult(NamedTuple):
    """Outcome of `fit_grid`.

    Attributes:
        grid: Values of the members.
        history: Records of all members, in the order of the grid.
        diverged_at: First step whose loss was not finite, or -1: [members].
        plan: Groups, and the memory estimate.
        seconds: Wall time in seconds of every group, with earlier calls for the same folder.
        models_of: Function from indices in the grid, such as `numpy.arange(len(grid))`, to trained
            models, stacked; all of one shape. `bmap(measure)(result.models_of(indices))` measures
            them.
        aux_of: The same for the trained `aux`; None without one.
    """

    grid: Grid
    history: History
    diverged_at: np.ndarray
    plan: Plan
    seconds: tuple[float, ...]
    models_of: Callable[[Any], PyTree]
    aux_of: Callable[[Any], PyTree] | None = None

    def __repr__(self) -> str:
        return f"GridResult({self.grid}, {self.plan}, {sum(self.seconds):.0f} s)"

    def to_xarray(self, over: Over = None) -> "xarray.Dataset":
        """Return the history along the grid's axes, see `History.to_xarray`, and `diverged_at`."""
        return dataset_of_fit(self.history, self.diverged_at, self.grid if over is None else over)

    to_dataframe, save = Labelled.to_dataframe, Labelled.save


@validated
def fit_grid(
    init: Callable[..., PyTree],
    step: Step,
    sampler: Sampler,
    grid: Grid,
    *,
    key: PRNGKey,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    aux: PyTree = None,
    save: Save = Save(),  # noqa: B008  # a tuple of constants
    mesh: Any = "auto",
    member_map: str = "auto",
    members_per_batch: int | str | None = None,
    folder: str | Path | None = None,
    fresh: bool = False,
    same_program: bool = False,
    memory_budget: int | None = None,
    num_groups: int | None = None,
    executor: Any = None,
    progress: str | MeterFactory | None = "auto",
) -> GridResult:
    """Train all members of a grid, as many at once as fit in memory, and store each finished group.

    `init` receives the quantities of the grid that it takes by name, such as a width, as Python
    numbers. A group has members for which these quantities are equal. The quantity "seed"
    determines a member's key; without it, the index in the grid does. The optimiser is a function
    of a dictionary of all other quantities. They are traced, so new values compile nothing. The
    choice of groups changes results by rounding only.

    Args:
        init: Function from a key, and quantities of the grid by name, to a model.
        step: Step of `make_step`.
        sampler: Batches, see `fit`.
        grid: Quantities of the members.
        key: Key of all randomness.
        num_steps: Optimiser steps; give this or `num_epochs`.
        num_epochs: Passes over the data.
        aux: PyTree that the loss takes and returns beside the model, such as the `eqx.nn.State` of
            batch normalisation. It is given as arrays with members first, in the order of the grid,
            or as a function that returns the PyTree of one member: `lambda key:
            eqx.nn.make_with_state(Net)(key)[1]`. The function gets the arguments of `init`, with
            the same key.
        save: Records and their steps; the shapes of records must be the same in all groups.
        mesh: Devices of each group, see `fit`.
        member_map: Mapping of the members of a group, see `fit`.
        members_per_batch: Members batched at once, see `fit`.
        folder: Folder for the checkpoints and trained models of the groups. A second call with the
            same arguments resumes from the folder, and reads a finished sweep. None: trained models
            stay in memory.
        fresh: If True, move the files of an earlier sweep to a subfolder, such as `before-1`, and
            start from scratch.
        same_program: If True, accept checkpoints whose programs have other operations, as after an
            update of JAX.
        memory_budget: Bytes for the training of a group; compilation needs more. None: nine tenths
            of the free memory of an accelerator, or half of the free memory of the host.
        num_groups: Least number of groups, which tasks of an executor train at the same time. None:
            as many as memory needs, often one.
        executor: Object whose `submit(function, *arguments)` returns a future with `result()` and
            `done()`, such as Dask's `client.get_executor(pure=False)`. Its workers, which see
            `folder`, plan the sweep and train the groups first; a group that they lose is trained
            here. Functions and arrays of the sweep are in `folder` meanwhile, as a pickle: who can
            write there can run code on the workers.
        progress: Progress meter: first of the compilations that estimate memory, then of the steps
            of all groups, with the memory estimate as its description.

    Raises:
        ValueError: If the optimiser does not read a quantity, a single member does not fit in
            memory, arguments contradict each other, or the folder holds another sweep.
        RuntimeError: If the training of a group raised an error in a worker, or its packages are
            not those here.
        TypeError: If a quantity is text but not an argument of `init`, `init` takes no key, or the
            optimiser is not a function of the other quantities.

    Example:
        >>> import equinox as eqx
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from dissociation.training import Epochs
        >>> from dissociation.training import make_step
        >>> grid = Grid(width=[4, 8], rate=[0.1, 0.01], seed=[0, 1, 2])
        >>> x = jnp.ones((20, 5))
        >>> init = lambda key, width: eqx.nn.MLP(5, 1, width, 1, key=key)
        >>> loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch[0]) ** 2)
        >>> step = make_step(loss, lambda values: optax.sgd(values["rate"]))
        >>> result = fit_grid(init, step, Epochs((x,), 10), grid, key=jax.random.key(0), num_epochs=2, progress=None)
        >>> len(result.plan.groups), result.history.loss.shape, grid.unflatten(result.diverged_at).shape
        (2, (12, 4), (2, 2, 3))
    """
    seeds = grid.seeds() if "seed" in grid.values else to_device(np.arange(len(grid)))
    order, keys = _keys_of_sweep(typed(key), seeds)
    if aux is not None and not makes(aux):
        aux = as_arrays("aux", aux, "members")
        checks.check_same_length("grid", len(grid), "aux", leading_size("aux", aux), "members")
    values, taken = grid.values, list(inspect.signature(init).parameters)[1:]
    shapes = tuple(name for name in values if name in taken)
    shape_of = [
        tuple((name, values[name][member].item()) for name in shapes) for member in range(len(grid))
    ]
    hyperparams = jax.device_get(
        grid.hyperparams(*(name for name in values if name not in (*shapes, "seed")))
    )
    _check_names(grid, step.optimizer, hyperparams, taken)
    length = {"num_steps": num_steps, "num_epochs": num_epochs}
    how = {"mesh": mesh, "member_map": member_map, "members_per_batch": members_per_batch}
    sweep = Sweep(
        init, step, sampler, grid, keys, order, shape_of, hyperparams, aux, length, save, how
    )
    identity = {  # `fit` compares the program of each group
        "grid": {
            "axes": list(grid.axes),
            "values": {name: column.tolist() for name, column in values.items()},
        },
        "key": checkpoints.fingerprint(key),
        **length,
    }
    if num_groups is not None:
        checks.check_count("num_groups", num_groups, minimum=1)
    if executor is not None and folder is None:
        checks.fail("folder", "be given with `executor`, whose workers write to it", folder)
    if executor is not None and mesh not in (None, "auto"):
        checks.fail_kind("mesh", 'be None or "auto" with `executor`', repr(mesh))
    with interruptible(), opened(folder, identity, fresh) as kept:
        plan_here = partial(
            planned, sweep, memory_budget, num_groups, keeps=folder is None, progress=progress
        )
        if executor is None or kept.path is None:
            plan = kept.plan(plan_here, how, num_groups)
        else:
            with submitting(
                executor, kept.path, (sweep, memory_budget, num_groups, same_program)
            ) as tasks:
                plan = kept.plan(lambda: tasks.plan() or plan_here(), how, num_groups)
                tasks.train(plan, sweep.num_steps, progress)
        logger.info("%s", plan)
        return _run(sweep, plan, kept, progress, same_program)


@jax.jit
def _keys_of_sweep(key: Array, seeds: Array) -> tuple[Array, Array]:
    """Return the key of the data order, and keys of each member's model and training: [members, 2]."""
    root, order = jax.random.split(key)
    return order, jax.vmap(jax.random.split)(folded(root, seeds))


def _check_names(grid: Grid, optimizer: Any, hyperparams: dict[str, Any], taken: list[str]) -> None:
    """Raise for names of results, and for quantities that the optimiser does not read, or lacks."""
    for name in grid.values:
        if name in RESERVED or "/" in name or name.startswith(("observed_", "metrics_")):
            wanted = (
                f"have other names than {', '.join(RESERVED)}, no slash, and no prefix "
                "observed_ or metrics_"
            )
            checks.fail("grid", wanted, repr(name))

    def failure(values: dict[str, float]) -> Exception | None:
        try:
            optimizer(values)
        except Exception as error:
            return error
        return None

    first = {name: float(column[0]) for name, column in hyperparams.items()}
    if first and isinstance(lacking := failure(first), KeyError):
        checks.fail(
            "grid", "hold what the optimiser reads", f"{', '.join(first)}, without {lacking}"
        )
    for name in first if failure(first) is None else ():  # `fit` raises other errors
        if failure({other: value for other, value in first.items() if other != name}) is None:
            wanted = (
                "hold nothing but seeds, what `init` takes by name "
                f"({', '.join(taken) or 'nothing'})"
            )
            checks.fail("grid", f"{wanted}, and what the optimiser reads", repr(name))


def _run(
    sweep: Sweep,
    plan: Plan,
    kept: SweepFolder,
    progress: str | MeterFactory | None,
    same_program: bool,
) -> GridResult:
    parts, how, num_steps = [], kept.how(sweep.how), sweep.num_steps
    with closing(open_meter(progress, num_steps * len(plan.groups), str(plan))) as meter:
        for index, members in enumerate(plan.groups):
            meter.advance(index * num_steps, "compiling")
            steps = _Steps(meter, index * num_steps)
            try:
                result = sweep.fit(
                    members, how, kept.file(index, "ckpt"), steps, same_program=same_program
                )
            except checks.WrongValue as error:
                if kept.path is None or not str(error).startswith("`checkpoint`"):
                    raise
                raise checks.WrongValue(
                    f"{error} Or pass fresh=True, which sets {kept.path} aside."
                ) from error
            parts.append((result.history, result.diverged_at, result.seconds))
            kept.finish(index, (result.models, result.state.aux))
            del result
    order = np.argsort(np.concatenate([np.asarray(members) for members in plan.groups]))
    histories, diverged, seconds = zip(*parts, strict=True)
    recorded = [
        (each.loss, each.observed, each.metrics, own)
        for each, own in zip(histories, diverged, strict=True)
    ]
    loss, observed, metrics, diverged_at = take(concatenate(recorded), order)
    history = histories[0]._replace(loss=loss, observed=observed, metrics=metrics)
    trained = partial(_trained, sweep, plan, kept)
    aux_of = None if sweep.aux is None else lambda members: trained(members)[1]
    return GridResult(
        sweep.grid, history, diverged_at, plan, seconds, lambda members: trained(members)[0], aux_of
    )


def _trained(sweep: Sweep, plan: Plan, kept: SweepFolder, members: Any) -> tuple[PyTree, PyTree]:
    """Return trained models and `aux` of some members, stacked in this order."""
    members = np.atleast_1d(np.asarray(members, int)).tolist()
    places = {
        member: (index, row)
        for index, group in enumerate(plan.groups)
        for row, member in enumerate(group)
    }
    for member in members:
        if member not in places:
            checks.fail("members", f"be places in the grid, from 0 to {len(places) - 1}", member)
    shapes = {sweep.shape_of[member] for member in members}
    if len(shapes) != 1:
        checks.fail(
            "members",
            "have one shape",
            f"{len(shapes)} shapes: {', '.join(map(str, sorted(shapes)))}",
        )
    loaded = {
        index: kept.trained(index, sweep, plan)
        for index in {places[member][0] for member in members}
    }
    own = [take(loaded[index], row) for index, row in (places[member] for member in members)]
    return jax.tree.map(lambda leaf: to_device(leaf) if eqx.is_array(leaf) else leaf, stack(own))


class _Steps(Callback):
    """Advance a sweep's meter by the steps of one group, after `before` steps of others."""

    def __init__(self, meter: Any, before: int):
        self.meter, self.before = meter, before

    def advance(self, step: int, loss: np.ndarray) -> None:
        self.meter.advance(self.before + step, f"loss {loss.mean():.3g}" if loss.size else "")
