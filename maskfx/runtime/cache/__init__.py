"""Recorded steps: in memory, on a device, in tiers and on disk, in full or in fewer bits.

May import: runtime's sites, ops, ir, errors. Begin with `step_cache.py`.
"""
