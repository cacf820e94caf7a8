"""Builds the graph inputs of one batch, converts values to rows and back, counts FLOPs and bytes.

May import: runtime's sites and cache, ops, ir, errors. Begin with `frame.py`.
"""
