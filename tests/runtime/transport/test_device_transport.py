"""Messages between processes with a device each: what is on one's device arrives on the other's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from maskfx.runtime.transport.device_transport import (
    Copies,
    pack_from,
    pack_module,
    unpack_module,
    unpack_on,
)
from maskfx.runtime.transport.shared_value import SharedValue, mapped, received_value
from maskfx.runtime.transport.tensor_transport import Unsendable
from tests.factories import emulated

OWN, THEIRS = (torch.device(emulated.NAME, number) for number in range(2))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_devices() -> None:
    if not emulated.IS_EMULATED and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")


@pytest.mark.parametrize(("sender", "receiver"), [(OWN, THEIRS), (THEIRS, OWN), (CPU, CPU)])
def test_a_message(sender: torch.device, receiver: torch.device) -> None:
    """Tensors keep their values, and one that is there twice is one tensor again."""
    rows = torch.randn(40, 30, device=sender)
    value = {
        "rows": rows,
        "again": [rows, rows[:2, ::3]],
        "host": torch.arange(5),
        "device": sender,
        "empty": torch.empty(0, 3, device=sender),
        "weight": nn.Parameter(torch.ones(3, device=sender), requires_grad=False),
    }
    found: Any = unpack_on(receiver, [bytearray(p) for p in pack_from(sender, value)])
    assert found["rows"].device == found["device"] == receiver
    assert torch.equal(found["rows"].cpu(), rows.cpu())
    if sender != CPU:
        assert found["again"][0] is found["rows"]
    assert torch.equal(found["again"][1].cpu(), rows[:2, ::3].cpu())
    assert torch.equal(found["host"], torch.arange(5))
    assert found["host"].device == CPU
    assert (found["empty"].shape, found["empty"].device) == ((0, 3), receiver)
    assert (found["weight"].device, found["weight"].requires_grad) == (receiver, False)


def test_what_cant_be_sent_is_refused() -> None:
    with pytest.raises(Unsendable, match="dict: "):
        pack_from(OWN, {"a": lambda: None})
    with pytest.raises(Unsendable, match="can't be unpickled"):
        unpack_on(OWN, [bytearray(b"no pickle")])


class Parts(nn.Module):
    """Two layers, a buffer, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))
        self.table = torch.arange(3.0)


def test_a_module_for_two_processes() -> None:
    """Its weights are in shared memory once, and each process gets its own copy of them."""
    module = Parts().to(OWN).requires_grad_(False)
    module.second.weight = module.first.weight  # moved apart
    module.table = module.table.to(OWN)
    copies: Copies = {}
    packed = [pack_module(OWN, (module, "settings"), copies) for _ in range(2)]
    assert len(copies) == 5  # weight, two biases, buffer, table
    assert all(there.is_shared() and there.device == CPU for _, there in copies.values())
    copies.clear()
    for content in packed:
        found, settings = unpack_module(THEIRS, content)
        assert settings == "settings"
        assert found.first.weight is found.second.weight
        assert isinstance(found.first.weight, nn.Parameter)
        own, theirs = module.state_dict(), found.state_dict()
        assert own.keys() == theirs.keys()
        for name, value in theirs.items():
            assert value.device == THEIRS
            assert torch.equal(value.cpu(), own[name].cpu())
        assert found.table.device == THEIRS
        found.first.weight.zero_()
    assert module.first.weight.any()


def test_tensors_of_a_device_in_a_memory_file() -> None:
    value = {"rows": torch.randn(50, 40, device=OWN), "small": torch.ones(2, device=OWN)}
    held = {**value, "host": torch.randn(50, 40)}
    shared = SharedValue(held, OWN)
    found = received_value(shared.message.parts, shared.nbytes, shared.descriptor, THEIRS)
    assert [found[name].device for name in held] == [THEIRS, THEIRS, CPU]
    for name, one in held.items():
        assert torch.equal(found[name].cpu(), one.cpu())
    there = mapped(shared.descriptor, shared.nbytes, shared=True)
    there.zero_()
    assert found["rows"].any(), "the device has its own copy"
