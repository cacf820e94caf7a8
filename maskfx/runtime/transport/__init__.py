"""Sends tensors, modules and recorded steps between processes of one machine.

May import: runtime/cache, runtime/hardware, runtime/processes, runtime/*.py, ir, errors. Begin with
`tensor_transport.py`.
"""
