"""Reads and replaces the components of a diffusers pipeline: denoisers, guiders, blocks.

May import: pipelines/*.py, runtime, ir, errors. Begin with `pipeline.py`.
"""
