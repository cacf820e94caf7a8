"""Compiles a module to a Program: capture, passes, and the parts that run dense.

May import: ir, passes, errors; of the other rooms only the runtime imports this one. Begin with
`compile.py`.
"""
