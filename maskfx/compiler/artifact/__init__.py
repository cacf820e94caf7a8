"""Compiled programs outside their process: saved to a file, loaded without capture or passes.

May import: compiler/build_program, compiler/capture, compiler/compile, ir, ops, passes, errors.
Begin with `artifact.py`.
"""
