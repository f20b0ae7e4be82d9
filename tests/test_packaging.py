"""What the packages are from outside: their names at the top, what an import starts, their types and their version."""

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import users_file
from faces import FACES

import dissociation
import koopman

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = [pytest.param(package, id=package.__name__) for package in (dissociation, koopman)]
FOLDERS = [name for name in FACES if (ROOT / Path(*name.split("."))).is_dir()]


@pytest.mark.parametrize("name", FOLDERS)
def test_public_names_are_what_type_checkers_see(name):
    package = importlib.import_module(name)
    tree = ast.parse(Path(package.__file__).read_text())
    block = next(
        node for node in tree.body if isinstance(node, ast.If) and node.test.id == "TYPE_CHECKING"
    )
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == sorted(package.__all__)
    for public, module in seen.items():
        assert getattr(package, public) is getattr(importlib.import_module(module), public)
    assert set(dir(package)) - {"__version__"} == set(package.__all__)


def test_the_names_that_users_look_for_are_at_the_top():
    assert {"fit", "fit_grid", "linear_cka", "MEASURES", "neuron_groups", "bmap"} <= set(
        dir(dissociation)
    )
    assert {"fit", "Ridge", "lagged_pairs", "decompose"} <= set(dir(koopman))


@pytest.mark.parametrize("name", FOLDERS)
def test_no_name_hides_a_module(name):
    package = importlib.import_module(name)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(package.__all__)
    assert importlib.import_module(f"{name}.{min(modules)}")


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_an_error(package):
    with pytest.raises(
        AttributeError, match=f"module '{package.__name__}' has no attribute 'nonsense'"
    ):
        _ = package.nonsense


def test_a_dependency_that_fails_is_named(monkeypatch):
    def fails(name):
        raise AttributeError("a dependency lacks nonsense")

    training = importlib.import_module("dissociation.training")
    monkeypatch.delitem(vars(training), "CsvLog", raising=False)
    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(
        ImportError, match="dissociation.training._records cannot be imported: a dependency lacks"
    ):
        _ = training.CsvLog


def test_an_import_loads_no_other_package():
    said = (
        "import sys, dissociation.figures, koopman.figures; print({name.split('.')[0] for "
        "name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-I", "-c", "import sys; sys.path.insert(0, "
                                                       f"{str(ROOT)!r}); {said}"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    loaded = ast.literal_eval(done.stdout)
    assert "koopman" in loaded
    assert not loaded & {
        "jax",
        "numpy",
        "scipy",
        "matplotlib",
        "optax",
        "equinox",
        "tyro",
        "treescope",
        "tqdm",
    }


@pytest.mark.slow
def test_names_start_no_backend():
    said = f"""
import importlib
from jax._src import xla_bridge
for name, public in {FACES}.items():
    for one in public:
        getattr(importlib.import_module(name), one)
print(len(xla_bridge._backends))
"""
    done = subprocess.run(
        [sys.executable, "-c", said], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_version_is_the_distributions(package):
    assert package.__version__ == PROJECT["version"]
    assert (Path(package.__file__).with_name("py.typed")).exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_command_says_its_version(package, capsys):
    module, function = PROJECT["scripts"][package.__name__].split(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert importlib.import_module(f"{package.__name__}.figures").main(["--version"]) == 0
    assert capsys.readouterr().out == f"{package.__name__} (dissociation {PROJECT['version']})\n"


@pytest.mark.slow
def test_the_users_file_runs():
    found = users_file.networks() | users_file.operators()
    assert found["change"] < 1e-5
    assert found["cka"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "added", ["", "wrong: str = koopman.fit\n", "from dissociation import nonsense\n"]
)
def test_a_strict_type_checker_complains_of_nothing_but_what_is_wrong(tmp_path, added):
    written = Path(users_file.__file__).read_text()
    (tmp_path / "users_file.py").write_text(written + added)
    settings = {"include": ["users_file.py"], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [
        sys.executable,
        "-m",
        "basedpyright",
        "--pythonpath",
        sys.executable,
        "--outputjson",
        "-p",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    errors = [
        one for one in json.loads(done.stdout)["generalDiagnostics"] if one["severity"] == "error"
    ]
    lines = {one["range"]["start"]["line"]: one["message"] for one in errors}
    assert set(lines) == ({written.count("\n")} if added else set()), lines
