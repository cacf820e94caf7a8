"""Compiled diffusers pipelines, whose denoisers compute only masked sites.

May import: runtime, ops, ir, config, errors. Begin with `compile.py`.
"""
