"""Imports go one way: a module imports only from lower levels, and koopman may use dissociation, never the reverse."""

import ast
import re
import sys
from pathlib import Path

import jax
import pytest

from dissociation import _compat

ROOT = Path(__file__).parents[1]
LEVELS = {
    "dissociation": {
        "_compat": -4, "types": -3, "lazy": -3,
        "checks": -2, "cores": -1, "keys": -2, "conversion": -1, "validation": -0.5,
        "files": -1, "frames": -1, "interrupts": -1, "labelled": -0.5, "labelling": -0.4, "linalg": 0, "results": 0,
        "splits": 0, "ties": 0.1,
        "provenance": 0, "progress": 0, "plotting": 0, "display": 0, "sharding": 0,
        "schedule": 0, "distributed": 0, "threads": 0.5,
        "distances": 0.5, "memory": 0, "checkpoint": 1, "traced": 1.1,
        "bmap": 1.2, "data": 1, "members": 1.5, "models": 1.6, "sweeps": 2, "weights": 2, "linear": 2, "spectral": 2,
        "metrics": 2, "training": 3, "symmetry": 3.5, "recipes": 4, "fig4": 4.5, "figures": 5, "cli": 6, "__main__": 7,
        "__init__": 8,  # names at the top, whose modules stay unloaded
    },
    "koopman": {
        "diagnostics": 0,  # warnings on data and options
        "datasets": 1, "losses": 1, "kernels": 1, "networks": 1, "pairs": 1, "rotations": 1, "solvers": 1,
        "operator": 1, "perturbation": 1, "subspaces": 2, "generator": 2, "nystroem": 2, "estimators": 2.5,
        "kernel_operators": 2.7, "operators": 3, "spectrum": 3, "forecast": 3.2, "learn": 4, "dynamical_similarity": 4,
        "figures": 5, "cli": 6, "__main__": 7, "__init__": 8,
    },
}  # fmt: skip
FILES = sorted(p for package in LEVELS for p in (ROOT / package).rglob("*.py"))


def imported_modules(path):
    """Yields the dotted names that a file imports, `from package import module` resolved to the module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: relative import"
            for alias in node.names:
                inner = ROOT / Path(*node.module.split(".")) / alias.name
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    package, *rest = path.relative_to(ROOT).with_suffix("").parts
    here = rest[0]
    assert here in LEVELS[package], f"{path} has no level: add it to the table"
    for name in imported_modules(path):
        other, *parts = name.split(".")
        if other not in LEVELS or not parts:
            continue
        assert not (package == "dissociation" and other == "koopman"), f"{path} imports koopman"
        if other == package and parts[0] != here:
            assert LEVELS[package][parts[0]] < LEVELS[package].get(here, 0), f"{path} imports {name}"


def names_in(path):
    """Dotted names of modules, and of what is taken of them, that a file imports or spells out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_what_may_change_in_jax_is_imported_in_one_place():
    private = re.compile(r"jax(lib)?\.(_(?!_)|extend\b)")
    found = {str(path.relative_to(ROOT)) for path in FILES if any(map(private.match, names_in(path)))}
    assert found == {"dissociation/_compat.py"}


@pytest.mark.parametrize("name", _compat.ENTRIES)
def test_what_breaks_with_another_jax_is_named(name, monkeypatch):
    """A failure of the first line is of this JAX: the entry says what no longer works."""
    assert getattr(_compat, name) is not None, f"without it {_compat.ENTRIES[name][2]} cannot work"
    module, attribute, needed = _compat.ENTRIES[name]
    if attribute is None:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        monkeypatch.delattr(sys.modules[module], attribute)
    with pytest.raises(ImportError, match=f"JAX {jax.__version__} lacks {module}.*, needed for {re.escape(needed)}"):
        getattr(_compat, name)
