"""Child processes of any kind: start, watch and end them, and exchange messages with them.

May import: nothing of maskfx; not torch either. Begin with `child_process.py`.
"""
