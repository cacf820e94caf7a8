"""Reuse across steps: which steps are computed, edited from a recording, or extrapolated.

May import: runtime/cache, runtime/hardware, runtime/sites, runtime/*.py, ops, ir, errors. Begin
with `session.py`.
"""
