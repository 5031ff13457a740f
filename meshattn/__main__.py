"""``python -m meshattn``."""

import sys

from meshattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
