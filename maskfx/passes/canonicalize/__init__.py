"""Passes that write each kind of operator in one spelling, before rows are looked at.

May import: passes/*.py, ops, ir. Begin with `slices.py`.
"""
