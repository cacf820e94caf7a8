"""Templates: recorded steps under one name, their size in bytes, and byte budgets for them.

May import: runtime/*.py, runtime/batch, runtime/cache, runtime/planner, runtime/sites,
compiler/capture, ir, errors. Begin with `templates.py`.
"""
