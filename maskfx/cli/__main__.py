"""`python -m maskfx.cli`."""

from maskfx.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
