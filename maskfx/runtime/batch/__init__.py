"""Builds the graph inputs of one batch, converts values to rows and back, counts FLOPs and bytes.

May import: runtime/backends, runtime/cache, runtime/hardware, runtime/lora, runtime/sites,
compiler, ops, ir, errors. Begin with `frame.py`.
"""
