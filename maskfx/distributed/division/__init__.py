"""How a batch is divided over ranks: which rows each computes and exchanges, and what it costs.

May import: runtime, compiler, ops, ir. Begin with `partition.py`.
"""
