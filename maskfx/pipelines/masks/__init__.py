"""Masks of pictures and videos, and their grids at the sizes of latents and denoisers.

May import: runtime, errors. Begin with `masks.py`.
"""
