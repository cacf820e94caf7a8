"""Runs a pipeline's code: intercepts its calls, defers their results, executes them in steps.

May import: handlers, schedules, adapters, parts, masks, runtime. Begin with `run.py`.
"""
