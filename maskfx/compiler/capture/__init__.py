"""torch.export of a denoiser at distinct sizes, and the calls that a capture is valid for.

May import: ir, ops, errors. Begin with `capture.py`.
"""
