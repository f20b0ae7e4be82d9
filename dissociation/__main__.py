"""`python -m dissociation`."""

import sys

from dissociation.training import _interrupts as interrupts


def main() -> int:
    """Runs the command line as a program of its own; returns the exit status."""
    interrupts.listen("dissociation")
    from dissociation.figures._cli import main as run  # Takes seconds, in which an interrupt must be heard already.
    from dissociation.training._cores import use_all_cores

    use_all_cores()
    status = run()
    interrupts.end()
    return status


if __name__ == "__main__":
    sys.exit(main())
