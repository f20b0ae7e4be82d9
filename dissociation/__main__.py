"""`python -m dissociation`."""

import sys

from dissociation import interrupts


def main() -> int:
    """Runs the command line as a program of its own; returns the exit status."""
    interrupts.listen("dissociation")
    from dissociation.cli import main as run  # Takes seconds, in which an interrupt must be heard already.
    from dissociation.cores import use_all_cores

    use_all_cores()
    status = run()
    interrupts.end()
    return status


if __name__ == "__main__":
    sys.exit(main())
