"""Pages of README.md and docs/, and their blocks of code."""

import ast
import inspect
import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NUMBER = r"-?\d+\.\d*(?:e-?\d+)?"
PACKAGES = ("dissociation", "koopman")
REPRESENTATIVE = {
    "docs/experiments.md": 2,
    "docs/quickstart.md": 1,
    "docs/results.md": 1,
    "docs/similarity.md": 2,
    "docs/symmetry.md": 1,
}
"""Block that stands for its page in `.ci/run`, the first unless it is named here."""


def blocks_of(pages, *, is_executed=True):
    """Return the blocks of pages as parameters: the path of a page, the index of a block, and its code."""
    rows = []
    for page in pages:
        path = page.relative_to(ROOT)
        for index, code in enumerate(
            re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        ):
            marks = [pytest.mark.slow] if is_executed else []
            if is_executed and index != REPRESENTATIVE.get(str(path), 0):
                marks.append(pytest.mark.full)
            rows.append(pytest.param(path, index, code, id=f"{path}-{index}", marks=marks))
    return rows


def check_block(path, index, code, capsys):
    """Execute a block, and compare the numbers that it prints with those that the page shows."""
    for peer in ("flax", "haiku", "torch"):
        if re.search(rf"^(import|from) {peer}\b", code, re.MULTILINE):
            pytest.importorskip(peer)
    is_double = jax.config.jax_enable_x64
    try:
        exec(compile(code, f"{path}, block {index}", "exec"), {"__name__": "__main__"})
    finally:
        jax.config.update("jax_enable_x64", is_double)
    printed = capsys.readouterr().out.strip()
    assert printed, "an example should show something"
    shown = re.search(
        re.escape(code) + r"```\n+```text\n(.*?)```", (ROOT / path).read_text(), re.DOTALL
    )
    if shown:
        expected = [float(number) for number in re.findall(NUMBER, shown.group(1))]
        assert [float(number) for number in re.findall(NUMBER, printed)] == pytest.approx(
            expected, abs=0.02
        )


def is_ours(node):
    """Return True if the statement imports from our packages."""
    if isinstance(node, ast.Import):
        return node.names[0].name.partition(".")[0] in PACKAGES
    return isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in PACKAGES


def unknown_names(code):
    """Return the attributes of modules and classes of our packages that a block uses and that do not exist."""
    tree = ast.parse(code)
    objects = {}
    for node in ast.walk(tree):
        if is_ours(node):
            exec(ast.unparse(node), objects)

    def value_of(node):
        if isinstance(node, ast.Name):
            return objects.get(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(value_of(node.value), node.attr, None)
        return None

    unknown = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = value_of(node.value)
            if (inspect.ismodule(owner) or inspect.isclass(owner)) and not hasattr(
                owner, node.attr
            ):
                unknown.append(ast.unparse(node))
    return unknown
