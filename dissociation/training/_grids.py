"""Sweeps over a grid by `fit_grid`, stored group by group."""

import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from dissociation._core import checks, files
from dissociation._core._compat import jex
from dissociation._core.conversion import to_device
from dissociation._core.keys import typed
from dissociation._core.results import Labels, Over
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.training import _checkpoint as checkpoints
from dissociation.training import _machine as machine
from dissociation.training._chunk import drawn, observe_members, run_chunk
from dissociation.training._fitting import dataset_of_fit, fit, prepared
from dissociation.training._interrupts import interruptible
from dissociation.training._members import concatenate, gathered, stack, take
from dissociation.training._partition import Partition, Threads
from dissociation.training._progress import MeterFactory, open_meter
from dissociation.training._records import Callback, History, Save, record_steps
from dissociation.training._run import Batches, Run
from dissociation.training._samplers import HostBatches, Sampler, as_arrays, leading_size
from dissociation.training._state import Step
from dissociation.training._sweeps import Grid, folded

if TYPE_CHECKING:
    import xarray

FORMAT = 2
"""Format of the manifest."""
MANIFEST = "sweep.json"
"""File with the settings, groups and layout of a sweep."""
RESERVED = ("loss", "steps", "observed", "observed_at", "metrics", "members", "diverged_at")
"""Names of axes and arrays of results."""

logger = logging.getLogger(__name__)


class Plan(NamedTuple):
    """Groups of members that are trained at once, by index in the grid."""

    groups: tuple[tuple[int, ...], ...]
    peak_bytes: int  # estimate for the largest group, without the memory of the compiler
    budget: int
    devices: int  # which train members

    def __str__(self) -> str:
        members, most = sum(map(len, self.groups)), max(map(len, self.groups))
        size = f"{self.peak_bytes / 2**20:.0f} MiB of {self.budget / 2**20:.0f}"
        return f"{members} members, {most} at once on {self.devices} device(s), at most {size}"


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
    seeds = grid.seeds() if "seed" in grid.values else to_device(np.arange(len(grid)))
    order, keys = _keys_of_sweep(typed(key), seeds)
    if aux is not None and not makes(aux):
        aux = as_arrays("aux", aux, "members")
        checks.check_same_length("grid", len(grid), "aux", leading_size("aux", aux), "members")
    values, taken = grid.values, list(inspect.signature(init).parameters)[1:]
    shapes = tuple(name for name in values if name in taken)
    shape_of = [tuple((name, values[name][member].item()) for name in shapes) for member in range(len(grid))]
    hyperparams = jax.device_get(grid.hyperparams(*(name for name in values if name not in (*shapes, "seed"))))
    _check_names(grid, step.optimizer, hyperparams, taken)
    length = {"num_steps": num_steps, "num_epochs": num_epochs}
    how = {"mesh": mesh, "member_map": member_map, "members_per_batch": members_per_batch}
    sweep = Sweep(init, step, sampler, grid, keys, order, shape_of, hyperparams, aux, length, save, how)
    identity = {  # `fit` compares the program of each group
        "grid": {"axes": list(grid.axes), "values": {name: column.tolist() for name, column in values.items()}},
        "key": checkpoints.fingerprint(key),
        **length,
    }
    with interruptible(), _opened(folder, identity, fresh) as kept:
        plan = kept.plan(lambda: planned(sweep, memory_budget, keeps=folder is None, progress=progress), how)
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
            wanted = f"have other names than {', '.join(RESERVED)}, no slash, and no prefix observed_ or metrics_"
            checks.fail("grid", wanted, repr(name))

    def failure(values: dict[str, float]) -> Exception | None:
        try:
            optimizer(values)
        except Exception as error:
            return error
        return None

    first = {name: float(column[0]) for name, column in hyperparams.items()}
    if first and isinstance(lacking := failure(first), KeyError):
        checks.fail("grid", "hold what the optimiser reads", f"{', '.join(first)}, without {lacking}")
    for name in first if failure(first) is None else ():  # `fit` raises other errors
        if failure({other: value for other, value in first.items() if other != name}) is None:
            wanted = f"hold nothing but seeds, what `init` takes by name ({', '.join(taken) or 'nothing'})"
            checks.fail("grid", f"{wanted}, and what the optimiser reads", repr(name))


class Sweep(NamedTuple):
    """Arguments of all groups of `fit_grid`."""

    init: Callable[..., Any]
    step: Step
    sampler: Sampler
    grid: Grid
    keys: Array
    order: Array
    shape_of: list[tuple[tuple[str, Any], ...]]  # quantities that set a model's shape, by member
    hyperparams: dict[str, np.ndarray]  # all other quantities but the seed, [members] each
    aux: Any
    length: dict[str, Any]  # number of steps or epochs
    save: Save
    how: dict[str, Any]  # mesh and mapping of the members

    def start(self, members: Sequence[int]) -> tuple[PyTree, PyTree, Array]:
        """Return initial models, `aux` and keys of the training of members of one shape, stacked."""
        places = np.asarray(members)
        make_aux = self.aux if makes(self.aux) else None
        fixed = dict(self.shape_of[members[0]])
        models, aux, keys = _fresh((self.init, make_aux), fixed, self.keys, to_device(places))
        return models, aux if make_aux is not None else take(self.aux, places), keys

    def arguments(self, members: Sequence[int]) -> tuple[PyTree, dict[str, Any]]:
        """Return the models of members of one shape, and the arguments of `fit` that determine their training."""
        models, aux, keys = self.start(members)
        own: Any = (self.order, keys) if self.sampler.shared else keys
        hyperparams = take(self.hyperparams, np.asarray(members)) or None
        return models, {"aux": aux, "hyperparams": hyperparams, "key": own, **self.length}


@eqx.filter_jit
def _fresh(make: tuple[Any, Any], fixed: dict[str, Any], keys: Array, members: Array) -> tuple[PyTree, PyTree, Array]:
    """Return what both functions (the second may be None) return for members, stacked, and keys of training."""
    of_model, of_training = gathered(keys, members).T

    def stacked(function: Callable[..., Any]) -> PyTree:
        return eqx.filter_vmap(lambda key: function(key, **fixed))(of_model)

    make_model, make_aux = make
    return stacked(make_model), None if make_aux is None else stacked(make_aux), of_training


def makes(aux: Any) -> bool:
    """Return True if `aux` is a function of one member, not arrays of all members."""
    return callable(aux) and not jax.tree.leaves(eqx.filter(aux, eqx.is_array))


def planned(sweep: Sweep, budget: int | None, *, keeps: bool, progress: str | MeterFactory | None) -> Plan:
    """Return groups that fit in memory; `keeps` is True if trained models stay in memory."""
    given = None if budget is None else checks.check_count("memory_budget", budget, minimum=1, maximum=None)
    room, alike = given or machine.free_memory([]), dict[Any, list[int]]()
    for member, shape in enumerate(sweep.shape_of):
        alike.setdefault(shape, []).append(member)
    groups, peak, kept, devices = [], 0, 0, 1
    # A stated budget is compared with what programs take.
    ample = 0 if given else room // (4 * len(alike))
    with closing(open_meter(progress, len(alike), "planning")) as meter:
        for done, members in enumerate(alike.values()):
            meter.advance(done, "compiling")  # most of a short sweep's time
            fixed, each, model, threads = estimated_bytes(sweep, members, ample)
            kept += model * len(members) if keeps else 0
            size = min(len(members), (room - fixed - kept) // each)
            if size < 1:
                wanted = f"be at least {fixed + kept + each} bytes, which one member takes with its data"
                checks.fail("memory_budget", wanted, room)
            size = math.ceil(len(members) / math.ceil(len(members) / size))  # groups of equal size share a program
            devices, peak = max(devices, threads), max(peak, fixed + each * size + kept)
            groups += [tuple(members[start : start + size]) for start in range(0, len(members), size)]
        meter.advance(len(alike), "")
    return Plan(tuple(groups), peak, room, devices)


def estimated_bytes(sweep: Sweep, members: Sequence[int], ample: int = 0) -> tuple[int, int, int, int]:
    """Estimate the memory of members of one shape, from programs of 2 and 4 of them on one device.

    If an upper bound for all members is below `ample` bytes, nothing is compiled, and the bound is the estimate.

    Returns:
        Bytes of data and programs for any number of members, bytes per member, bytes of a trained model, and the number
        of devices or worker threads. The compiler's memory is left out.
    """
    four, (step, sampler, save) = (list(members) * 4)[:4], (sweep.step, sweep.sampler, sweep.save)

    def begin() -> tuple[Any, ...]:
        models, arguments = sweep.arguments(four)
        return prepared(models, step, sampler, **arguments)

    shapes, first, total, (order, *own) = eqx.filter_eval_shape(begin)

    def run_of(size: int) -> Run:
        state, *keys = _zeros((shapes, *own), size)
        keys = _zeros(order, None if sampler.shared else size), *keys
        return _Estimate(state, step, sampler, keys, save, Partition(size, **{**sweep.how, "mesh": None}), [])

    def compiled_bytes(run: Run) -> int:
        calls: list[Any] = [(run_chunk, run.example())]
        members, observe = run.members, run.program.observe
        if observe is not None:
            inputs = members.partition.how, observe, jnp.asarray(first), members.observe_keys[0]
            calls.append((observe_members, inputs))
        compiled = [function.lower(inputs, members.states[0]).compile().compiled for function, inputs in calls]
        return max(map(machine.program_bytes, compiled))  # chunk or observation

    run = run_of(2)
    state, program = run.members.states[0], run.program
    state_bytes = _bytes(state) // 2
    # Programs free most results of their operations, and copy some.
    each = sum(2 * result_bytes(traced.code.jaxpr) for traced in program.programs)
    of_program = 0
    if _bytes(sampler) + len(members) * (3 * state_bytes + each) > ample:
        programs = [compiled_bytes(run), compiled_bytes(run_of(4))]
        each = max(0, programs[1] - programs[0]) // 2
        of_program = max(0, programs[0] - 2 * each)
    times = len(record_steps(save, [], first, total, sampler.epoch_steps))
    recorded = (program.info, total - first), (program.observe and program.observe.out, times)
    history = 16 * sum(math.prod(leaf.shape) * times for tree, times in recorded for leaf in jax.tree.leaves(tree))
    spread = jax.default_backend() == "cpu" and run.members.partition.member_map != "vmap"
    threads = min(jax.local_device_count(), machine.available_cores()) if spread else 1
    fixed = _bytes(sampler) + _bytes(program.observe) + threads * of_program
    # At most three copies of a state are in memory: given, trained and returned.
    per_member = 3 * state_bytes + each + history
    return fixed, per_member, _bytes(state.arrays) // 2, threads


def result_bytes(jaxpr: Any) -> int:
    """Return the size of the results of all operations of a jaxpr, each counted once in the body of a loop."""
    total = 0
    for equation in jaxpr.eqns:
        total += sum(math.prod(result.aval.shape) * result.aval.dtype.itemsize for result in equation.outvars)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, jex.ClosedJaxpr | jex.Jaxpr):
                    total += result_bytes(inner)
    return total


class _ZeroBatches(Batches):
    """Source with zeros as plans."""

    def draw(self, step: int, block: int | None) -> Any:
        if isinstance(self.sampler, HostBatches):
            return super().draw(step, block)
        return _zeros(eqx.filter_eval_shape(drawn, self.sampler, self.order, block))


class _Estimate(Run):
    """Run whose programs are compiled but not called, with zeros as arrays."""

    batches_of = _ZeroBatches


def _zeros(shapes: PyTree, size: int | None = None) -> PyTree:
    """Return zeros of these shapes, or keys; `size` replaces the length of the first axis."""

    def zeros(leaf: Any) -> Any:
        shape = leaf.shape if size is None else (size, *leaf.shape[1:])
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return to_device(np.zeros(shape, leaf.dtype))
        implementations: list[Any] = []
        jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), leaf)
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, leaf.dtype))
        return jax.random.wrap_key_data(to_device(np.zeros(words.shape, words.dtype)), impl=implementations[0])

    return jax.tree.map(zeros, shapes)


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


def _run(
    sweep: Sweep, plan: Plan, kept: "_Folder", progress: str | MeterFactory | None, same_program: bool
) -> GridResult:
    parts, how, num_steps = [], kept.how(sweep.how), sweep.length["num_steps"]
    if num_steps is None:
        num_steps = sweep.length["num_epochs"] * sweep.sampler.epoch_steps
    with closing(open_meter(progress, num_steps * len(plan.groups), str(plan))) as meter:
        for index, members in enumerate(plan.groups):
            meter.advance(index * num_steps, "compiling")
            models, given = sweep.arguments(members)
            options = {"save": sweep.save, "same_program": same_program, **how}
            options |= {"callbacks": [_Steps(meter, index * num_steps)], "checkpoint": kept.file(index, "ckpt")}
            try:
                result = fit(models, sweep.step, sweep.sampler, **given, **options)
            except checks.WrongValue as error:
                if kept.path is None or not str(error).startswith("`checkpoint`"):
                    raise
                raise checks.WrongValue(f"{error} Or pass fresh=True, which sets {kept.path} aside.") from error
            parts.append((result.history, result.diverged_at, result.seconds))
            kept.finish(index, (result.models, result.state.aux))
            del models, given, result
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
    return jax.tree.map(lambda leaf: to_device(leaf) if eqx.is_array(leaf) else leaf, stack(own))


class _Steps(Callback):
    """Advance a sweep's meter by the steps of one group, after `before` steps of others."""

    def __init__(self, meter: Any, before: int):
        self.meter, self.before = meter, before

    def advance(self, step: int, loss: np.ndarray) -> None:
        self.meter.advance(self.before + step, f"loss {loss.mean():.3g}" if loss.size else "")


@contextmanager
def _opened(folder: str | Path | None, identity: dict[str, Any], fresh: bool) -> Iterator["_Folder"]:
    """Lock the folder of a sweep, and yield it with its manifest."""
    if folder is None:
        yield _Folder(None, {"identity": identity}, {})
        return
    path = Path(folder)
    with files.locked(path / ".lock", path):
        yield _Folder(path, _manifest(path, json.loads(json.dumps(identity)), fresh), {})


def _manifest(folder: Path, identity: dict[str, Any], fresh: bool) -> dict[str, Any]:
    """Return the manifest of a folder, or a new one; if `fresh`, set the folder's contents aside."""
    path = folder / MANIFEST
    if fresh and path.exists():
        before = next(new for i in range(1, 10**6) if not (new := folder / f"before-{i}").exists())
        before.mkdir()
        for old in [*folder.glob("group-*"), path]:
            old.rename(before / old.name)
    if not path.exists():
        return {"format": FORMAT, "identity": identity}
    advice = "Name another folder, or pass fresh=True."
    with files.reading(path, advice, "is broken, or of another version of this package"):
        manifest = json.loads(path.read_text())
        stored = dict(manifest["identity"])
        members = sorted(member for group in _plan_of(manifest).groups for member in group)
        if members != list(range(len(members))):
            raise ValueError("its groups do not hold each member once")
        Partition(1, "auto", "auto", "auto").resumed(manifest["layout"])
        if manifest.get("format") != FORMAT:
            raise ValueError(f"its format is {manifest.get('format')}, not {FORMAT}")
    if different := [name for name in identity if stored.get(name) != identity[name]]:
        differ = checks.that_differ(different)
        raise files.RefusedFile(f"`folder` must hold the same sweep, got {folder}, whose {differ}. {advice}")
    return manifest


def _plan_of(manifest: dict[str, Any]) -> Plan:
    stored = manifest["plan"]
    return Plan(**{**stored, "groups": tuple(map(tuple, stored["groups"]))})


class _Folder(NamedTuple):
    """Manifest and trained groups of a sweep, on disk or, without a path, in memory."""

    path: Path | None
    manifest: dict[str, Any]
    groups: dict[int, PyTree]  # trained models and `aux`, without a path

    def plan(self, make: Callable[[], Plan], how: dict[str, Any]) -> Plan:
        """Return the stored plan, or store a new one, and how its members are mapped."""
        if "plan" not in self.manifest:
            plan, partition = make(), Partition(1, **how)
            if partition.mesh == "auto":
                partition = partition._replace(mesh=Threads(plan.devices))
            self.manifest.update(plan=plan._asdict(), layout=partition.stored())
            if self.path is not None:
                files.write_bytes(self.path / MANIFEST, (json.dumps(self.manifest) + "\n").encode())
        return _plan_of(self.manifest)

    def how(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return mapping and mesh with "auto" entries from the manifest."""
        partition = Partition(1, **given).resumed(self.manifest["layout"])
        return {name: getattr(partition, name) for name in given}

    def file(self, index: int, kind: str) -> Path | None:
        """Return the path of a group's file."""
        return None if self.path is None else self.path / f"group-{index:04d}.{kind}"

    def finish(self, index: int, trained: PyTree) -> None:
        """Store a group's trained models and `aux`."""
        path = self.file(index, "trained")
        if path is None:
            self.groups[index] = jax.device_get(trained)
        else:
            checkpoints.save(path, trained)

    def trained(self, index: int, sweep: Sweep, plan: Plan) -> PyTree:
        """Return a group's trained models and `aux`."""
        path = self.file(index, "trained")
        if path is None:
            return self.groups[index]
        models, aux, _ = eqx.filter_eval_shape(sweep.start, list(plan.groups[index]))
        return checkpoints.restore(path, (models, aux))
