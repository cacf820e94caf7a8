"""Requests from their arrival to their answer, in one event loop.

May import: serve's shared files, scheduling and workers. Begin with `frontend.py`.
"""
