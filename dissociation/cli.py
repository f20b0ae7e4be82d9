"""The command line: `python -m dissociation FIGURE` computes a figure and leaves image, arrays and description."""

from dissociation.figures import figures
from dissociation.figures.command import run_command


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line on these words, by default those of the process; returns the exit status."""
    return run_command(
        figures(), arguments, program="dissociation", description="Figures of the toolkit, from data to PDF."
    )
