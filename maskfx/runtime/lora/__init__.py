"""LoRA: low-rank updates of layers, per request.

May import: runtime/processes, compiler/artifact, ir, errors. Begin with `adapter.py`.
"""
