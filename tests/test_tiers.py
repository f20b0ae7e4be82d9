"""Only listed files mark tests `full`, which `.ci/run` leaves out, and each for a kind that is allowed."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
KINDS = {
    "whole notebooks",
    "code blocks of pages",
    "figures in full",
    "kills",
    "workers of an executor",
    "counts of 100 and more",
    "the second precision of a pair",
    "rows of the protocol beyond one per function",
    "models and peers that need an extra",
}
FULL = {
    "notebooks/test_notebooks.py": ("whole notebooks",),
    "test_keys.py": ("figures in full",),
    "dissociation/test_canonical.py": ("counts of 100 and more",),
    "dissociation/test_collapse_figure.py": ("figures in full",),
    "dissociation/test_executor.py": ("kills", "workers of an executor"),
    "dissociation/test_figures.py": ("figures in full",),
    "dissociation/test_freedom_figure.py": ("figures in full",),
    "dissociation/test_layers_by_name.py": ("models and peers that need an extra",),
    "dissociation/test_linear.py": ("the second precision of a pair",),
    "dissociation/test_planting.py": ("the second precision of a pair",),
    "koopman/models/test_exponentials.py": ("counts of 100 and more",),
    "koopman/models/test_intervals.py": ("counts of 100 and more",),
    "tools/pages.py": ("code blocks of pages",),
    "tools/protocol.py": ("rows of the protocol beyond one per function",),
}
"""File, relative to `tests`, -> the kinds of its tests that are marked `full`."""


def test_marks_are_in_listed_files_alone():
    files = {
        str(path.relative_to(FOLDER))
        for path in FOLDER.rglob("*.py")
        if "mark.full" in path.read_text()
    }
    assert files - {Path(__file__).name} == set(FULL)


@pytest.mark.parametrize("file", FULL)
def test_kinds_are_allowed(file):
    assert set(FULL[file]) <= KINDS
