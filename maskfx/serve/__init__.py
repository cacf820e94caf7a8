"""The server: an HTTP front end, pure scheduling logic, and disposable worker processes.

May import: engine, pipelines, runtime and the public package; outside `models/`, nothing that
imports torch. Begin with `launch.py`.
"""
