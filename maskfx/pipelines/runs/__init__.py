"""Runs a pipeline's code: intercepts its calls, defers their results, executes them in steps.

May import: pipelines/adapters, pipelines/handlers, pipelines/masks, pipelines/parts,
pipelines/schedules, pipelines/templates, pipelines/*.py, runtime, ops, ir, errors. Begin with
`run.py`.
"""
