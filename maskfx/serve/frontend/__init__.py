"""Manages requests from arrival to response, in one event loop.

May import: serve/*.py, serve/workers, scheduling, maskfx, runtime/step_kinds, runtime/cache,
errors. Begin with `frontend.py`.
"""
