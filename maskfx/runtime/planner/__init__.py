"""Plans: load or compute, per block and member; costs, and the search for the fastest plan.

May import: runtime/*.py, runtime/backends, runtime/batch, runtime/cache, runtime/sites, ops, ir,
errors. Begin with `plan.py`.
"""
