"""The steps of a run: their times, their number, and outputs extrapolated between computed ones.

May import: pipelines/parts, pipelines/*.py, runtime, ir, errors. Begin with `schedule.py`.
"""
