"""`python -m bench.rounds`."""

import sys

from bench.rounds.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
