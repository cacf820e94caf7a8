"""Child processes of any kind: start, watch and end them, and exchange messages with them.

May import: nothing of maskfx, and not torch. Begin with `child_process.py`.
"""
