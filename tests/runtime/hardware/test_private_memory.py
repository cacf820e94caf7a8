"""Shared memory that one process writes into a copy of: others see nothing, and bits come back."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from maskfx.runtime.hardware import private_memory
from maskfx.runtime.hardware.private_memory import PrivateMemory, refusal
from maskfx.runtime.lora.adapter import LowRank, WeightedLayers
from maskfx.runtime.lora.patch import WeightPatch


def shared(*shape: int) -> tuple[Tensor, Tensor]:
    """Return a tensor in shared memory, and the same memory as another process maps it."""
    tensor = torch.randn(*shape).share_memory_()
    descriptor, size = tensor.untyped_storage()._share_fd_cpu_()[:2]
    storage: Any = torch.UntypedStorage
    other: Any = storage._new_shared_fd_cpu(os.dup(descriptor), size)
    found = torch.tensor([], dtype=tensor.dtype).set_(other)
    return tensor, found[: tensor.numel()].view(shape)


def test_others_keep_their_numbers_and_the_bits_come_back() -> None:
    (first, theirs), (second, _) = shared(40, 50), shared(3)
    before, view, address = first.clone(), first[1:3], first.data_ptr()
    memory = PrivateMemory()
    for tensor in (first, first[2:], second):
        memory.take(tensor)
    assert memory.nbytes == first.nbytes + second.nbytes
    first.add_(1)
    assert torch.equal(theirs, before)
    assert torch.equal(view, (before + 1)[1:3])
    memory.release()
    assert first.data_ptr() == address
    assert torch.equal(first, before)
    theirs.mul_(2)
    assert torch.equal(view, 2 * before[1:3]), "it is the same memory again"
    assert not memory.nbytes


def test_patches_of_shared_weights_are_seen_by_this_process_alone() -> None:
    layer = torch.nn.Linear(30, 20).requires_grad_(False).share_memory()
    other, theirs = shared(20, 30)
    layer.weight = torch.nn.Parameter(other, requires_grad=False)
    before, version = layer.weight.clone(), layer.weight._version
    update = LowRank(torch.randn(2, 30), torch.randn(20, 2), 1.0)
    patch = WeightPatch(torch.nn.ModuleDict({"layer": layer}))
    for _ in range(3):
        patch.apply([WeightedLayers({"layer": update}, 1.0, "a digest")], private=True)
        assert torch.allclose(layer.weight, before + update.up @ update.down, atol=1e-5)
        assert torch.equal(theirs, before)
        assert patch.nbytes == before.nbytes
        patch.remove()
        assert torch.equal(layer.weight, before)
    assert layer.weight._version > version, "what is derived from the weight follows"


def test_what_cannot_be_mapped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, _ = shared(40)
    assert not refusal([tensor, tensor[3:]])
    with monkeypatch.context() as patch:
        patch.setattr("torch.multiprocessing.get_sharing_strategy", lambda: "file_system")
        assert "open files" in refusal([tensor])
    memory = PrivateMemory()
    monkeypatch.setattr(private_memory, "remap", failing)
    with pytest.raises(OSError, match="no room"):
        memory.take(tensor)
    assert not memory.nbytes


def failing(*_: object) -> None:
    raise OSError("no room")
