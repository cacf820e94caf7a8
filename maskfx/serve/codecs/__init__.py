"""Decodes, resizes, pastes and encodes images in dedicated processes.

May import: serve's shared files, runtime/processes. Begin with `pool.py`.
"""
