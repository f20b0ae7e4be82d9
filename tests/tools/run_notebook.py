"""Run notebooks in full, and store their outputs with a hash of each cell's source.

    DISSOCIATION_DATA=... python tests/tools/run_notebook.py notebooks/freedom.ipynb [notebooks/...]

`DISSOCIATION_RESULTS` names a folder from which a stopped run resumes. A test compares the hashes
with the sources.
"""

import hashlib
import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def source_hash(cell: nbformat.NotebookNode) -> str:
    """Return sixteen hexadecimal digits of a cell's source."""
    return hashlib.sha256(cell.source.encode()).hexdigest()[:16]


def without_progress(text: str) -> str:
    """Return what a cell wrote to its standard error without meters, and warnings without paths."""
    lines = [
        re.sub(r"^/\S+ipykernel\S+: (?=\w+Warning: )", "", line)
        for line in re.split(r"[\r\n]+", text)
    ]
    known = [
        line
        for line in lines
        if line.strip() and not re.search(r"\d+%\||it/s[,\]]|s/it[,\]]|\btqdm\b", line)
    ]
    kept = [
        line
        for before, line in pairwise(["", *known])
        if not ("Warning: " in before and line.startswith("  "))
    ]
    return "\n".join(kept) + "\n" * bool(kept)


def clean(notebook: nbformat.NotebookNode) -> None:
    """Remove progress meters from the outputs, and join what a cell wrote to its standard error."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                output.text = without_progress(output.text)
        cell.outputs = [one for one in cell.outputs if one.output_type != "stream" or one.text]


def run(path: Path) -> None:
    """Execute a notebook and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=None, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            tags = {key: value for key, value in cell.metadata.items() if key == "tags"}
            cell.metadata = tags | {"source_hash": source_hash(cell)}
    clean(notebook)
    notebook.metadata.pop("widgets", None)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ.pop("MPLBACKEND", None)  # the kernel's own backend puts figures into the notebook
    os.environ.pop("DISSOCIATION_QUICK", None)
    for name in sys.argv[1:]:
        run(Path(name))
        print("ran", name, flush=True)
