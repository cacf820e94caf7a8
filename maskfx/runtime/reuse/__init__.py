"""Which steps of a request are computed, taken from a recording, or extrapolated.

May import: runtime's denoiser, steps and cache, ir, errors. Begin with `session.py`.
"""
