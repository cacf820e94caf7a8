"""Which request starts when and where, and predicted seconds: no torch, no clock, no sockets.

May import: serve's shared files, errors, and which steps a run computes. Begin with `scheduler.py`.
"""
