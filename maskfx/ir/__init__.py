"""What the compiler and the runtime both know: lanes, pyramids, programs, argument trees.

May import: errors. Begin with `program.py`.
"""
