"""Splits the step of a batch over ranks: processes that each compute a part of its rows.

May import: runtime, compiler, ops, ir, config, errors. Begin with `division/partition.py`.
"""
