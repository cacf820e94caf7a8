"""LoRA: low-rank updates of layers, per request.

May import: ir, ops, errors. Begin with `adapter.py`.
"""
