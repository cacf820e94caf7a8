"""Backends that run a rewritten graph: operator by operator, or through Inductor.

May import: runtime/devices, compiler, ops, ir, config, errors. Begin with `eager.py`.
"""
