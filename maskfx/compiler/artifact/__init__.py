"""Compiled programs outside their process: saved to a file, loaded without capture or passes.

May import: what the rest of `compiler` imports. Begin with `artifact.py`.
"""
