"""How the meaning of axes goes through each kind of operator.

May import: ir, and the passes' context and operators. Begin with `marker.py`.
"""
