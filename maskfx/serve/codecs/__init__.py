"""Pictures as files and as pixels: decoded, resized, pasted and encoded in processes of their own.

May import: serve's shared files. Begin with `pool.py`.
"""
