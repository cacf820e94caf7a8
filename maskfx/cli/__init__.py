"""The command `maskfx`: arguments, and what each subcommand reads, shows and writes.

May import: every other room; nothing imports this one. Begin with `main.py`.
"""
