"""Templates: recorded steps under one name, their size in bytes, and byte budgets for them.

May import: runtime's steps, batch, cache, planner and sites, ir, errors. Begin with `templates.py`.
"""
