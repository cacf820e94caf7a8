"""Reuse across steps: which steps are computed, edited from a recording, or extrapolated.

May import: runtime/*.py, runtime/cache, runtime/sites, ops, ir, errors. Begin with `session.py`.
"""
