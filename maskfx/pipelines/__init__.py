"""Compiled diffusers pipelines, whose denoisers compute only masked sites.

May import: runtime, ir, config, errors. Begin with `compile.py`.
"""
