"""Configurations with lists in place of values."""

import copy
import dataclasses
import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import dissociation.figures
import koopman.figures
from dissociation.figures import artifacts, reporting, robustness, sweep
from dissociation.figures.artifacts import Parts
from dissociation.figures.command import run_command
from dissociation.figures.reporting import tidy
from dissociation.figures.runs import runs_in
from dissociation.figures.sweep import ConfigGrid, Swept, compute_grid, config_grid, names_of
from dissociation.labelled import Labelled, load_results
from dissociation.sweeps import Grid


@dataclasses.dataclass(frozen=True)
class Config(Swept):
    width: int = 3
    name: str = "a"
    sizes: tuple[int, ...] = (1, 2)

    def __post_init__(self):
        if self.width < 1:
            raise ValueError("width")

    def quick(self):
        return dataclasses.replace(self, width=1, name="quick")


def test_lists_make_a_grid():
    assert Config(4, sizes=(3,)) == Config(width=4, sizes=(3,))
    grid = Config([4, 5], name=["x", "y"], sizes=(7,))
    assert isinstance(grid, ConfigGrid)
    assert grid.grid.axes == ("width", "name")
    assert [(config.width, config.name, config.sizes) for config in grid.configs] == [
        (4, "x", (7,)), (4, "y", (7,)), (5, "x", (7,)), (5, "y", (7,)),
    ]  # fmt: skip
    assert dataclasses.replace(Config(), width=[1, 2]).grid.shape == (2,)
    assert [config.width for config in Config(width=[8, 9]).quick().configs] == [8, 9]
    assert {config.name for config in Config(width=[8, 9]).quick().configs} == {"quick"}
    assert Config(sizes=[(1,), (2, 3)]).grid.values["sizes"].tolist() == ["(1,)", "(2, 3)"]
    assert names_of(grid.grid)[1] == "width-4_name-y"
    assert copy.deepcopy(grid).configs == grid.configs


def test_wrong_lists():
    with pytest.raises(ValueError, match="width"):
        Config(width=[1, 0])
    with pytest.raises(ValueError, match="`width` must list at least one value"):
        Config(width=[])
    with pytest.raises(ValueError, match="`width` must"):
        Config(width=[1, 1])


@pytest.fixture
def toy(monkeypatch):
    path = Path(__file__).with_name("toy_figure.py")
    spec = importlib.util.spec_from_file_location("toy_figure", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy_figure", module)
    spec.loader.exec_module(module)
    return module


def test_every_configuration_is_computed_and_kept(toy, tmp_path):
    configs = config_grid(toy.Config, {"num_seeds": [2, 2 + 1]}, {"num_steps": 5})
    found = compute_grid(toy, configs, key=jax.random.key(0), folder=tmp_path)
    assert [each.parts[0].shape for each in found.results] == [(2, 5), (3, 5)]
    assert {path.name for path in tmp_path.iterdir()} == {"num_seeds-2", "num_seeds-3"}
    assert not found.labelled.arrays
    assert found.labelled.coords["num_seeds"].tolist() == [2, 3]
    toy._part = None  # nothing is computed again
    again = compute_grid(toy, configs, key=jax.random.key(0), folder=tmp_path)
    np.testing.assert_array_equal(again.results[1].parts[2], found.results[1].parts[2])
    with pytest.raises(ValueError, match="at most 100"):
        compute_grid(toy, config_grid(toy.Config, {"num_steps": [3, 101]}), key=jax.random.key(0))


def test_configurations_share_the_networks_that_they_train_alike(tmp_path):
    """They are trained once, and give what each configuration gives alone."""
    small = {"num_seeds": 2, "num_epochs": 1, "num_train": 60, "num_test": 20, "num_scales": 2, "num_zero": 4}
    configs = robustness.Config(width=8, scale_factor=[2.0, 20.0], **small)
    found = compute_grid(robustness, configs, key=jax.random.key(0), folder=tmp_path)
    assert len(list((tmp_path / sweep.TRAINED).glob("*.ckpt"))) == 1
    alone = robustness.compute(configs.configs[1], key=jax.random.key(0))
    for name, error in alone.parameter_error.items():
        np.testing.assert_array_equal(found.results[1].parameter_error[name], error)
    np.testing.assert_array_equal(found.results[1].test_error, alone.test_error)
    scaled = [each.parameter_error["scaled"] for each in found.results]
    assert not np.array_equal(scaled[0], scaled[1])
    assert found.labelled.dims["clean_error"] == ("scale_factor", "variants", "seeds")


def test_what_trains_alike_has_one_file(tmp_path):
    run = {"config": {"width": 3}, "key": "a", "data": "b", "precision": "float32"}
    with artifacts.sharing(tmp_path / "trained"):
        with Parts(tmp_path / "one", run) as one, Parts(tmp_path / "two", run | {"config": {"width": 4}}) as two:
            file = one.checkpoint("training", epochs=3)
            assert file.parent == tmp_path / "trained"
            assert file == two.checkpoint("training", epochs=3)
            assert len({file, two.checkpoint("training", epochs=4), two.checkpoint("other", epochs=3)}) == 3
        for name in ("key", "data", "precision"):
            with Parts(tmp_path / name, run | {name: "other"}) as other:
                assert other.checkpoint("training", epochs=3) != file
        with Parts(None, run) as none:
            assert none.checkpoint("training", epochs=3) is None
    with Parts(tmp_path / "one", run) as one:
        assert one.checkpoint("training", epochs=3) == tmp_path / "one" / "training.ckpt"


def test_one_table_of_a_sweep():
    grid = Config(width=[4, 5], name=["x", "y"]).grid
    tables = [[["seed", "error"], ["0", f"{i} %"], ["1", "7 %"]] for i in range(4)]
    whole = tidy(grid, tables)
    assert whole[0] == ["width", "name", "seed", "error"]
    assert whole[3:5] == [["4", "y", "0", "1 %"], ["4", "y", "1", "7 %"]]
    assert len(whole) == 9
    assert tidy(grid, [*tables[:3], [["other"], ["0"]]]) is None


def test_a_sweep_too_large_for_one_page_names_the_rest(toy, monkeypatch):
    results = toy.compute(
        toy.Config(num_seeds=2, num_steps=5), key=jax.random.key(0), dataset=None, folder=None, progress=None
    )
    made = [reporting.exhibit_of(toy, results)] * 3
    grid = Grid(rate=[0.1, 0.2, 0.3])
    size = len(made[0]._replace(table=[]).html().encode())
    monkeypatch.setattr(reporting, "MAX_BYTES", int(2.5 * size * 5 / 4))
    page = reporting.sweep_report_of(toy, grid, made, ["one", "other"], 37, ["toy"])
    assert "<pre>one, other</pre>" in page
    assert page.count("<svg") == 2
    assert page.index("not shown".capitalize()) < page.index("<pre>rate = 0.3</pre>")


def test_arrays_of_one_shape_are_stacked_along_the_grid():
    grid = Config(width=[4, 5], name=["x", "y"]).grid

    def one(i):
        arrays = {"error": np.full(3, i), "other": np.zeros(i), "alone": np.zeros(1)}
        dims = {"error": ("seeds",), "other": ("times",), "alone": ("ends",), "seeds": ("seeds",)}
        return Labelled(arrays, dims, {"seeds": np.array([7, 8, 9])}, {"error": "%"}, {})

    members = [one(i) for i in range(4)]
    members[3] = Labelled(
        {"error": np.full(3, 3)}, {"error": ("seeds",), "seeds": ("seeds",)}, members[0].coords, {}, {}
    )
    whole = sweep.stacked(members, grid)
    assert set(whole.arrays) == {"error"}
    np.testing.assert_array_equal(whole["error"][..., 0], [[0, 1], [2, 3]])
    assert whole.dims["error"] == ("width", "name", "seeds")
    assert whole.coords["name"].tolist() == ["x", "y"]
    assert whole.coords["seeds"].tolist() == [7, 8, 9]
    assert whole.units == {"error": "%"}


def test_the_figures_take_lists():
    for figure in {**dissociation.figures.figures(), **koopman.figures.figures()}.values():
        counted = ("num_seeds", "num_trajectories", "num_steps")
        field = next(each for each in dataclasses.fields(figure.Config) if each.name in counted)
        grid = figure.Config(**{field.name: [field.default, field.default + 1]})
        assert [getattr(config, field.name) for config in grid.configs] == [field.default, field.default + 1]
        assert len(grid.quick().configs) == 2


def test_a_command_line_with_several_values_is_a_sweep(toy, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(jax.config.values, "jax_compilation_cache_dir", str(tmp_path))
    words = ["toy", "--num-seeds", "2", "3", "--num-steps=5", "--out", str(tmp_path / "out")]
    options = {"program": "toy", "description": "Toys."}
    assert run_command({"toy": toy}, words, **options) == 0
    (folder,) = (tmp_path / "out").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names == {"num_seeds-2", "num_seeds-3", "toy.npz", "report.html", "run.json", "log.txt"}
    page = (folder / "report.html").read_text()
    assert "2 num_seeds" in page
    assert page.count("<svg") == 2
    assert all(f"num_seeds = {count}: " in page for count in (2, 3))
    assert load_results(folder / "toy.npz").coords["num_seeds"].tolist() == [2, 3]
    assert "In the folders of configurations alone, as they have no common shape: " in capsys.readouterr().out
    toy._part = None  # nothing is computed again
    assert run_command({"toy": toy}, words, **options) == 0
    entries = runs_in(tmp_path / "out")
    assert [entry.status for entry in entries] == ["done"] * 3
    assert all("--num-seeds 2 3" in entry.command for entry in entries)
    assert {entry.folder.name for entry in entries if entry.folder != folder} == {"num_seeds-2", "num_seeds-3"}
    capsys.readouterr()
    assert run_command({"toy": toy}, ["runs", "--out", str(tmp_path / "out")], **options) == 0
    assert capsys.readouterr().out.count("done") == 3
    assert run_command({"toy": toy}, ["runs", "--out", str(tmp_path / "none")], **options) == 0
    assert run_command({"toy": toy}, ["toy", "--num-seeds", "2", "0", "--out", str(tmp_path / "o")], **options) == 2
    assert run_command({"toy": toy}, ["toy", "--num-steps", "2", "101", "--out", str(tmp_path / "o")], **options) == 2
    assert run_command({"toy": toy}, ["toy", "--num-steps", "2", "2", "--out", str(tmp_path / "o")], **options) == 2
    capsys.readouterr()
    assert run_command({"toy": toy}, ["toy", "--seed", "2", "3", "--out", str(tmp_path / "o")], **options) == 2
    assert "`seed` must be one value" in capsys.readouterr().err
    words = ["robustness", "--published-null", "--no-published-null", "--out", str(tmp_path / "o")]
    assert run_command({"robustness": robustness}, words, **options) == 2
    assert "Config(published_null=[False, True])" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    with pytest.raises(AttributeError, match="compute_grid"):
        _ = Config(width=[1, 2]).width
    with pytest.raises(TypeError, match="lists in place of values"):
        compute_grid(toy, toy.Config(), key=jax.random.key(0))


def test_what_several_values_are():
    words = ["robustness", "--width", "64", "128", "--quick", "--num-seeds=3", "--null-scale", "0.1", "0.2", "--silent"]
    lists = sweep.lists_in(words, dissociation.figures.figures()["robustness"].Config())
    assert lists == {"width": ["64", "128"], "null_scale": ["0.1", "0.2"]}
    assert sweep.words_of(words, lists)[1] == (
        ["robustness", "--quick", "--num-seeds=3", "--silent", "--width", "64", "--null-scale", "0.2"]
    )
    assert sweep.lists_in(["toy", "--width", "1", "2", "--width", "3"], Config()) == {}
    several = dissociation.figures.figures()["eigenvectors"].Config()
    assert sweep.lists_in(["eigenvectors", "--sizes", "30", "50"], several) == {}
