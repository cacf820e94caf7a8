"""Stores recorded steps on a device, in host memory and on disk, in full or reduced precision.

May import: runtime/hardware, runtime/processes, runtime/sites, ops, ir, errors. Begin with
`step_cache.py`.
"""
