"""LoRA: low-rank updates of layers, per request.

May import: runtime/popularity, runtime/processes, runtime/hardware, compiler/artifact, ir, errors.
Begin with `adapter.py`.
"""
