"""`python -m dissociation`."""

import sys

from dissociation.cli import main

if __name__ == "__main__":
    sys.exit(main())
