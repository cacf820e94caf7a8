"""Programs by arguments and size: compiled once, proven, shared by equal modules, kept in files.

May import: execution, validation, sites, steps, compiler. Begin with `program_cache.py`.
"""
