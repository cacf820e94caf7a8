"""Worker processes, their supervision, the link to them, and pixels in shared memory.

May import: serve's shared files, models and runtime/processes. Begin with `supervisor.py`.
"""
