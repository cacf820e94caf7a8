"""The active sites of a mask at every level, and bounds on the masks that edits may have.

May import: ir, errors. Begin with `active.py`.
"""
