"""`python -m bench.agree`."""

import sys

from bench.agree.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
