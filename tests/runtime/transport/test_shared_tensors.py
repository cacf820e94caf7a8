"""Tensors that cross to another process once, and come back as numbers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from maskfx.runtime.transport.shared_tensors import PackedMessage, TensorHolder, TensorSender
from maskfx.runtime.transport.tensor_transport import Unsendable, pack, unpack

LARGE = (64, 64)  # 16 KiB


def crossed(message: PackedMessage) -> PackedMessage:
    """A message as the other process receives it."""
    found: PackedMessage = unpack([bytearray(part) for part in pack(message)])
    return found


def given(sender: TensorSender, holder: TensorHolder, value: Any) -> tuple[Any, int]:
    """What the holder makes of a value, and the bytes of the message."""
    message = sender.pack(value)
    found = holder.unpack(crossed(message))
    assert sender.unpack(crossed(holder.pack("done"))) == "done"
    return found, message.nbytes


def test_a_tensor_is_sent_once_and_is_the_same_object_afterwards() -> None:
    sender, holder, large = TensorSender(), TensorHolder(), torch.randn(LARGE)
    first, nbytes = given(sender, holder, {"a": large, "b": [large, 3]})
    assert large.nbytes < nbytes < 2 * large.nbytes
    assert torch.equal(first["a"], large)
    assert first["a"] is first["b"][0]
    again, nbytes = given(sender, holder, (large,))
    assert nbytes < 1000
    assert again[0] is first["a"]


def test_a_changed_tensor_is_sent_again_and_its_old_number_dropped() -> None:
    sender, holder, large = TensorSender(), TensorHolder(), torch.randn(LARGE)
    first, _ = given(sender, holder, large)
    large.add_(1)
    again, nbytes = given(sender, holder, large)
    assert nbytes > large.nbytes
    assert torch.equal(again, large)
    assert not torch.equal(first, large)
    holder.drop(sender.dropped())
    assert len(holder.held) == 1


def test_numbers_of_tensors_that_are_gone_are_dropped() -> None:
    sender, holder = TensorSender(), TensorHolder()
    kept = torch.randn(LARGE)
    given(sender, holder, [kept, torch.randn(LARGE)])
    assert len(holder.held) == 2
    gc.collect()
    holder.drop(sender.dropped())
    assert [torch.equal(one, kept) for one in holder.held.values()] == [True]
    assert sender.dropped() == []


def test_a_view_of_a_known_tensor_is_sent_as_its_place() -> None:
    sender, holder, large = TensorSender(), TensorHolder(), torch.randn(LARGE)
    given(sender, holder, large)
    part = large.narrow(0, 3, 40).t()
    found, nbytes = given(sender, holder, part)
    assert nbytes < 1000
    assert torch.equal(found, part)


def test_tensors_that_an_answer_numbered_need_no_contents_when_they_are_sent_back() -> None:
    sender, holder = TensorSender(), TensorHolder("first")
    rows, output = torch.randn(LARGE), torch.randn(LARGE)
    made = sender.unpack(crossed(holder.pack({"rows": rows, "output": output}, {id(rows)})))
    assert torch.equal(made["rows"], rows)
    assert len(holder.held) == 1
    back, nbytes = given(sender, holder, [made["rows"]])
    assert nbytes < 1000
    assert back[0] is rows
    del made
    gc.collect()
    holder.drop(sender.dropped())
    assert holder.held == {}


def test_a_message_that_may_not_have_arrived_is_sent_whole_again() -> None:
    sender, holder, large = TensorSender(), TensorHolder(), torch.randn(LARGE)
    sender.pack(large)
    sender.undo()
    found, nbytes = given(sender, holder, large)
    assert nbytes > large.nbytes
    assert torch.equal(found, large)


def test_a_number_that_the_holder_lacks_is_an_error() -> None:
    sender, large = TensorSender(), torch.randn(LARGE)
    sender.pack(large)
    with pytest.raises(Unsendable, match="isn't in this process"):
        TensorHolder().unpack(crossed(sender.pack(large)))


def test_after_clear_everything_is_sent_again() -> None:
    sender, large = TensorSender(), torch.randn(LARGE)
    given(sender, TensorHolder(), large)
    sender.clear()
    found, _ = given(sender, TensorHolder(1), large)
    assert torch.equal(found, large)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3),
        torch.randn(64, 64).t(),
        torch.randn(64, 64, dtype=torch.bfloat16),
        torch.arange(9000),
        torch.rand(100, 100) > 0.5,
        torch.empty(0, 5),
        torch.tensor(2.0),
    ],
    ids=lambda value: f"{value.dtype}-{tuple(value.shape)}",
)
def test_any_tensor_arrives_as_it_is(value: Tensor) -> None:
    found, _ = given(TensorSender(), TensorHolder(), value)
    assert found.dtype == value.dtype
    assert torch.equal(found, value)


def test_tensors_of_inference_mode_are_sent_each_time() -> None:
    with torch.inference_mode():
        value = torch.randn(LARGE)
    sender, holder = TensorSender(), TensorHolder()
    for _ in range(2):
        found, nbytes = given(sender, holder, value)
        assert nbytes > value.nbytes
        assert torch.equal(found, value)
    assert holder.held == {}


def test_what_cannot_be_pickled_leaves_no_numbers() -> None:
    sender, holder, large = TensorSender(), TensorHolder(), torch.randn(LARGE)
    with pytest.raises(Unsendable):
        sender.pack([large, lambda: None])
    found, _ = given(sender, holder, large)
    assert torch.equal(found, large)
