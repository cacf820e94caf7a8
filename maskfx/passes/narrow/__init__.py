"""Passes that rewrite each kind of operator so that it computes active rows only.

May import: passes/lane_rules, passes/*.py, ops, ir. Begin with `linear.py`.
"""
