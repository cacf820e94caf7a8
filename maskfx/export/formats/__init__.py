"""The formats of exported graphs: each file writes a graph in one of them.

May import: what the rest of `export` imports. Begin with `onnx.py`.
"""
