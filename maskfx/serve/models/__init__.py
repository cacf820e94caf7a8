"""Models that a worker runs: a compiled pipeline behind an engine, or a fake one. Imports torch.

May import: engine, pipelines, runtime, shipped, serve's shared files and scheduling. Begin with
`model.py`.
"""
