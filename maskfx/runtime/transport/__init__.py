"""Sends tensors, modules and recorded steps between processes of one machine.

May import: processes, cache, steps. Begin with `tensor_transport.py`.
"""
