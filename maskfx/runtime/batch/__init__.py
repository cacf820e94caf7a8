"""Builds the graph inputs of one batch, converts values to rows and back, counts FLOPs and bytes.

May import: runtime/backends, runtime/cache, runtime/devices, runtime/lora, runtime/sites, compiler,
ops, ir, errors. Begin with `frame.py`.
"""
