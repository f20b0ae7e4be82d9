"""The command line: `python -m dissociation FIGURE` computes a figure and leaves picture, arrays and description."""

import tyro

from dissociation.figures import collapse as collapse_figure
from dissociation.figures import eigenvectors as eigenvectors_figure
from dissociation.figures import robustness as robustness_figure
from dissociation.figures import transfer as transfer_figure
from dissociation.figures.command import RunOptions, produce


def robustness(
    config: tyro.conf.OmitArgPrefixes[robustness_figure.Config] = robustness_figure.Config(),  # noqa: B008
    run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions(),  # noqa: B008
) -> int:
    """Test error of function-preserving rewrites under noise on inputs and on parameters."""
    return produce(robustness_figure, config, run)


def transfer(
    config: tyro.conf.OmitArgPrefixes[transfer_figure.Config] = transfer_figure.Config(),  # noqa: B008
    run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions(),  # noqa: B008
) -> int:
    """Transfer error of function-preserving rewrites against the sample budget."""
    return produce(transfer_figure, config, run)


def eigenvectors(
    config: tyro.conf.OmitArgPrefixes[eigenvectors_figure.Config] = eigenvectors_figure.Config(),  # noqa: B008
    run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions(),  # noqa: B008
) -> int:
    """Eigenvectors of bilinear networks, compared across seeds and sizes."""
    return produce(eigenvectors_figure, config, run)


def collapse(
    config: tyro.conf.OmitArgPrefixes[collapse_figure.Config] = collapse_figure.Config(),  # noqa: B008
    run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions(),  # noqa: B008
) -> int:
    """Grokking, neural collapse and the information plane through training, over weight decays and seeds."""
    return produce(collapse_figure, config, run)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    Args:
        arguments: The words after the program's name; None takes them from the process.
    """
    figures = {"robustness": robustness, "transfer": transfer, "eigenvectors": eigenvectors, "collapse": collapse}
    return tyro.extras.subcommand_cli_from_dict(
        figures, prog="dissociation", description="Figures of the toolkit, from data to PDF.", args=arguments
    )
