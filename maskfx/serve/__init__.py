"""Serving: HTTP in front, pure scheduling in the middle, disposable workers behind.

Only what runs in a worker's process may import torch.
"""
