"""LoRA files and the adapters of a call, which may arrive after its first step.

May import: parts, runtime, errors. Begin with `lora.py`.
"""
