"""Cache of encoder outputs: the same image or the same text is encoded once.

A service edits the same template repeatedly, and most requests' negative prompt is empty. The image
encoder of an IP-Adapter and the features of a T2I-Adapter are encoders too: keys are the contents
of their inputs, so requests that show the same picture share one output.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import nn
from torch.utils import _pytree as pytree

from maskfx.engine.placement import RemoteModule, Run, parts_around
from maskfx.errors import InputError
from maskfx.ir.module_settings import settings_of
from maskfx.pipelines.lora import adapters_of
from maskfx.pipelines.stand_in import is_coded
from maskfx.pipelines.template_key import digest
from maskfx.runtime.weights import Weights

ENCODERS = ("encode", "encode_image", "forward", "__call__")

Key = tuple[int, str]


class EncoderCache:
    """LRU cache of encoder outputs, at most `most` bytes.

    An output is cached if it is a function of the module's weights, settings and arguments and of
    the request's adapters alone;
    where it may depend on anything else (noise, hooks, dropout) the module runs each time.
    """

    def __init__(self, most: int) -> None:
        if type(most) is not int or most < 0:
            raise InputError(f"Engine: remember={most!r}: give a number of bytes, 0 for none")
        self.most = most
        self.held = 0
        self._answers: OrderedDict[Key, object] = OrderedDict()
        self._watches: dict[int, Weights] = {}  # weights of the modules that have cached outputs
        self._lock = threading.Lock()

    def adopt(self, pipe: object, denoisers: Mapping[str, object]) -> None:
        """Route the encoder calls of a request's pipeline copy through the cache."""
        for name, part in parts_around(pipe, denoisers).items():
            if self.most and isinstance(part, nn.Module):
                run = getattr(part, "maskfx_run", run_here)
                own = getattr(part, "maskfx_part", part)
                pipe.__dict__[name] = RemoteModule(own, partial(self.ask, run))

    def ask(
        self,
        run: Run[nn.Module],
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
        key = id(part), digest([method, settings_of(part), list(args), kwargs, *with_them])
        with self._lock:
            self._look_at(part)
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
        if answer is None:
            answer = run(part, method, args, kwargs)
            self._keep(key, answer)
        return copy.deepcopy(answer)  # pipelines may modify the output in place

    def _look_at(self, part: nn.Module) -> None:
        """Drop the cached outputs of a module that is new or whose weights have changed."""
        watch = self._watches.pop(id(part), None) or Weights(part)
        if not watch.change().same_numbers:
            for key in [key for key in self._answers if key[0] == id(part)]:
                self._drop(key)
        self._watches[id(part)] = watch

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


def run_here(
    part: nn.Module, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    return getattr(part, method)(*args, **kwargs)


def is_function(part: nn.Module, arguments: object) -> bool:
    """Whether the output depends on weights, settings and arguments alone.

    False with a generator among the arguments, gradients enabled, training mode or forward hooks.
    """
    noisy = any(isinstance(v, torch.Generator) for v in pytree.tree_leaves(arguments))
    if noisy or torch.is_grad_enabled():
        return False
    return not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in part.modules())


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
