"""Scheduling, routing and the cost model of requests: no torch, no clock, no sockets.

`scheduler.py` serves, and in an engine through `slack_admission.py`; `rounds/` shares several
devices, in an engine through `rounds/elastic.py`.

May import: runtime/planner/least_squares, runtime/reuse/step_selection, runtime/step_kinds, ir,
errors. Begin with `scheduler.py`.
"""
