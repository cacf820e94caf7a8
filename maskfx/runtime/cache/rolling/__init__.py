"""Recorded steps whose rows are replaced where later steps compute them, in shared buffers.

May import: runtime/cache, runtime/hardware, runtime/processes, runtime/sites, ops, ir, errors.
Begin with `rolling_cache.py`.
"""
