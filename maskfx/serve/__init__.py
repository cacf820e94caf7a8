"""HTTP in front, pure scheduling in the middle, disposable workers behind.

May import: engine, pipelines, runtime and the public package; outside `models/` nothing that
imports torch. Begin with `launch.py`.
"""
