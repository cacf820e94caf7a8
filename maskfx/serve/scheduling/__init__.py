"""Scheduling, routing and the cost model of requests: no torch, no clock, no sockets.

`scheduler.py` serves; `rounds.py` shares several devices, in the engine through `elastic.py`.

May import: serve's shared files, errors, the engine's policy of rounds, and runtime's step
selection and least squares. Begin with `scheduler.py`.
"""
