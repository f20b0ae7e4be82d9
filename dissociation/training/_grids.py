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
from dissociation.training import _checkpoint_file as checkpoints
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
        if over is None:
            over = self.grid
        return dataset_of_fit(self.history, self.diverged_at, over)

    to_dataframe = Labelled.to_dataframe
    save = Labelled.save


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
        ImportError: If there is an `executor`, and cloudpickle is not installed.
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
        >>> key = jax.random.key(0)
        >>> result = fit_grid(
        ...     init, step, Epochs((x,), 10), grid, key=key, num_epochs=2, progress=None
        ... )
        >>> len(result.plan.groups), result.history.loss.shape
        (2, (12, 4))
        >>> grid.unflatten(result.diverged_at).shape
        (2, 2, 3)
    """
    values = grid.values
    seeds = grid.seeds() if "seed" in values else to_device(np.arange(len(grid)))
    order, keys = _keys_of_sweep(typed(key), seeds)
    if aux is not None and not makes(aux):
        aux = as_arrays("aux", aux, "members")
        checks.check_same_length("grid", len(grid), "aux", leading_size("aux", aux), "members")

    init_names = list(inspect.signature(init).parameters)[1:]
    shape_names = [name for name in values if name in init_names]
    shape_of = []
    for member in range(len(grid)):
        shape_of.append(tuple((name, values[name][member].item()) for name in shape_names))
    hyperparam_names = [name for name in values if name not in (*shape_names, "seed")]
    hyperparams = jax.device_get(grid.hyperparams(*hyperparam_names))
    _check_names(grid, step.optimizer, hyperparams, init_names)

    length = {"num_steps": num_steps, "num_epochs": num_epochs}
    how = {"mesh": mesh, "member_map": member_map, "members_per_batch": members_per_batch}
    sweep = Sweep(
        init, step, sampler, grid, keys, order, shape_of, hyperparams, aux, length, save, how
    )
    columns = {name: column.tolist() for name, column in values.items()}
    identity = {  # `fit` compares the program of each group
        "grid": {"axes": list(grid.axes), "values": columns},
        "key": checkpoints.fingerprint(key),
        **length,
    }

    if num_groups is not None:
        checks.check_count("num_groups", num_groups, minimum=1)
    if executor is not None and folder is None:
        checks.fail("folder", "be given with `executor`, whose workers write to it", folder)
    if executor is not None and mesh not in (None, "auto"):
        checks.fail_kind("mesh", 'be None or "auto" with `executor`', repr(mesh))

    with interruptible(), opened(folder, identity, fresh) as sweep_folder:
        plan_here = partial(
            planned, sweep, memory_budget, num_groups, keeps=folder is None, progress=progress
        )
        if executor is None or sweep_folder.path is None:
            plan = sweep_folder.plan(plan_here, how, num_groups)
        else:
            make_plan = partial(planned, sweep, memory_budget, num_groups)
            contents = (make_plan, sweep, same_program)
            with submitting(executor, sweep_folder.path, contents) as tasks:
                plan_there = partial(tasks.run, {None: "the plan"}, len)
                plan = sweep_folder.plan(lambda: plan_there() or plan_here(), how, num_groups)
                tasks.train(plan, sweep.num_steps, progress)
        logger.info("%s", plan)
        return _run(sweep, plan, sweep_folder, progress, same_program)


@jax.jit
def _keys_of_sweep(key: Array, seeds: Array) -> tuple[Array, Array]:
    """Return the key of the data order, and keys [members, 2] of each model and its training."""
    root, order = jax.random.split(key)
    return order, jax.vmap(jax.random.split)(folded(root, seeds))


def _check_names(
    grid: Grid, optimizer: Any, hyperparams: dict[str, Any], init_names: list[str]
) -> None:
    """Raise for names of results, and for quantities that the optimiser does not read, or lacks."""
    for name in grid.values:
        if name in RESERVED or "/" in name or name.startswith(("observed_", "metrics_")):
            requirement = (
                f"have other names than {', '.join(RESERVED)}, no slash, and no prefix "
                "observed_ or metrics_"
            )
            checks.fail("grid", requirement, repr(name))

    example = {name: float(column[0]) for name, column in hyperparams.items()}
    error = _error_of(optimizer, example)
    if example and isinstance(error, KeyError):
        grid_names = f"{', '.join(example)}, without {error}"
        checks.fail("grid", "hold what the optimiser reads", grid_names)
    if error is not None:  # `fit` raises it
        return

    for name in example:
        without_name = {key: number for key, number in example.items() if key != name}
        if _error_of(optimizer, without_name) is None:
            taken = ", ".join(init_names) or "nothing"
            requirement = (
                f"hold nothing but seeds, what `init` takes by name ({taken}), "
                "and what the optimiser reads"
            )
            checks.fail("grid", requirement, repr(name))


def _error_of(optimizer: Any, hyperparams: dict[str, float]) -> Exception | None:
    """Return the error that `optimizer` raises for these hyperparameters, or None."""
    try:
        optimizer(hyperparams)
    except Exception as error:
        return error
    return None


def _run(
    sweep: Sweep,
    plan: Plan,
    sweep_folder: SweepFolder,
    progress: str | MeterFactory | None,
    same_program: bool,
) -> GridResult:
    """Train the groups of a plan sequentially, and join their results in the order of the grid."""
    num_steps = sweep.num_steps
    histories = []
    records = []
    seconds = []
    with closing(open_meter(progress, num_steps * len(plan.groups), str(plan))) as meter:
        for index in range(len(plan.groups)):
            meter.advance(index * num_steps, "compiling")
            steps = _Steps(meter, index * num_steps)
            try:
                result = sweep_folder.fit(index, sweep, steps, same_program)
            except checks.WrongValue as error:
                if not str(error).startswith("`checkpoint`"):
                    raise
                raise checks.WrongValue(
                    f"{error} Or pass fresh=True, which sets {sweep_folder.path} aside."
                ) from error

            history = result.history
            histories.append(history)
            records.append((history.loss, history.observed, history.metrics, result.diverged_at))
            seconds.append(result.seconds)
            sweep_folder.finish(index, (result.models, result.state.aux))
            del result

    rows_in_grid = np.argsort(np.concatenate(plan.groups))
    loss, observed, metrics, diverged_at = take(concatenate(records), rows_in_grid)
    history = histories[0]._replace(loss=loss, observed=observed, metrics=metrics)

    trained = partial(_trained, sweep, plan, sweep_folder)
    models_of = lambda members: trained(members)[0]  # noqa: E731
    aux_of = None if sweep.aux is None else lambda members: trained(members)[1]
    return GridResult(sweep.grid, history, diverged_at, plan, tuple(seconds), models_of, aux_of)


def _trained(
    sweep: Sweep, plan: Plan, sweep_folder: SweepFolder, members: Any
) -> tuple[PyTree, PyTree]:
    """Return trained models and `aux` of some members, stacked in the order of `members`."""
    position_of_member = {}
    for index, group in enumerate(plan.groups):
        for row, member in enumerate(group):
            position_of_member[member] = (index, row)

    members = np.atleast_1d(np.asarray(members, int)).tolist()
    for member in members:
        if member not in position_of_member:
            last = len(position_of_member) - 1
            checks.fail("members", f"be places in the grid, from 0 to {last}", member)
    shapes = {sweep.shape_of[member] for member in members}
    if len(shapes) != 1:
        listed_shapes = ", ".join(map(str, sorted(shapes)))
        checks.fail("members", "have one shape", f"{len(shapes)} shapes: {listed_shapes}")

    group_trees = {}
    trees = []
    for member in members:
        index, row = position_of_member[member]
        if index not in group_trees:
            group_trees[index] = sweep_folder.trained(index, sweep, plan)
        trees.append(take(group_trees[index], row))
    arrays, static = eqx.partition(stack(trees), eqx.is_array)
    return eqx.combine(jax.tree.map(to_device, arrays), static)


class _Steps(Callback):
    """Advance a sweep's meter by the steps of one group, after the steps of earlier groups."""

    def __init__(self, meter: Any, num_earlier_steps: int):
        self.meter = meter
        self.num_earlier_steps = num_earlier_steps

    def advance(self, step: int, loss: np.ndarray) -> None:
        text = ""
        if loss.size:
            text = f"loss {loss.mean():.3g}"
        self.meter.advance(self.num_earlier_steps + step, text)
