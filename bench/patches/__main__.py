"""`python -m bench.patches`."""

import sys

from bench.patches.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
