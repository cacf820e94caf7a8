"""Group norms in C, which a CPU runs for small batches beside the plain implementations.

A step of a small edit has dozens of them over a few rows each, where the calls of PyTorch and NumPy
cost more than the work. `rows.c` is compiled by the machine's C compiler at the first
call, in about half a second, and kept. Where there is no compiler, the plain implementations run.

May import: the plain operators of `ops`. Begin with `cpu.py`.
"""
