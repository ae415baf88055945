"""`python -m gradsight` is the `gradsight` command."""

import sys

from gradsight.cli import main

if __name__ == "__main__":
    sys.exit(main())
