"""Command line `python -m dissociation FIGURE`, which writes a figure as image, arrays and description."""

from dissociation.figures._command import run_command
from dissociation.figures._protocol import Figure

TIMES = """Figures of the toolkit, from data to PDF.

Times on two busy cores. With --quick, a smoke run: robustness 17 s, transfer 89 s, eigenvectors 70 s, collapse 86 s,
similarity 46 s, freedom 17 s, manifold 68 s, planted 94 s. In full: robustness 81 s, manifold 4 minutes; with MNIST
freedom 2 minutes, similarity 7, planted 29, collapse 49, transfer 80 (3 seeds).
The same command resumes an interrupted run. --version prints the version."""


def figures() -> dict[str, Figure]:
    """Return the figures of this package by command name."""
    # Imported here, because it takes seconds.
    from dissociation.figures import (
        collapse,
        eigenvectors,
        freedom,
        manifold,
        planted,
        robustness,
        similarity,
        transfer,
    )

    return {
        "robustness": robustness,
        "transfer": transfer,
        "eigenvectors": eigenvectors,
        "collapse": collapse,
        "similarity": similarity,
        "freedom": freedom,
        "manifold": manifold,
        "planted": planted,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line with `arguments`, by default those of the process; return the exit status."""
    return run_command(figures(), arguments, program="dissociation", description=TIMES)
