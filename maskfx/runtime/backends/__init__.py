"""Backends that run a rewritten graph: operator by operator, or through Inductor.

May import: ops, ir, config, compiler. Begin with `eager.py`.
"""
