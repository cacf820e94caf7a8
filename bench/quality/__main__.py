"""`python -m bench.quality`."""

import sys

from bench.quality.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
