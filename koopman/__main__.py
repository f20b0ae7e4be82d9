"""`python -m koopman`."""

import sys

from dissociation.training import _interrupts as interrupts


def main() -> int:
    """Runs the command line as a program of its own; returns the exit status."""
    interrupts.listen("koopman")
    from dissociation.training._cores import use_all_cores
    from koopman.figures._cli import main as run  # Takes seconds, in which an interrupt must be heard already.

    use_all_cores()
    status = run()
    interrupts.end()
    return status


if __name__ == "__main__":
    sys.exit(main())
