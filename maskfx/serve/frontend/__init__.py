"""Manages requests from arrival to response, in one event loop.

May import: serve's shared files, scheduling and workers. Begin with `frontend.py`.
"""
