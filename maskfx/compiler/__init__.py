"""Compiles a module to a Program: capture, passes, and the parts that run dense.

May import: ir, ops, passes, errors; of the other rooms only runtime, distributed and export import
this one. Begin with `compile.py`.
"""
