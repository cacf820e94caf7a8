"""The compiler's output for the runtime: a program, and what each input of its graph is.

May import: ir/geometry, ir, errors. Begin with `program.py`.
"""
