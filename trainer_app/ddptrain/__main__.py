"""``python -m ddptrain`` is the console script ``ddptrain``."""

import sys

from ddptrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
