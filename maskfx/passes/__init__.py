"""Passes that rewrite a captured graph so that it computes active rows only.

May import: ir, ops, errors; only the compiler imports this room. Begin with `pipeline.py`.
"""
