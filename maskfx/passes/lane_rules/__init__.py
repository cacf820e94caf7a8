"""Rules for how the axes of a value pass through each kind of operator.

May import: ir, and the passes' context and operators. Begin with `marker.py`.
"""
