"""Recordings in memory files: each process has the same rows, and its own view of them."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from maskfx.runtime.cache.quantize import Format, Packed, pack
from maskfx.runtime.cache.rows import InterpolatedRows, Rows, RowSubset, whole
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.processes import memory_files
from maskfx.runtime.transport.shared_value import SharedValue, received_value
from maskfx.runtime.transport.tensor_transport import Unsendable

pytestmark = pytest.mark.skipif(not memory_files.exist(), reason="needs memory files")


def a_recording() -> StepCache:
    full = torch.randn(2, 64, 4, 16)
    sites = torch.arange(0, 64, 2, dtype=torch.int32)
    rows: dict[str, Rows] = {
        "full": full,
        "same": full,
        "second": full[1:],
        "strided": torch.randn(1, 16, 128).transpose(1, 2),
        "packed": pack(full, Format.INT8),
        "some": RowSubset(full[:, ::2].contiguous(), sites),
        "between": InterpolatedRows(full, full + 1, 0.25),
    }
    return StepCache("code", {"batch": 2}, torch.float32, [full[0, 0]], {}, rows=rows)


def test_a_recording_comes_back_and_each_tensor_is_copied_once() -> None:
    sent = a_recording()
    shared = SharedValue(sent)
    sent_parts = [bytes(part) for part in shared.message.parts]
    one, other = (received_value(sent_parts, shared.nbytes, shared.descriptor) for _ in range(2))
    assert one.sizes == sent.sizes
    for tap, rows in sent.rows.items():
        if isinstance(rows, Packed):
            assert torch.equal(one.rows[tap].whole(), rows.whole())
        elif isinstance(rows, RowSubset):
            assert isinstance(rows.rows, Tensor)
            assert torch.equal(one.rows[tap].rows, rows.rows)
        else:
            assert torch.equal(whole(one.rows[tap]), whole(rows))
    assert one.rows["full"].data_ptr() == one.rows["same"].data_ptr()
    assert shared.message.nbytes < 1 << 14
    one.rows["full"].zero_()
    assert torch.equal(other.rows["full"], whole(sent.rows["full"]))


def test_the_file_closes_with_the_value() -> None:
    shared = SharedValue(a_recording())
    descriptor = shared.descriptor
    os.fstat(descriptor)
    del shared
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_what_is_not_such_a_file_is_refused() -> None:
    shared = SharedValue(a_recording())
    with pytest.raises(Unsendable, match="can't be mapped"):
        received_value(shared.message.parts, shared.nbytes * 2, shared.descriptor)
    with pytest.raises(Unsendable, match="can't be mapped"):
        received_value([b"none"], shared.nbytes, shared.descriptor)
