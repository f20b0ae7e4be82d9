"""Entry point of `python -m koopman`."""

import sys
from functools import partial

from dissociation.__main__ import main as run

main = partial(run, "koopman")

if __name__ == "__main__":
    sys.exit(main())
