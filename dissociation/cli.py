"""The command line: `python -m dissociation FIGURE` computes a figure and leaves image, arrays and description."""

from dissociation.figures import collapse, eigenvectors, robustness, transfer
from dissociation.figures.command import run_command

FIGURES = {
    "robustness": (robustness, "Test error of function-preserving rewrites under noise on inputs and on parameters."),
    "transfer": (transfer, "Transfer error of function-preserving rewrites against the sample budget."),
    "eigenvectors": (eigenvectors, "Eigenvectors of bilinear networks, compared across seeds and sizes."),
    "collapse": (
        collapse,
        "Grokking, neural collapse and the information plane through training, over weight decays and seeds.",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    Args:
        arguments: The words after the program's name; None takes them from the process.
    """
    return run_command(
        FIGURES, arguments, program="dissociation", description="Figures of the toolkit, from data to PDF."
    )
