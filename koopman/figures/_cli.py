"""Command line `python -m koopman FIGURE`: writes a figure as image, arrays and description."""

from dissociation.figures import Figure, run_command

TIMES = """Figures of learned evolution operators, from data to PDF.

Times on two busy cores. With --quick, a smoke run: ordered-mnist 93 s, spectra 174 s.
In full: spectra 151 s; ordered-mnist with MNIST 38 minutes.
The same command resumes an interrupted run. --version prints the version."""


def figures() -> dict[str, Figure]:
    """Return the figures of this package by command name."""
    # Imported here, because it takes seconds.
    from koopman.figures import coverage, fit, ordered_mnist, spectra

    return {
        "coverage": coverage,
        "fit": fit,
        "ordered-mnist": ordered_mnist,
        "spectra": spectra,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line with `arguments`, and return the exit status.

    The default is the arguments of the process.
    """
    return run_command(figures(), arguments, program="koopman", description=TIMES)
