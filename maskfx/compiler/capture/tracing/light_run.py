"""A light run: a module runs without its large products with parameters, and what follows of them.

In their place stands memory that nothing was written to. Such a run takes a small part of the time
of a full one. It ends with `NotLight` where its results might differ in what Python sees, or a
tensor would be written that it doesn't own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from maskfx.compiler.capture.tracing.twin import Twin
from maskfx.ir.objects import copy_tree

aten = torch.ops.aten
# the places of input and weight among the arguments, and the dimension of the weight's inputs
WEIGHTED = {
    aten.convolution.default: (0, 1, 1),
    aten.conv1d.default: (0, 1, 1),
    aten.conv2d.default: (0, 1, 1),
    aten.conv3d.default: (0, 1, 1),
    aten.linear.default: (0, 1, 1),
    aten.addmm.default: (1, 2, 0),
    aten.mm.default: (0, 1, 0),
}
CONVOLUTIONS = {
    aten.convolution.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
}
SMALL = 1 << 20  # products of fewer multiplications than this are computed


class NotLight(Exception):
    """A module can't run lightly, or not with the same result."""


class LightProducts(TorchDispatchMode):
    """Leaves out large products with parameters, and what is computed of them.

    Counts in `convolved` the numbers that convolutions wider than one site read. What the module
    compiles by itself runs eagerly: torch.compile leaves functions that it meets within a mode
    uncompiled from then on, and what they call fails in `flex_attention`.
    """

    def __init__(self, twin: Twin) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = set(map(storage_of, twin.module.parameters()))
        self._owned = set(map(storage_of, twin.tensors))
        self._left_out: dict[int, StorageWeakRef] = {}
        self.convolved: int = 0
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._open.close()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in CONVOLUTIONS and max(args[1].shape[2:], default=1) > 1:
            self.convolved += args[0].numel()
        follows = any(map(self.is_left_out, tensors_in((args, kwargs))))
        written = list(written_by(func, args, kwargs))
        if any(storage_of(value) in self._owned for value in written):
            raise NotLight(f"{func} writes a tensor of the module")
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if written and follows:
            return self._write(func, args, kwargs, written)
        if follows or self._is_large(func, args):
            return self._leave_out(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_large(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        if func not in WEIGHTED:
            return False
        at, of, inputs = WEIGHTED[func]
        given, weight = args[at], args[of]
        # at least: a convolution has as many products with each weight as its input has sites
        multiplied = given.numel() // max(1, weight.shape[inputs]) * weight.numel()
        return storage_of(weight) in self._weights and multiplied >= SMALL

    def is_left_out(self, value: Tensor) -> bool:
        """Return True for a value that wasn't computed."""
        found = self._left_out.get(storage_of(value))
        return found is not None and not found.expired()

    def _write(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        written: Sequence[Tensor],
    ) -> object:
        """Write nothing to values that weren't computed; other ones aren't known afterwards."""
        if len(written) != 1 or written[0] is not args[0]:
            raise NotLight(f"{func} writes several values")
        if not self.is_left_out(args[0]):
            self._note(args[0])
        return args[0]

    def _leave_out(
        self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Return memory in the form of an operator's results."""
        device = next(value.device for value in tensors_in((args, kwargs)))

        def shape_only(value: object) -> object:
            return value.to("meta") if isinstance(value, Tensor) else value

        def memory(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )
            return self._note(made)

        shapes, options = pytree.tree_map(shape_only, (args, kwargs))
        if "device" in options:
            options = {**options, "device": torch.device("meta")}
        try:
            found = func(*shapes, **options)
        except (NotImplementedError, RuntimeError) as error:
            raise NotLight(f"{func} depends on values: {error}") from error
        if not tensors_in(found):
            raise NotLight(f"{func} returns what Python sees")
        return pytree.tree_map(memory, found)

    def _note(self, value: Tensor) -> Tensor:
        self._left_out[storage_of(value)] = StorageWeakRef(value.untyped_storage())
        return value


def convolved_elements(module: nn.Module, inputs: Mapping[str, object]) -> int:
    """Return how many numbers convolutions wider than one site read in a call.

    A recording of the call keeps about as many. 0 if the module can't run lightly.
    """
    try:
        twin = light_twin(module)
        with torch.no_grad(), LightProducts(twin) as light:
            twin.module(**copy_tree(dict(inputs)))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # whatever it is, a full run raises it too, or doesn't
        return 0
    elements: int = light.convolved
    return elements


def fills_tables(module: nn.Module, inputs: Mapping[str, object]) -> bool:
    """Return True if a call may fill tables of the module: by a light run, or for want of one."""
    try:
        twin = light_twin(module)
        with torch.no_grad(), LightProducts(twin):
            twin.module(**copy_tree(dict(inputs)))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # whatever it is, a full run raises it too, or doesn't
        return True
    return twin.keeps_tensors()


def light_twin(module: nn.Module) -> Twin:
    """Return a twin for a light run; raise NotLight for a module with hooks."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_hf_hook")
    if any(vars(part).get(kind) for part in module.modules() for kind in kinds):
        raise NotLight("hooks run before or after its parts")
    return Twin(module)


def tensors_in(values: object) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def written_by(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes."""
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def storage_of(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
