"""Notebooks run from top to bottom, in their quick mode, and have what every notebook has."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from pages import unknown_names
from run_notebook import source_hash

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
REPRESENTATIVE = "freedom"
"""Notebook that `.ci/run` executes."""
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def in_tiers(path):
    """Return the notebook as a parameter, marked `full` unless it is the representative."""
    return pytest.param(path, marks=() if path.stem == REPRESENTATIVE else pytest.mark.full)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [in_tiers(path) for path in NOTEBOOKS], ids=lambda path: path.stem)
def test_it_runs(path, monkeypatch):
    monkeypatch.setenv("DISSOCIATION_QUICK", "1")
    monkeypatch.delenv("DISSOCIATION_RESULTS", raising=False)
    kept = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    monkeypatch.setenv("XLA_FLAGS", " ".join(kept))  # on one device, as users have
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # half of the time is compiling
    monkeypatch.delenv(
        "MPLBACKEND", raising=False
    )  # the kernel's own backend puts figures into the notebook
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    images = sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    drawn = (".draw(", "plt.subplots(")
    assert images == sum(any(word in cell.source for word in drawn) for cell in cells)


@every_notebook
def test_it_begins_with_its_time_and_a_switch(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    title, switch = notebook.cells[:2]
    assert re.match(r"# .+\n\n\*\*Time\.\*\* .*\d.* on two cores", title.source, re.DOTALL)
    assert switch.metadata.tags == ["parameters"]
    assert "quick = " in switch.source


@every_notebook
def test_its_outputs_are_of_its_sources(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.metadata.get("source_hash") for cell in cells] == list(map(source_hash, cells))


@every_notebook
def test_what_it_keeps_shows_without_javascript(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    for page in (
        output.data.get("text/html", "")
        for cell in cells
        for output in cell.outputs
        if "data" in output
    ):
        before, *_ = page.split("<script")
        assert not page or re.search(r"<(table|img|pre)[ >]", before)
        assert "Loading" not in before


@every_notebook
def test_its_code_uses_names_that_exist(path):
    cells = [
        cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"
    ]
    assert unknown_names("\n".join(cells)) == []
