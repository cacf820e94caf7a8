"""Group norms and writes of rows in C, which a CPU runs for small batches.

A step of a small edit has dozens of norms over a few rows each, and one that replaces cached rows
writes to dozens of buffers; the calls of PyTorch and NumPy cost more than the work. `rows.c` is
compiled by the machine's C compiler at the first call, in about half a second, and kept. Where
there is no compiler, the plain implementations run.

May import: ops/*.py, ops/kernels/serves; the plain operators. Begin with `cpu.py`.
"""
