"""LoRA: low-rank updates of layers, per request.

May import: ir, ops, errors, runtime.processes. Begin with `adapter.py`.
"""
