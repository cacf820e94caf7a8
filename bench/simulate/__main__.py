"""`python -m bench.simulate`."""

import sys

from bench.simulate.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
