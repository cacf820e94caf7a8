"""Stores of entries: a directory of files, or an object store behind a URL.

May import: ir, errors. Begin with `store.py`.
"""
