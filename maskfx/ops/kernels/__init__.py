"""Triton kernels that operators run on a CUDA device, beside their plain implementations.

Where a kernel isn't there or doesn't serve a call, the plain implementation runs. `cuda.py` has the
implementations that operators choose on CUDA; the other files have one kernel, or a few, and the
function that launches it. Triton is imported by the first call that launches a kernel.

May import: ops/*.py; the plain operators. Begin with `cuda.py`.
"""
