"""The server: an HTTP front end, pure scheduling logic, and disposable worker processes.

May import: maskfx, engine, export, shipped, pipelines, runtime, ops, ir, errors; outside `models/`,
nothing that imports torch. Begin with `launch.py`.
"""
