"""Entry point of `python -m dissociation`."""

import importlib
import sys

from dissociation.training import _interrupts as interrupts


def main(package: str = "dissociation") -> int:
    """Run the command line of the figures of `package`, and return the exit status.

    First install the handlers of Ctrl-C and SIGTERM, and make every core of a CPU a device.
    """
    interrupts.listen(package)  # before imports, which take seconds
    words = sys.argv[1:]
    if (
        words
        and not words[0].startswith("-")
        and not {"-h", "--help", "--silent"}.intersection(words)
    ):
        sys.stderr.write(f"{package} {words[0]}: importing JAX\n")
        sys.stderr.flush()
    figures = importlib.import_module(f"{package}.figures")
    from dissociation.training._machine import use_all_cores

    use_all_cores()
    status = figures.main()
    interrupts.end()
    return status


if __name__ == "__main__":
    sys.exit(main())
