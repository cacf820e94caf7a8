"""Serving: HTTP in front, pure scheduling in the middle, disposable workers behind.

Only `worker.py` and `model.py` may import torch, inside a worker's process.
"""
