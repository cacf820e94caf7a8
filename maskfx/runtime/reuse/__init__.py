"""Reuse across steps: which steps are computed, edited from a recording, or extrapolated.

May import: runtime's denoiser, steps and cache, ir, errors. Begin with `session.py`.
"""
