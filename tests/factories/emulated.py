"""A device that isn't the CPU, on any machine: its memory is the host's, its rules are a GPU's.

PyTorch's open registration device (`PrivateUse1`) under the name `emu`, of which there are two.
Every operator runs on the CPU over the same memory, but only if all tensors that it is given lie on
one device, as on a GPU; anything else raises. Operators that would make the host wait for a GPU are
counted, and memory can be made to run out. Numbers are real, so that oracles hold on it.

A tensor changes sides by DLPack, whose capsule states which device the memory belongs to.

With `MASKFX_TEST_DEVICE=cuda` the tests of devices run on a GPU instead; those that count or force
something on the emulated device are skipped there.
"""

from __future__ import annotations

import ctypes
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = os.environ.get("MASKFX_TEST_DEVICE", "emu")
IS_EMULATED = NAME == "emu"
CPU, EMULATED = 1, 12  # DLPack's numbers
COPIES = ("_copy_from", "_copy_from_and_resize")
# what gives the host a number, or a size that follows from numbers
WAITS: tuple[str, ...] = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
)
WAITS += ("unique_consecutive", "nonzero_static", "repeat_interleave")


class DeviceModule:
    """What PyTorch asks of `torch.emu`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 2

    def synchronize(self, device: Any = None) -> None:
        return None

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        return None


@dataclass
class Watch:
    """What a thread's operators did while it was on."""

    waits: list[str] = field(default_factory=list)  # operator, and the line of ours that called it
    uploads: list[int] = field(default_factory=list)  # bytes of each copy from the host
    thread: int = field(default_factory=threading.get_ident)


@dataclass
class State:
    watches: list[Watch] = field(default_factory=list)
    fails: Any = None  # called with each operator's name and result bytes; may raise
    refused: frozenset[torch.dtype] = frozenset()


STATE = State()
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _as(value: Tensor, kind: int, index: int) -> Tensor:
    """The same memory as a tensor of another device."""
    capsule = torch._C._to_dlpack(value.detach())
    where = _pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    place = (ctypes.c_int32 * 2).from_address(where)
    place[0], place[1] = kind, index
    found: Tensor = torch._C._from_dlpack(capsule)
    return found


def on_host(value: Tensor) -> Tensor:
    """The memory of an emulated tensor."""
    return _as(value, CPU, 0)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op.overloadpacket.__name__
    leaves, spec = pytree.tree_flatten((args, kwargs))
    here: torch.device | None = None
    owners: dict[int, Tensor] = {}
    given: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.device) and leaf.type == NAME:
            here = here or torch.device(NAME, leaf.index or 0)
            given.append(torch.device("cpu"))
        elif isinstance(leaf, Tensor) and leaf.device.type == NAME:
            if here is not None and leaf.device != here:
                raise RuntimeError(f"{op}: tensors on {here} and {leaf.device}")
            here = leaf.device
            host = on_host(leaf)
            owners[id(host)] = leaf
            given.append(host)
        else:
            given.append(leaf)
    assert here is not None, f"{op} has nothing on the device"
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.device.type != NAME and leaf.dim():
            raise RuntimeError(f"{op}: tensors on {here} and {leaf.device}, {tuple(leaf.shape)}")
    if name in WAITS:
        _waited(name)
    own_args, own_kwargs = pytree.tree_unflatten(given, spec)
    own_kwargs.pop("pin_memory", None)
    # a number that PyTorch has made a tensor of comes as a number again
    kinds = (argument.type.kind() for argument in op._schema.arguments)
    own_args = [
        torch.scalar_tensor(v, dtype=torch.tensor(v).dtype)
        if k == "TensorType" and is_number(v)
        else v
        for v, k in zip(own_args, kinds, strict=False)
    ]
    out = own_kwargs.get("out")
    alone = len(op._schema.returns) == 1
    # it may have to grow, which memory that came by DLPack can't
    if isinstance(out, Tensor) and alone:
        grown = op(*own_args, **{**own_kwargs, "out": out.new_empty(0)})
        if grown.shape != out.shape:
            raise NotImplementedError(f"{op} grows its result: name the operator in _WHOLE")
        result = out.copy_(grown)
    else:
        result = op(*own_args, **own_kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    for leaf in tensors:
        if leaf.dtype in STATE.refused:
            raise RuntimeError(f"{name}: this device has no {leaf.dtype}")
    if STATE.fails is not None:
        STATE.fails(name, sum(leaf.nbytes for leaf in tensors if id(leaf) not in owners))

    def back(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return owners[id(leaf)] if id(leaf) in owners else _as(leaf, EMULATED, here.index)

    return pytree.tree_map(back, result)


def is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


def _copy(op: Any, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if STATE.refused & {target.dtype} and target.device.type == NAME:
        raise RuntimeError(f"copy: this device has no {target.dtype}")
    ours, theirs = (on_host(t) if t.device.type == NAME else t for t in (source, target))
    if target.device.type != NAME:
        _waited("copy to the host")
    elif source.device.type != NAME:
        for watch in _watches():
            watch.uploads.append(source.nbytes)
        if not non_blocking:
            _waited("copy from the host that blocks")
    theirs.copy_(ours)
    return target


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    if op.overloadpacket.__name__ in COPIES:
        return _copy(op, *args, **kwargs)
    return _run(op, *args, **kwargs)


def _waited(name: str) -> None:
    watches = _watches()
    if not watches:
        return
    lines = [f for f in traceback.extract_stack() if "/maskfx/" in f.filename]
    where = f"{lines[-1].filename.rsplit('/maskfx/')[-1]}:{lines[-1].name}" if lines else "outside"
    for watch in watches:
        watch.waits.append(f"{name} in {where}")


def _watches() -> list[Watch]:
    return [watch for watch in STATE.watches if watch.thread == threading.get_ident()]


def needs_emulation() -> None:
    """Skip a test on a real device."""
    if not IS_EMULATED:
        pytest.skip(f"counts or forces something on the emulated device, and this is {NAME}")


@contextmanager
def watched() -> Iterator[Watch]:
    """Within, what operators of this thread do on the device is noted."""
    needs_emulation()
    watch = Watch()
    STATE.watches.append(watch)
    try:
        yield watch
    finally:
        STATE.watches.remove(watch)


@contextmanager
def failing(fails: Any) -> Iterator[None]:
    """Within, `fails(operator, bytes of its result)` is called for each operator, and may raise."""
    needs_emulation()
    STATE.fails = fails
    try:
        yield
    finally:
        STATE.fails = None


@contextmanager
def without(*dtypes: torch.dtype) -> Iterator[None]:
    """Within, the device can't hold these types."""
    needs_emulation()
    STATE.refused = frozenset(dtypes)
    try:
        yield
    finally:
        STATE.refused = frozenset()


def to(tree: Any, device: str | torch.device) -> Any:
    """Every tensor of a structure on a device."""
    return pytree.tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, tree)


_library = torch.library.Library("_", "IMPL")
_aten = torch.library.Library("aten", "IMPL")
# some grow a tensor of no size, which memory that came by DLPack can't; a norm's general way views
# what the CPU's own way takes in any layout
_WHOLE: tuple[str, ...] = (
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "randperm",
)
_WHOLE += ("native_group_norm", "masked_select", "abs", "logsumexp")


_deepcopy = torch.Tensor.__deepcopy__


def _copied(self: Tensor, memo: dict[int, Any]) -> Any:
    """PyTorch copies storages, which this device can't make by themselves."""
    if self.device.type != NAME:
        return _deepcopy(self, memo)
    return memo.setdefault(id(self), self.detach().clone())


def _moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """While it exports, PyTorch makes a tensor without the operators of Python that a device has.

    It is made on the host instead, and an operator brings it to the device.
    """

    @wraps(make)
    def wrapped(*args: Any, device: Any = None, **named: Any) -> Tensor:
        here = device is not None and torch.device(device).type == NAME
        if here and torch.compiler.is_exporting():
            return make(*args, **named).to(device)
        return make(*args, device=device, **named)

    return wrapped


def _install() -> None:
    _setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    _library.fallback(_fallback, "PrivateUse1")
    torch.Tensor.__deepcopy__ = _copied  # type: ignore[method-assign]
    _device_constructors()  # kept at the first call, and has to name the functions without wrappers
    torch.tensor, torch.as_tensor = _moved(torch.tensor), _moved(torch.as_tensor)
    for name in _WHOLE:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        _aten.impl(name, partial(_run, op), "PrivateUse1")
    convolution = partial(_run, torch.ops.aten.convolution.default)
    _aten.impl("convolution_overrideable", convolution, "PrivateUse1")


def autoload() -> None:
    """Do nothing: importing this module registers the device."""


def in_children(folder: Path) -> None:
    """Have processes that import from a folder register the device when they import PyTorch.

    As packages of devices do: PyTorch loads what the entry points of its group name.
    """
    if IS_EMULATED:
        info = folder / f"{NAME}-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
        entry = f"[torch.backends]\n{NAME} = {autoload.__module__}:{autoload.__name__}\n"
        (info / "entry_points.txt").write_text(entry)


if IS_EMULATED:
    _install()
