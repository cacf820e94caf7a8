"""Data structures shared by the compiler and the runtime: lanes, pyramids, programs, arguments.

May import: errors. Begin with `program.py`.
"""
