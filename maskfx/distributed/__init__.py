"""Splits the step of a batch over ranks: processes that each compute a part of its rows.

May import: the rooms below it. Begin with `partition.py`.
"""
