"""The command line: `python -m koopman FIGURE` computes a figure and leaves image, arrays and description."""

from dissociation.figures.command import run_command
from koopman.figures import ordered_mnist, spectra

FIGURES = {
    "ordered-mnist": (ordered_mnist, "Digits in turn: encoders, operators, and forecast images read by an oracle."),
    "spectra": (
        spectra,
        "Estimated against exact eigenvalues and eigenfunctions of systems whose spectra are known.",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    Args:
        arguments: The words after the program's name; None takes them from the process.
    """
    return run_command(
        FIGURES, arguments, program="koopman", description="Figures of learned evolution operators, from data to PDF."
    )
