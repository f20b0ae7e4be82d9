"""The command line: `python -m koopman FIGURE` computes a figure and leaves image, arrays and description."""

from dissociation.figures.command import run_command
from koopman.figures import figures


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line on these words, by default those of the process; returns the exit status."""
    return run_command(
        figures(), arguments, program="koopman", description="Figures of learned evolution operators, from data to PDF."
    )
