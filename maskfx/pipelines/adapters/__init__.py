"""LoRA files and the adapters of a call, which may arrive after its first step.

May import: pipelines/parts, pipelines/*.py, runtime, ir, errors. Begin with `lora.py`.
"""
