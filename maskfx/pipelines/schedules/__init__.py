"""The steps of a run: their times, their number, and outputs extrapolated between computed ones.

May import: parts, runtime, errors. Begin with `schedule.py`.
"""
