"""`python -m bench.denoisers`."""

import sys

from bench.denoisers.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
