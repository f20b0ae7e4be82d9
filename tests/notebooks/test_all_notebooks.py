"""What every notebook has, whatever it tells."""

import re
from pathlib import Path

import nbformat
import pytest

HERE = Path(__file__).parent
NOTEBOOKS = sorted((HERE.parents[1] / "notebooks").glob("*.ipynb"))


def test_every_notebook_has_its_test():
    assert {path.stem for path in HERE.glob("test_*_notebook.py")} == {
        f"test_{path.stem}_notebook" for path in NOTEBOOKS
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_begins_with_its_time_and_a_switch(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    title, switch = notebook.cells[:2]
    assert re.match(r"# .+\n\n\*\*Time\.\*\* .*\d.* on two cores", title.source, re.DOTALL)
    assert switch.metadata.tags == ["parameters"]
    assert "quick = " in switch.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_keeps_shows_without_javascript(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    for page in (output.data.get("text/html", "") for cell in cells for output in cell.outputs if "data" in output):
        before, *_ = page.split("<script")
        assert not page or re.search(r"<(table|img|pre)[ >]", before)
        assert "Loading" not in before
