"""The picture as lanes, levels and grids: what each axis of a value means, and what windows read.

May import: errors. Begin with `lanes.py`.
"""
