"""Notebooks run from top to bottom, in their quick mode: a test file for each, so that workers share them out."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"


@pytest.fixture
def run_notebook(monkeypatch):
    def run(name):
        monkeypatch.setenv("DISSOCIATION_QUICK", "1")
        monkeypatch.delenv("DISSOCIATION_RESULTS", raising=False)
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own backend puts figures into the notebook
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(cell.execution_count for cell in cells)
        images = sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
        assert images == sum(".draw(" in cell.source for cell in cells)

    return run
