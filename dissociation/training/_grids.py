"""Sweeps over a grid by `fit_grid`, stored group by group."""

import inspect
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from dissociation._core import checks, files
from dissociation._core.keys import typed
from dissociation._core.results import Labels, Over
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.training import _checkpoint as checkpoints
from dissociation.training import _distributed as distributed
from dissociation.training._fitting import dataset_of_fit, fit
from dissociation.training._interrupts import terminations_interrupt
from dissociation.training._members import concatenate, stack, take
from dissociation.training._partition import Partition, Threads, without_layout
from dissociation.training._plans import Plan, Sweep, makes, planned
from dissociation.training._progress import MeterFactory, open_meter
from dissociation.training._records import Callback, History, Save
from dissociation.training._samplers import Sampler, as_arrays, leading_size
from dissociation.training._state import Step
from dissociation.training._sweeps import Grid

if TYPE_CHECKING:
    import xarray

MANIFEST = "sweep.json"
"""File with the settings, groups and layout of a sweep."""
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
        models_of: Function from indices in the grid, such as `numpy.arange(len(grid))`, to trained models, stacked; all
            of one shape. `bmap(measure)(result.models_of(indices))` measures them.
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

    to_dataframe, save = Labels.to_dataframe, Labels.save


@without_layout
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
    progress: str | MeterFactory | None = "auto",
) -> GridResult:
    """Train all members of a grid, as many at once as fit in memory, and store each finished group.

    `init` receives the quantities of the grid that it takes by name, such as a width, as Python numbers. A group has
    members for which these quantities are equal. The quantity "seed" determines a member's key; without it, the index
    in the grid does. The optimiser is a function of a dictionary of all other quantities. They are traced, so new
    values compile nothing. The choice of groups changes results by rounding only.

    Args:
        init: Function from a key, and quantities of the grid by name, to a model.
        step: Step of `make_step`.
        sampler: Batches, see `fit`.
        grid: Quantities of the members.
        key: Key of all randomness.
        num_steps: Optimiser steps; give this or `num_epochs`.
        num_epochs: Passes over the data.
        aux: PyTree that the loss takes and returns beside the model, such as the `eqx.nn.State` of batch normalisation.
            It is given as arrays with members first, in the order of the grid, or as a function that returns the PyTree
            of one member: `lambda key: eqx.nn.make_with_state(Net)(key)[1]`. The function gets the arguments of `init`,
            with the same key.
        save: Records and their steps; the shapes of records must be the same in all groups.
        mesh: Devices of each group, see `fit`.
        member_map: Mapping of the members of a group, see `fit`.
        members_per_batch: Members batched at once, see `fit`.
        folder: Folder for the checkpoints and trained models of the groups. A second call with the same arguments
            resumes from the folder, and reads a finished sweep. None: trained models stay in memory.
        fresh: If True, move the files of an earlier sweep to a subfolder, such as `before-1`, and start from scratch.
        same_program: If True, accept checkpoints whose programs have other operations, as after an update of JAX.
        memory_budget: Bytes for the training of a group; compilation needs more. None: nine tenths of the free memory
            of an accelerator, or half of the free memory of the host.
        progress: Progress meter: first of the compilations that estimate memory, then of the steps of all groups, with
            the memory estimate as its description.

    Raises:
        ValueError: If the optimiser does not read a quantity, a single member does not fit in memory, arguments
            contradict each other, or the folder holds another sweep.
        TypeError: If a quantity is text but not an argument of `init`, `init` takes no key, or the optimiser is not a
            function of the other quantities.

    Example:
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
    root, order = jax.random.split(typed(key))
    drawn = jax.vmap(partial(jax.random.fold_in, root))
    keys = grid.keys(root) if "seed" in grid.values else drawn(jnp.arange(len(grid)))
    keys = jax.vmap(jax.random.split)(keys)  # for a member's model, and for its training
    if aux is not None and not makes(aux):
        aux = as_arrays("aux", aux, "members")
        checks.check_same_length("grid", len(grid), "aux", leading_size("aux", aux), "members")
    values, taken = grid.values, list(inspect.signature(init).parameters)[1:]
    shapes = tuple(name for name in values if name in taken)
    shape_of = [tuple(values[name][member].item() for name in shapes) for member in range(len(grid))]
    hyperparams = grid.hyperparams(*(name for name in values if name not in (*shapes, "seed")))
    _check_names(grid, step.optimizer, hyperparams, taken)
    length = {"num_steps": num_steps, "num_epochs": num_epochs}
    how = {"mesh": mesh, "member_map": member_map, "members_per_batch": members_per_batch}
    sweep = Sweep(init, step, sampler, grid, keys, order, shapes, shape_of, hyperparams, aux, length, save, how)
    identity = {  # `fit` compares the program of each group
        "grid": {"axes": list(grid.axes), "values": {name: column.tolist() for name, column in values.items()}},
        "key": checkpoints.fingerprint(key),
        **length,
    }
    with terminations_interrupt(), _opened(folder, identity, fresh) as kept:
        plan = kept.plan(lambda: planned(sweep, memory_budget, keeps=folder is None, progress=progress), how)
        logger.info("%s", plan)
        return _run(sweep, plan, kept, progress, same_program)


def _check_names(grid: Grid, optimizer: Any, hyperparams: dict[str, Any], taken: list[str]) -> None:
    """Raise for names of results, and for quantities that the optimiser does not read."""
    for name in RESERVED:
        if name in grid.values:
            checks.fail("grid", f"have other names than {', '.join(RESERVED)}", repr(name))

    def works(values: dict[str, float]) -> bool:
        try:
            optimizer(values)
        except Exception:  # `fit` raises it
            return False
        return True

    first = {name: float(column[0]) for name, column in hyperparams.items()}
    for name in first if works(first) else ():
        if works({other: value for other, value in first.items() if other != name}):
            wanted = f"hold nothing but seeds, what `init` takes by name ({', '.join(taken) or 'nothing'})"
            checks.fail("grid", f"{wanted}, and what the optimiser reads", repr(name))


def _run(
    sweep: Sweep, plan: Plan, kept: "_Folder", progress: str | MeterFactory | None, same_program: bool
) -> GridResult:
    steps, parts, how = _Steps(progress, plan), [], kept.how(sweep.how)
    try:
        for index, members in enumerate(plan.groups):
            models, given = sweep.arguments(members)
            options = {"save": sweep.save, "callbacks": [steps], "same_program": same_program, **how}
            options["checkpoint"] = kept.file(index, "ckpt")
            result = fit(models, sweep.step, sweep.sampler, **given, **options)
            parts.append((result.history, result.diverged_at, result.seconds))
            kept.finish(index, (result.models, result.state.aux))
            del models, given, result
    finally:
        steps.end()
    order = np.argsort(np.concatenate([np.asarray(members) for members in plan.groups]))
    histories, diverged, seconds = zip(*parts, strict=True)
    recorded = [(each.loss, each.observed, each.metrics, own) for each, own in zip(histories, diverged, strict=True)]
    loss, observed, metrics, diverged_at = take(concatenate(recorded), order)
    history = histories[0]._replace(loss=loss, observed=observed, metrics=metrics)
    trained = partial(_trained, sweep, plan, kept)
    aux_of = None if sweep.aux is None else lambda members: trained(members)[1]
    return GridResult(sweep.grid, history, diverged_at, plan, seconds, lambda members: trained(members)[0], aux_of)


def _trained(sweep: Sweep, plan: Plan, kept: "_Folder", members: Any) -> tuple[PyTree, PyTree]:
    """Return trained models and `aux` of some members, stacked in this order."""
    members = np.atleast_1d(np.asarray(members, int)).tolist()
    places = {member: (index, row) for index, group in enumerate(plan.groups) for row, member in enumerate(group)}
    for member in members:
        if member not in places:
            checks.fail("members", f"be places in the grid, from 0 to {len(places) - 1}", member)
    shapes = {sweep.shape_of[member] for member in members}
    if len(shapes) != 1:
        checks.fail("members", "have one shape", f"{len(shapes)} shapes: {', '.join(map(str, sorted(shapes)))}")
    loaded = {index: kept.trained(index, sweep, plan) for index in {places[member][0] for member in members}}
    own = [take(loaded[index], row) for index, row in (places[member] for member in members)]
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if eqx.is_array(leaf) else leaf, stack(own))


class _Steps(Callback):
    """One meter over the steps of all groups."""

    def __init__(self, progress: str | MeterFactory | None, plan: Plan):
        self.open = lambda num_steps: open_meter(progress, num_steps * len(plan.groups), str(plan))
        self.meter: Any = None
        self.before, self.done = 0, 0

    def begin(self, step: int, num_steps: int, past: Any) -> None:
        self.before = self.done
        if self.meter is None:
            self.meter = self.open(num_steps)

    def advance(self, step: int, loss: np.ndarray) -> None:
        self.done = self.before + step
        self.meter.advance(self.done, f"loss {loss.mean():.3g}" if loss.size else "")

    def end(self) -> None:
        if self.meter is not None:
            self.meter.close()


@contextmanager
def _opened(folder: str | Path | None, identity: dict[str, Any], fresh: bool) -> Iterator["_Folder"]:
    """Lock the folder of a sweep in process 0, and yield it with its manifest."""
    if folder is None:
        yield _Folder(None, {"identity": identity}, {})
        return
    path = Path(folder)
    with ExitStack() as held:

        def taken() -> dict[str, Any]:
            held.enter_context(files.locked(path / ".lock", path))
            return _manifest(path, json.loads(json.dumps(identity)), fresh)

        yield _Folder(path, distributed.on_main(taken), {})


def _manifest(folder: Path, identity: dict[str, Any], fresh: bool) -> dict[str, Any]:
    """Return the manifest of a folder, or a new one; if `fresh`, set the folder's contents aside."""
    path = folder / MANIFEST
    if fresh and path.exists():
        before = next(new for i in range(1, 10**6) if not (new := folder / f"before-{i}").exists())
        before.mkdir()
        for old in [*folder.glob("group-*"), path]:
            old.rename(before / old.name)
    if not path.exists():
        return {"identity": identity}
    advice = "Name another folder, or pass fresh=True."
    try:
        manifest = json.loads(path.read_text())
        stored, _ = manifest["identity"], (manifest["plan"], manifest["layout"])
    except (ValueError, KeyError, TypeError) as error:
        raise files.RefusedFile(f"{path} is broken, or of another version of this package. {advice}") from error
    if different := [name for name in identity if stored.get(name) != identity[name]]:
        differ = checks.that_differ(different)
        raise files.RefusedFile(f"`folder` must hold the same sweep, got {folder}, whose {differ}. {advice}")
    return manifest


class _Folder(NamedTuple):
    """Manifest and trained groups of a sweep, on disk or, without a path, in memory."""

    path: Path | None
    manifest: dict[str, Any]
    groups: dict[int, PyTree]  # trained models and `aux`, without a path

    def plan(self, make: Callable[[], Plan], how: dict[str, Any]) -> Plan:
        """Return the stored plan, or store a new one, and how its members are mapped."""
        if "plan" not in self.manifest:
            # Other processes need the same groups, even with less memory.
            plan, partition = distributed.on_main(lambda: make()._asdict()), Partition(1, **how)
            if partition.mesh == "auto":
                partition = partition._replace(mesh=Threads(plan["devices"]))
            self.manifest.update(plan=plan, layout=partition.stored())
            if self.path is not None:
                path, contents = self.path / MANIFEST, (json.dumps(self.manifest) + "\n").encode()
                distributed.on_main(lambda: files.write_bytes(path, contents))
        stored = self.manifest["plan"]
        return Plan(**{**stored, "groups": tuple(map(tuple, stored["groups"]))})

    def how(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return mapping and mesh with "auto" entries from the manifest."""
        partition = Partition(1, **given).resumed(self.manifest["layout"])
        return {name: getattr(partition, name) for name in given}

    def file(self, index: int, kind: str) -> Path | None:
        """Return the path of a group's file."""
        return None if self.path is None else self.path / f"group-{index:04d}.{kind}"

    def finish(self, index: int, trained: PyTree) -> None:
        """Store a group's trained models and `aux`, unless they are stored."""
        path = self.file(index, "trained")
        if path is None:
            self.groups[index] = jax.device_get(trained)
        else:
            distributed.on_main(lambda: None if path.exists() else checkpoints.save(path, trained))

    def trained(self, index: int, sweep: Sweep, plan: Plan) -> PyTree:
        """Return a group's trained models and `aux`."""
        path = self.file(index, "trained")
        if path is None:
            return self.groups[index]
        return checkpoints.restore(path, eqx.filter_eval_shape(sweep.start, list(plan.groups[index])))
