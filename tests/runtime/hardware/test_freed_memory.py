"""Freed memory that a process keeps: large blocks cost no page faults again."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys
from maskfx.runtime.hardware.freed_memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
kept = sys.argv[1] == "kept" and keep_freed_memory()
for turn in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(48 << 20)
    ctypes.memset(block, 1, 48 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    run = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_large_block_is_mapped_once() -> None:
    if faults("usual") < 1000:
        pytest.skip("this system's allocator keeps it, or has large pages")
    assert faults("kept") < 100
