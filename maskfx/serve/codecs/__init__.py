"""Decodes, resizes, pastes and encodes images in dedicated processes.

May import: serve/*.py, runtime/processes. Begin with `pool.py`.
"""
