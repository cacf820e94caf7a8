"""Exports a compiled denoiser for deployments without Python: graphs, manifest, host.

May import: compiler, ops, ir, errors. Begin with `manifest.py`.
"""
