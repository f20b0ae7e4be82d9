"""Run notebooks in full, and store their outputs with a hash of each cell's source.

    DISSOCIATION_DATA=... python tests/tools/run_notebook.py notebooks/freedom.ipynb [notebooks/...]

`DISSOCIATION_RESULTS` names a folder from which a stopped run resumes. A test compares the hashes with the sources.
"""

import hashlib
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def source_hash(cell: nbformat.NotebookNode) -> str:
    """Return sixteen hexadecimal digits of a cell's source."""
    return hashlib.sha256(cell.source.encode()).hexdigest()[:16]


def run(path: Path) -> None:
    """Execute a notebook and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            tags = {key: value for key, value in cell.metadata.items() if key == "tags"}
            cell.metadata = tags | {"source_hash": source_hash(cell)}
    notebook.metadata.pop("widgets", None)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ.pop("MPLBACKEND", None)  # the kernel's own backend puts figures into the notebook
    os.environ.pop("DISSOCIATION_QUICK", None)
    for name in sys.argv[1:]:
        run(Path(name))
        print("ran", name, flush=True)
