"""`python -m bench.load`."""

import sys

from bench.load.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
