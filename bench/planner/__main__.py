"""`python -m bench.planner`."""

import sys

from bench.planner.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
