"""Passes that rewrite each kind of operator so that it computes active rows only.

May import: passes, ir, ops, errors. Begin with `linear.py`.
"""
