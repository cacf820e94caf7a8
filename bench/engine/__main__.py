"""`python -m bench.engine`."""

import sys

from bench.engine.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
