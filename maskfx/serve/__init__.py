"""The server: an HTTP front end, and disposable worker processes.

May import: maskfx, engine, scheduling, export, shipped, pipelines, distributed, runtime, ops, ir,
errors; outside `models/`, nothing that imports torch. Begin with `launch.py`.
"""
