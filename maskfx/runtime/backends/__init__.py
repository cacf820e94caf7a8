"""Backends that run a rewritten graph: operator by operator, or through Inductor.

May import: runtime/hardware, compiler, ops, ir, config, errors. Begin with `eager.py`.
"""
