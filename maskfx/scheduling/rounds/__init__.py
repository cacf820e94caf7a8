"""Rounds on several devices: which requests run on which of them until the next border. Pure.

May import: scheduling/*.py, runtime/planner/least_squares, runtime/step_kinds, ir, errors.
Begin with `rounds.py`.
"""
