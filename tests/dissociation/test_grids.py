"""Sweeps over a grid: in groups that fit in memory, kept, and gone on with."""

import json
import os
import signal
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linear_regression import Normalised, normalised_error, regression

from dissociation._core.files import RefusedFile
from dissociation.training import Epochs, Grid, GridResult, Save, fit, fit_grid, make_step
from dissociation.training import _checkpoint_file as checkpoints
from dissociation.training import _grids as module
from dissociation.training import _sweep_folder as folder_module
from dissociation.training._run import Run

X = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
Y = np.sin(X.sum(1, keepdims=True))
GRID = Grid(width=[4, 8], rate=[0.1, 0.01], seed=[3, 1, 2])


def init(key, width):
    return eqx.nn.MLP(5, 1, width, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y + 0.01 * jax.random.normal(key)) ** 2)


STEP = make_step(loss, lambda values: optax.sgd(values["rate"]))
SAVE = Save(lambda model, step, key: {"norm": jnp.sum(model.layers[0].bias ** 2)}, seconds=0.5)


def swept(grid=GRID, sampler=None, **options):
    given = {"key": jax.random.key(7), "num_epochs": 3, "save": SAVE, "progress": None} | options
    return fit_grid(init, STEP, Epochs((X, Y), 10) if sampler is None else sampler, grid, **given)


def halved(planned):
    """Return a plan of groups of two members, whatever fits."""

    def cut(*given, **options):
        plan = planned(*given, **options)
        groups = [group[i : i + 2] for group in plan.groups for i in range(0, len(group), 2)]
        return plan._replace(groups=tuple(groups))

    return cut


SMALL = Grid(width=[4], rate=[0.1, 0.01], seed=[3, 1])


@pytest.fixture(scope="module")
def whole():
    """Return the sweep of two widths, which tests only read."""
    return swept()


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(module, "planned", halved(module.planned))


def test_members_of_one_shape_are_one_group_and_values_are_axes_of_the_results(whole):
    result = whole
    assert [len(group) for group in result.plan.groups] == [6, 6]
    assert result.history.observed["norm"].shape == (12, 4)
    assert result.to_xarray()["diverged_at"].dims == ("width", "rate", "seed")
    assert {*GRID.axes, "loss"} <= set(
        result.to_dataframe()["width", "rate", "seed", "steps"].columns
    )
    assert len(repr(result)) < 300


@pytest.mark.parametrize("member", [4, 11])
def test_members_are_trained_as_alone_and_are_in_the_order_of_the_grid(whole, member):
    values = {name: column[member] for name, column in GRID.values.items()}
    root, order = jax.random.split(jax.random.key(7))
    first, second = jax.random.split(jax.random.fold_in(root, int(values["seed"])))
    make = eqx.filter_jit(eqx.filter_vmap(init, in_axes=(0, None)))
    alone = fit(
        make(first[None], int(values["width"])),
        STEP,
        Epochs((X, Y), 10),
        num_epochs=3,
        key=(order, second[None]),
        hyperparams={"rate": np.asarray(values["rate"], np.float32)[None]},
    )
    np.testing.assert_allclose(whole.history.loss[member], alone.history.loss[0], rtol=1e-5)
    trained = jax.tree.map(jnp.asarray, eqx.filter(whole.models_of([member]), eqx.is_array))
    assert eqx.tree_equal(trained, eqx.filter(alone.models, eqx.is_array), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_groups_change_no_bit(few, tmp_path, monkeypatch):
    given = {"grid": Grid(width=[4], rate=[0.1], seed=range(3)), "member_map": "scan"}
    parts = swept(**given, folder=tmp_path)
    assert [len(group) for group in parts.plan.groups] == [2, 1]
    monkeypatch.undo()
    whole = swept(**given)
    assert len(whole.plan.groups) == 1
    np.testing.assert_array_equal(parts.history.loss, whole.history.loss)
    np.testing.assert_array_equal(parts.history.observed["norm"], whole.history.observed["norm"])
    first, second = (
        eqx.filter(result.models_of([2, 0, 1]), eqx.is_array) for result in (whole, parts)
    )
    assert eqx.tree_equal(jax.tree.map(jnp.asarray, first), jax.tree.map(jnp.asarray, second))


def test_a_finished_sweep_is_read_and_another_refused(few, monkeypatch, tmp_path):
    first = swept(SMALL, folder=tmp_path)
    monkeypatch.setattr(Run, "advance", None)  # nothing is trained
    again = swept(SMALL, folder=tmp_path)
    np.testing.assert_array_equal(again.history.loss, first.history.loss)
    assert json.loads((tmp_path / folder_module.MANIFEST).read_text())["identity"]["grid"][
        "axes"
    ] == [
        "width",
        "rate",
        "seed",
    ]
    with pytest.raises(RefusedFile, match="must hold the same sweep"):
        swept(folder=tmp_path, grid=GRID)
    with pytest.raises(
        ValueError, match="`checkpoint` must be .* same run, .* whose observe differs.* fresh=True"
    ):
        swept(SMALL, folder=tmp_path, save=Save(lambda model, step, key: jnp.zeros(3)))
    earlier = json.loads((tmp_path / folder_module.MANIFEST).read_text()) | {"format": 1}
    (tmp_path / folder_module.MANIFEST).write_text(json.dumps(earlier))
    with pytest.raises(RefusedFile, match="is broken, or of another version"):
        swept(SMALL, folder=tmp_path)


def test_groups_without_checkpoints_are_trained_on_new_data(few, tmp_path):
    swept(SMALL, folder=tmp_path)
    for path in tmp_path.glob("group-*.ckpt"):
        path.unlink()
    runs = [swept(SMALL, Epochs((X, -Y), 10), folder=folder) for folder in (tmp_path, None)]
    kept, alone = (
        jax.tree.map(jnp.asarray, eqx.filter(run.models_of([0]), eqx.is_array)) for run in runs
    )
    assert eqx.tree_equal(kept, alone)


def test_a_fresh_sweep_moves_the_earlier_one(few, tmp_path):
    swept(SMALL, folder=tmp_path)
    fresh = swept(folder=tmp_path, grid=Grid(width=[4], rate=[0.1], seed=[0, 1]), fresh=True)
    assert fresh.history.loss.shape == (2, 12)
    assert (tmp_path / "before-1" / folder_module.MANIFEST).exists()


def network(key):
    return eqx.nn.make_with_state(Normalised)(key)


NORMALISED_GRID = Grid(rate=[0.1, 0.05], seed=range(2))


@pytest.fixture(scope="module")
def normalised():
    """Return a function that sweeps networks with normalisation, and all members trained together."""
    keys = jax.random.split(jax.random.key(7))
    sampler = Epochs(regression(jax.random.key(0), samples=12), 4)
    step = make_step(normalised_error, lambda values: optax.sgd(values["rate"]))
    given = {"key": jax.random.key(7), "num_epochs": 2, "progress": None}
    sweep = partial(fit_grid, lambda key: network(key)[0], step, sampler, NORMALISED_GRID, **given)
    split = jax.jit(jax.vmap(lambda seed: jax.random.split(jax.random.fold_in(keys[0], seed))))
    own = split(np.asarray(NORMALISED_GRID.values["seed"]))
    models, states = eqx.filter_jit(eqx.filter_vmap(network))(own[:, 0])
    hyperparams = {"rate": np.asarray(NORMALISED_GRID.values["rate"], np.float32)}
    options = {"num_epochs": 2, "key": (keys[1], own[:, 1]), "aux": states}
    return sweep, fit(models, step, sampler, hyperparams=hyperparams, **options)


@pytest.mark.parametrize("made", ["by a function", "beforehand"])
def test_batch_normalisation_is_swept(few, normalised, made, tmp_path):
    sweep, whole = normalised
    aux = lambda key: network(key)[1]  # noqa: E731
    if made == "beforehand":
        aux = eqx.filter_jit(eqx.filter_vmap(lambda _: network(jax.random.key(0))[1]))(np.arange(4))
    result = sweep(aux=aux, folder=tmp_path / "kept")
    np.testing.assert_array_equal(result.history.loss, whole.history.loss)
    for members in ([0], [3, 1, 2]):
        found, wanted = (
            (result.models_of(members), result.aux_of(members)),
            (whole.models, whole.state.aux),
        )
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            if eqx.is_array(one):
                np.testing.assert_array_equal(one, np.asarray(other)[members])


def test_as_many_states_as_members_are_swept(normalised):
    with pytest.raises(ValueError, match=r"`aux` must have as many members as `grid` \(4\), got 2"):
        normalised[0](aux=np.ones(2, np.float32))


def test_wrong_calls(whole):
    for call, words in (
        (lambda: swept(memory_budget=1000), "`memory_budget` must be at least"),
        (
            lambda: swept(grid=Grid(width=[4], rule=["a", "b"], seed=[0])),
            "`names` must name .* that are numbers",
        ),
        (lambda: whole.models_of([12]), "`members` must be places"),
        (lambda: whole.models_of([0, 6]), "`members` must have one shape"),
        (
            lambda: swept(grid=Grid(width=[4], rate=[0.1], other=[1, 2])),
            "`grid` must hold nothing but seeds",
        ),
        (
            lambda: swept(grid=Grid(width=[4], decay=[0.1])),
            "`grid` must hold what the optimiser reads, .* 'rate'",
        ),
        (
            lambda: swept(grid=Grid(width=[4], rate=[0.1], observed_norm=[1])),
            "`grid` must have other names",
        ),
    ):
        with pytest.raises((KeyError, TypeError, ValueError), match=words):
            call()


class Meter:
    def __init__(self, total, text):
        self.total, self.text, self.steps, self.closed = total, text, [], 0

    def advance(self, step, text):
        self.steps.append(step)

    def close(self):
        self.closed += 1


def test_one_meter_has_the_steps_of_all_groups_and_is_closed_after_an_error(
    few, tmp_path, monkeypatch
):
    meters = []

    def opened(total, text):
        meters.append(Meter(total, text))
        return meters[-1]

    given = {
        "grid": Grid(width=[4], rate=[0.1], seed=range(4)),
        "folder": tmp_path,
        "progress": opened,
    }
    result = swept(**given)
    swept(**given)
    planning, *trainings = meters
    assert (planning.total, planning.steps, planning.closed, planning.text) == (
        1,
        [0, 1],
        1,
        "planning",
    )
    assert len(trainings) == 2
    for meter in trainings:
        assert (meter.total, meter.steps[-1], meter.closed) == (24, 24, 1)
        assert meter.steps == sorted(meter.steps)
        assert meter.text == str(result.plan)
    monkeypatch.setattr("dissociation.training._plan.estimated_bytes", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        swept(**given | {"folder": None})
    assert meters[-1].steps == [0]  # before anything is compiled
    assert all(meter.closed == 1 for meter in meters)


class Terminated(Meter):
    def advance(self, step, text):
        if step > 13:  # in the second group
            os.kill(os.getpid(), signal.SIGTERM)


def interrupted(given, folder):
    """Start a sweep that gets SIGTERM in its second group, and return the files that its handler finds."""
    heard = []
    before = signal.signal(
        signal.SIGTERM, lambda *_: heard.append({path.name for path in folder.iterdir()})
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            swept(**given, folder=folder, progress=Terminated)
    finally:
        signal.signal(signal.SIGTERM, before)
    return heard[0]


def test_a_sweep_is_saved_before_the_handler_of_sigterm_is_called(few, tmp_path):
    given = {"grid": Grid(width=[4], rate=[0.1], seed=range(4)), "save": Save(at=[3])}
    assert interrupted(given, tmp_path) >= {
        "group-0000.trained",
        "group-0001.ckpt",
        folder_module.MANIFEST,
    }


@pytest.mark.slow
def test_a_resumed_sweep_keeps_its_layout(few, tmp_path, monkeypatch):
    """The bits of the first layout, though another number of cores is found."""
    given = {"grid": Grid(width=[4], rate=[0.1], seed=range(6)), "save": Save(at=[3])}
    monkeypatch.setattr("dissociation.training._machine.available_cores", lambda: 2)
    interrupted(given, tmp_path)
    whole = swept(**given, folder=tmp_path / "whole")
    monkeypatch.setattr("dissociation.training._machine.available_cores", lambda: 1)
    np.testing.assert_array_equal(swept(**given, folder=tmp_path).history.loss, whole.history.loss)
    assert checkpoints.read_header(tmp_path / "group-0002.ckpt")["layout"]["threads"] == 2


def test_the_budget_sets_the_groups(tmp_path, monkeypatch):
    untrained = lambda sweep, plan, *_: GridResult(sweep.grid, None, None, plan, (), None)  # noqa: E731
    monkeypatch.setattr(module, "_run", untrained)

    def plan(members, **options):
        grid = Grid(width=[4], rate=[0.1], seed=range(members))
        folder = tmp_path / f"{members}-{options.get('memory_budget')}"
        return swept(grid=grid, num_epochs=1, folder=folder, **options).plan

    one, nine = (plan(members, memory_budget=2**30) for members in (1, 9))
    assert len(nine.groups) == 1
    assert nine.peak_bytes < nine.budget
    bound = plan(9)  # of free memory, in which the sweep is small
    assert nine.peak_bytes <= bound.peak_bytes < bound.budget
    each = (nine.peak_bytes - one.peak_bytes) // 8
    halves = plan(9, memory_budget=one.peak_bytes + 4 * each)
    assert [len(group) for group in halves.groups] == [5, 4]
    assert halves.peak_bytes <= halves.budget
    with pytest.raises(
        ValueError, match=f"`memory_budget` must be at least {one.peak_bytes} bytes"
    ):
        plan(9, memory_budget=1, save=SAVE)


def test_arrays_of_the_observation_are_counted():
    images = np.ones((500, 4096), np.float32)

    def peak(observe):
        grid = Grid(width=[4], rate=[0.1], seed=[0])
        return swept(grid=grid, save=Save(observe), num_epochs=1).plan.peak_bytes

    seen = peak(lambda model, step, key: jnp.mean(jnp.exp(images * model.layers[0].bias[0])))
    assert seen - peak(None) >= images.nbytes
