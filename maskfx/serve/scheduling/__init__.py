"""Scheduling, routing and the cost model of requests: no torch, no clock, no sockets.

`scheduler.py` serves; `rounds.py` shares several devices and is not connected to the server.

May import: serve's shared files, errors, and runtime's step selection and least squares. Begin
with `scheduler.py`.
"""
