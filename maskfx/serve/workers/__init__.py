"""Worker processes, their supervision, the link to them, and pixels in shared memory.

May import: serve's shared files and models. Begin with `supervisor.py`.
"""
