"""The steps of a run: their times, their number, and outputs extrapolated between computed ones.

May import: pipelines/parts, pipelines/*.py, runtime, ir. Begin with `schedule.py`.
"""
