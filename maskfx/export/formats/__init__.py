"""The formats of exported graphs: each file writes a graph in one of them.

May import: export/*.py, runtime/backends, ir/geometry/lanes, ir/values, errors.
Begin with `onnx.py`.
"""
