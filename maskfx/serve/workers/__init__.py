"""Worker processes, their supervision, and the link to them.

May import: serve/*.py, serve/models, maskfx, runtime/processes, runtime/cache, errors. Begin with
`supervisor.py`.
"""
