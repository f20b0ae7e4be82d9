"""Command line `python -m dissociation FIGURE`, which writes image, arrays and description."""

import sys
from importlib import import_module

from dissociation.figures._command import run_command
from dissociation.figures._harness import Figure

TIMES = """Figures of the toolkit, from data to PDF.

Times on two busy cores. With --quick, a smoke run: robustness 17 s, transfer 89 s, eigenvectors
70 s, collapse 86 s, similarity 46 s, freedom 17 s, manifold 68 s, planted 94 s. In full: robustness
81 s, manifold 4 minutes; with MNIST freedom 2 minutes, similarity 7, planted 29, collapse 49,
transfer 80 (3 seeds).
The same command resumes an interrupted run. --version prints the version."""

NAMES = (
    "robustness",
    "transfer",
    "eigenvectors",
    "collapse",
    "similarity",
    "freedom",
    "manifold",
    "planted",
    "compare",
)


def figures(*names: str) -> dict[str, Figure]:
    """Return figures of this package by command name, by default all."""
    modules = {}
    for name in names or NAMES:
        # Imported here, because it takes seconds.
        modules[name] = import_module(f"dissociation.figures.{name}")
    return modules


def main(arguments: list[str] | None = None) -> int:
    """Run the command line with `arguments`, default the process'; return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    names = [name for name in NAMES if name in words[:1]]
    return run_command(figures(*names), words, program="dissociation", description=TIMES)
