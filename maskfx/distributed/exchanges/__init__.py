"""Exchanges between ranks: over shared memory, gloo or NCCL, waited for or a step late.

May import: distributed/division, runtime, compiler, ops, ir. Begin with `process_group.py`.
"""
