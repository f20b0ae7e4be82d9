"""Command line `python -m koopman FIGURE`, which writes a figure as image, arrays and description."""

from dissociation.figures import Figure, run_command

TIMES = """Figures of learned evolution operators, from data to PDF.

Times on two cores that had other work as well. With --quick, a rehearsal in small: ordered-mnist 93 s, spectra 174 s.
In full: spectra 151 s; ordered-mnist with MNIST 38 minutes.
An interrupted run goes on with the same command. --version says which this is."""


def figures() -> dict[str, Figure]:
    """Return the figures of this package by their commands' names."""
    # Imported here, because it takes seconds.
    from koopman.figures import ordered_mnist, spectra

    return {"ordered-mnist": ordered_mnist, "spectra": spectra}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line on `arguments`, by default those of the process, and return the exit status."""
    return run_command(figures(), arguments, program="koopman", description=TIMES)
