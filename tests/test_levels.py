"""Imports go one way: a module imports only from lower levels, and koopman may use dissociation, never the reverse."""

import ast
import json
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from faces import FACES, dotted

from dissociation._core import _compat

ROOT = Path(__file__).parents[1]
LEVELS = {
    "dissociation": {
        "_core": 0,
        "data": 1, "plotting": 1, "training": 1,
        "models": 2,
        "bilinear": 3, "measures": 3, "similarity": 3,
        "recipes": 4, "rewrites": 4,
        "fig4": 5, "linear": 5,
        "figures": 6,
    },
    "koopman": {"datasets": 0, "_operators": 0, "_encoders": 1, "_models": 1, "figures": 2},
}  # fmt: skip
FILES = sorted(p for package in LEVELS for p in (ROOT / package).rglob("*.py"))


def imported_modules(path):
    """Yields the dotted names that a file imports, `from package import module` resolved to the module."""
    for module, name in imports(path.read_text(), path):
        yield f"{module}.{name}" if is_module(f"{module}.{name}") else module


def is_module(name):
    """Return True if the name is one of a module or folder of the packages."""
    inner = ROOT / Path(*name.split("."))
    return inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()


def imports(source, where=""):
    """Yield pairs of a module and the name imported from it; the name is empty for `import module`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where} line {node.lineno}: relative import"
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    package, here, *inside = path.relative_to(ROOT).parts
    if not inside:
        assert here in ("__init__.py", "__main__.py"), f"{path} must lie in a folder"
        return
    assert here in LEVELS[package], f"{path} has no level: add its folder to the table"
    for name in imported_modules(path):
        other, *parts = name.split(".")
        if other not in LEVELS or not parts:
            continue
        assert not (package == "dissociation" and other == "koopman"), f"{path} imports koopman"
        if other == package and parts[0] != here:
            assert LEVELS[package][parts[0]] < LEVELS[package][here], f"{path} imports {name}"


def test_modules_do_not_import_each_other_in_circles():
    modules = [path for path in FILES if path.name != "__init__.py"]
    graph = {
        dotted(path): {name for name in imported_modules(path) if is_module(name)}
        for path in modules
    }
    assert list(TopologicalSorter(graph).static_order())


def is_application(path):
    """Return True for figures of koopman, which import public names alone, apart from their own private modules."""
    return path.parent == ROOT / "koopman" / "figures"


@pytest.mark.parametrize(
    "path", [p for p in FILES if not is_application(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_library_imports_from_the_modules_that_define(path):
    through = [
        f"{module}.{name}"
        for module, name in imports(path.read_text())
        if module in FACES and is_module(f"{module}.__init__") and not is_module(f"{module}.{name}")
    ]
    assert not through, "imports through a folder's face load it as users do"


def code_of_pages():
    """Yield Python of pages, notebooks, benchmarks and the figures of koopman, with its place."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for code in re.findall(r"```py(?:thon)?\n(.*?)```", path.read_text(), re.DOTALL):
            yield path, code
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        yield (
            path,
            "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"),
        )
    for path in [
        *sorted((ROOT / "benchmarks").glob("*.py")),
        *sorted((ROOT / "koopman" / "figures").glob("*.py")),
    ]:
        if path.name != "__init__.py":
            yield path, path.read_text()


@pytest.mark.parametrize(
    ("path", "code"),
    [pytest.param(path, code, id=str(path.relative_to(ROOT))) for path, code in code_of_pages()],
)
def test_pages_notebooks_benchmarks_and_applications_import_public_names(path, code):
    own = dotted(path.parent / "__init__.py") if path.suffix == ".py" else ""
    for module, name in imports(code):
        if module.split(".")[0] in LEVELS and module != own and not module.startswith(f"{own}._"):
            whole = f"{module}.{name}".rstrip(".")
            if own == "koopman.figures" and whole == "dissociation._core.checks":
                continue  # as the rest of koopman
            assert not any(part.startswith("_") for part in whole.split(".")), (
                f"{path} imports {whole}"
            )
            shown = module in FACES and name in FACES[module]
            assert not name or shown or is_module(whole), (
                f"{path} imports {whole}, which no folder lists"
            )


def test_tests_import_by_its_public_name_what_has_one():
    """Others that they import from modules with an underscore are parts that no folder lists."""
    inits = {name: ROOT / Path(*name.split("."), "__init__.py") for name in FACES}
    behind = {
        pair: f"{name}.{pair[1]}"
        for name, path in inits.items() if path.exists()
        for pair in imports(path.read_text()) if pair[1] in FACES[name]
    }  # fmt: skip
    for path in (ROOT / "tests").rglob("*.py"):
        for pair in imports(path.read_text()):
            assert pair not in behind or "._" not in pair[0], (
                f"{path} imports {'.'.join(pair)}: {behind[pair]}"
            )


def names_in(path):
    """Dotted names of modules, and of what is taken of them, that a file imports or spells out."""
    source = path.read_text()
    yield from (f"{module}.{name}".rstrip(".") for module, name in imports(source))
    yield from (
        ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    )


def test_what_may_change_in_jax_is_imported_in_one_place():
    private = re.compile(r"jax(lib)?\.(_(?!_)|extend\b)")
    found = {
        str(path.relative_to(ROOT)) for path in FILES if any(map(private.match, names_in(path)))
    }
    assert found == {"dissociation/_core/_compat.py"}


@pytest.mark.parametrize("name", _compat.ENTRIES)
def test_what_breaks_with_another_jax_is_named(name, monkeypatch):
    """A failure of the first line is of this JAX: the entry says what no longer works."""
    assert getattr(_compat, name) is not None, f"without it {_compat.ENTRIES[name][2]} cannot work"
    module, attribute, needed = _compat.ENTRIES[name]
    if attribute is None:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        monkeypatch.delattr(sys.modules[module], attribute)
    with pytest.raises(
        ImportError, match=f"JAX {jax.__version__} lacks {module}.*, needed for {re.escape(needed)}"
    ):
        getattr(_compat, name)


def test_a_parameter_that_a_rule_reads_is_named_where_it_is_missing():
    gone = SimpleNamespace(primitive=jax.lax.transpose_p, params={})
    with pytest.raises(
        ImportError, match=r"lacks \['permutation'\] of transpose, needed for `neuron_groups`"
    ):
        _compat.parameters(gone)
