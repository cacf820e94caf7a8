"""Scheduling, routing and the cost model of requests: no torch, no clock, no sockets.

`scheduler.py` serves; `rounds.py` shares several devices, in the engine through `elastic.py`.

May import: serve/*.py, engine/round_policy, runtime/planner/least_squares,
runtime/reuse/step_selection, runtime/step_kinds, ir, errors. Begin with `scheduler.py`.
"""
