"""Attention, group norms, writes of rows and exchanges between processes in C, for a CPU.

A step of a small edit has dozens of norms over a few rows each, and one that replaces cached rows
writes to dozens of buffers; the calls of PyTorch and NumPy cost more than the work. `attention.c`
and `linear.c` compute attention and products of few rows in vectors of 512 bits, without copying
cached keys and without bringing weights into another layout.
`rings.c` moves what ranks of one machine exchange. All are compiled by the machine's C compiler at
the first call, in about a second, and kept. Without a compiler the plain implementations run.

May import: ops/*.py, ops/kernels/serves; the plain operators. Begin with `cpu.py`.
"""
