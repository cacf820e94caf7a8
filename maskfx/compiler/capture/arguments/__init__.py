"""What the arguments of a denoiser mean: roles of their dimensions, and sides of the picture.

May import: ir, errors. Begin with `infer_roles.py`.
"""
