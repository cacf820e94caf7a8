"""From a module to a Program: capture, then the passes, then what runs dense.

May import: ir, passes, errors; of the other rooms only the runtime imports this one. Begin with
`compile.py`.
"""
