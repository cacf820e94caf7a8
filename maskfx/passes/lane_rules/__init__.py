"""Rules for how the axes of a value pass through each kind of operator.

May import: passes/*.py, ir; of the passes their context, operators and analyses. Begin with
`marker.py`.
"""
