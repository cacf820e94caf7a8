"""Cache of encoder outputs: the same image or the same text is encoded once.

The same template is edited repeatedly, and most negative prompts are empty. The image encoder of an
IP-Adapter and the features of a T2I-Adapter are encoders too: keys are the contents of their
inputs, so calls that show the same picture share one output.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils import _pytree as pytree

from maskfx.errors import InputError
from maskfx.ir.modules.module_settings import KnownSettings
from maskfx.pipelines.adapters.lora import adapters_of
from maskfx.pipelines.digests import digest
from maskfx.pipelines.parts.stand_in import WRAPPED, install, is_coded, remove
from maskfx.runtime.weights import Weights

ENCODERS = ("encode", "encode_image", "forward", "__call__")
AMONG = ENCODERS[:2]  # of a part that has other methods too

REMEMBER = 64 << 20  # bytes by default

Key = tuple[int, str]
Run = Callable[[nn.Module, str, tuple[object, ...], Mapping[str, object]], object]
# arguments that a key can be made of; an object, such as a cache of keys, may be written into
NUMBERS = (torch.Tensor, np.ndarray, Image.Image, str, int, float, bytes, type(None))
PLAIN = (*NUMBERS, torch.dtype, torch.device)


class EncoderCache:
    """LRU cache of encoder outputs, at most `most` bytes.

    An output is cached if it is a function of the module's weights, settings and arguments and of
    the request's adapters alone;
    where it may depend on anything else (noise, hooks, dropout) the module runs each time.
    """

    def __init__(self, most: int) -> None:
        if type(most) is not int or most < 0:
            raise InputError(f"remember={most!r}: give a number of bytes, 0 for none")
        self.most = most
        self.held = 0
        # not an `LruCache`, which bounds the number of entries: this bounds their bytes
        self._answers: OrderedDict[Key, object] = OrderedDict()
        # of the modules that have cached outputs
        self._watches: dict[int, tuple[Weights, KnownSettings]] = {}
        self._lock = threading.Lock()

    def ask(
        self,
        run: Run,
        part: nn.Module,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """Return the cached output of this call; on a miss run the module and cache its output."""
        if (
            method not in ENCODERS
            or is_coded(part, method)  # the result depends on the request's template
            or not is_function(part, (args, kwargs))
        ):
            return run(part, method, args, kwargs)
        adapters = adapters_of(part)
        with_them = [] if adapters is None else [adapters.digests]
        given = pytree.tree_map(unsigned, (list(args), dict(kwargs)))
        content = digest([method, *given, *with_them])
        with self._lock:
            key = id(part), f"{self._look_at(part)} {content}"
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
        if answer is None:
            answer = run(part, method, args, kwargs)
            self._keep(key, answer)
        return copy.deepcopy(answer)  # pipelines may modify the output in place

    def _look_at(self, part: nn.Module) -> str:
        """Return the digest of a module's settings.

        The cached outputs of a module that is new or whose weights have changed are dropped.
        """
        watch = self._watches.pop(id(part), None)
        weights, settings = watch or (Weights(part), KnownSettings(part))
        if not weights.change().same_numbers:
            self._drop_all(part)
        self._watches[id(part)] = weights, settings
        return settings.digest()

    def forget(self, part: nn.Module) -> None:
        """Drop the outputs of a module, and hold it no longer."""
        with self._lock:
            self._drop_all(part)
            self._watches.pop(id(part), None)

    def _drop_all(self, part: nn.Module) -> None:
        for key in [key for key in self._answers if key[0] == id(part)]:
            self._drop(key)

    def _keep(self, key: Key, answer: object) -> None:
        size = bytes_of(answer)
        with self._lock:
            if key in self._answers or size > self.most:
                return
            while self.held + size > self.most:
                self._drop(next(iter(self._answers)))
            self._answers[key] = answer
            self.held += size

    def _drop(self, key: Key) -> None:
        self.held -= bytes_of(self._answers.pop(key))
        if not any(other == key[0] for other, _ in self._answers):
            self._watches.pop(key[0], None)


def is_function(part: nn.Module, arguments: object) -> bool:
    """Whether the output depends on weights, settings and arguments alone.

    False with a generator or another object among the arguments, gradients enabled, training mode
    or forward hooks.
    """
    if torch.is_grad_enabled() or not is_plain(arguments):
        return False
    return not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in part.modules())


def unsigned(value: object) -> object:
    """Return a tensor with zeros in place of negative zeros, which a masked picture is full of."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value + 0.0 if floating else value  # type: ignore[operator]


def is_plain(value: object) -> bool:
    """Return True for tensors, pictures, texts and numbers, and for containers of them."""
    if type(value) in (list, tuple):
        return all(map(is_plain, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(map(is_plain, value.values()))
    return isinstance(value, PLAIN)


def bytes_of(answer: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(answer))


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a result: containers and attributes of objects, recursively."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))


@dataclass
class Encoders:
    """The encoders of a pipeline, which have stand-ins, and the cache of their outputs.

    Args:
        parts: by the component's name, the module and the methods that encode.
    """

    cache: EncoderCache
    parts: dict[str, tuple[nn.Module, list[str]]] = field(default_factory=dict)

    def adopt(self, components: Mapping[str, object], denoisers: Collection[nn.Module]) -> None:
        """Install stand-ins for these components, in place of those of their names before.

        A part that the user has compiled computes by itself.
        """
        for name, part in components.items():
            self.drop(name)
            if not isinstance(part, nn.Module) or is_compiled_by_torch(part):
                continue
            if part not in denoisers and not hasattr(part, "nets"):
                among = [method for method in AMONG if callable(getattr(part, method, None))]
                self.parts[name] = part, among or ["forward"]
                for method in self.parts[name][1]:
                    install(part, method, denoises=False)

    def remove(self) -> None:
        """Remove all stand-ins."""
        for name in list(self.parts):
            self.drop(name)

    def drop(self, name: str) -> None:
        """Remove a component's stand-ins and the outputs that are kept of it."""
        if name in self.parts:
            part, methods = self.parts.pop(name)
            for method in methods:
                remove(part, method)
            self.cache.forget(part)


def is_compiled_by_torch(part: nn.Module) -> bool:
    return hasattr(part, WRAPPED) or part._compiled_call_impl is not None
