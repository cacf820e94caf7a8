"""Programs by arguments and size: compiled once, proven, shared by equal modules, kept in files.

May import: runtime/batch, runtime/execution, runtime/sites, runtime/*.py, compiler, ir, config,
errors. Begin with `program_cache.py`.
"""
