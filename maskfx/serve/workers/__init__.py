"""Worker processes, their supervision, and the link to them.

May import: serve's shared files, models and runtime/processes. Begin with `supervisor.py`.
"""
