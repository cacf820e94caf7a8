"""Diffusers pipelines whose denoisers compute only what is masked.

May import: runtime, ir, config, errors. Begin with `compile.py`.
"""
