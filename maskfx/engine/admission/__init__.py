"""Which requests of an engine run, and which calls a step batches.

May import: scheduling, engine, pipelines, runtime, ir, errors. Begin with `admission.py`.
"""
