"""The graph inputs of one batch, rows out of full values and back, and FLOPs and bytes.

May import: runtime's sites and cache, ops, ir, errors. Begin with `frame.py`.
"""
