"""What compiler and runtime share: lanes, pyramids, programs, arguments, progress.

May import: errors. Begin with `programs/program.py`.
"""
