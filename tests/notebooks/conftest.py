"""Notebooks run from top to bottom, in their quick mode: a test file for each, so that workers share them out."""

import os
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
        kept = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
        monkeypatch.setenv("XLA_FLAGS", " ".join(kept))  # on one device, as users have
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # half of the time is compiling
        monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own backend puts figures into the notebook
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(cell.execution_count for cell in cells)
        images = sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
        drawn = (".draw(", "plt.subplots(")
        assert images == sum(any(word in cell.source for word in drawn) for cell in cells)

    return run
