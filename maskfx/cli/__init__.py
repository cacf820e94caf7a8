"""The command `maskfx`: arguments and commands."""
