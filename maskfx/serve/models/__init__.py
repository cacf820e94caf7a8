"""Models that a worker runs: a compiled pipeline behind an engine, or a fake one. Imports torch.

May import: serve/*.py, scheduling, maskfx, engine, export, shipped, pipelines, distributed,
runtime, ops, ir, errors. Begin with `model.py`.
"""
