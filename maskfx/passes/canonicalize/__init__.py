"""Passes that write each kind of operator in one spelling, before rows are looked at.

May import: passes, ir, ops, errors. Begin with `slices.py`.
"""
