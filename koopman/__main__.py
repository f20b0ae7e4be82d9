"""`python -m koopman FIGURE` computes a figure and leaves picture, arrays and description."""

import sys

import tyro

from dissociation.figures.command import RunOptions, produce
from koopman.figures import ordered_mnist as ordered_mnist_figure
from koopman.figures import spectra as spectra_figure


def ordered_mnist(
    config: tyro.conf.OmitArgPrefixes[ordered_mnist_figure.Config] = ordered_mnist_figure.Config(),  # noqa: B008
    run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions(),  # noqa: B008
) -> int:
    """Digits in turn: encoders, operators, and forecast pictures read by an oracle."""
    return produce(ordered_mnist_figure, config, run, program="koopman")


def spectra(
    config: tyro.conf.OmitArgPrefixes[spectra_figure.Config] = spectra_figure.Config(),  # noqa: B008
    run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions(),  # noqa: B008
) -> int:
    """Estimated against exact eigenvalues and eigenfunctions of systems whose spectra are known."""
    return produce(spectra_figure, config, run, program="koopman")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    Args:
        arguments: The words after the program's name; None takes them from the process.
    """
    figures = {"ordered-mnist": ordered_mnist, "spectra": spectra}
    return tyro.extras.subcommand_cli_from_dict(
        figures, prog="koopman", description="Figures of learned evolution operators, from data to PDF.", args=arguments
    )


if __name__ == "__main__":
    sys.exit(main())
