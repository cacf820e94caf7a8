"""Plans: load or compute, per block and member; costs, and the search for the fastest plan.

May import: runtime/backends, runtime/batch, runtime/cache, runtime/execution, runtime/hardware,
runtime/sites, runtime/*.py, ops, ir, errors. Begin with `plan.py`.
"""
