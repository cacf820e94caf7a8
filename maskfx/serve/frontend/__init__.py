"""Manages requests from arrival to response, in one event loop.

May import: serve/*.py, serve/scheduling, serve/workers, maskfx, runtime/step_kinds, runtime/cache,
errors. Begin with `frontend.py`.
"""
