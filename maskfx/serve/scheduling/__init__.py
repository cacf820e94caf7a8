"""Scheduling, routing and the cost model of requests: no torch, no clock, no sockets.

May import: serve's shared files, errors, and runtime's step selection and least squares. Begin
with `scheduler.py`; the scheduler of several devices begins with `rounds.py`.
"""
