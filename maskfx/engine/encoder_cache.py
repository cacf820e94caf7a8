"""What encoders answered: the same picture or the same text is encoded once.

A service edits a template again and again, and most requests' negative prompt is the empty one.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from maskfx.engine.placement import RemoteModule, parts_around
from maskfx.errors import InputError
from maskfx.pipelines.template_key import digest, settings_of
from maskfx.runtime.weights import WeightChange, Weights

ENCODERS = ("encode", "encode_image", "forward", "__call__")

Key = tuple[int, str]
Run = Callable[[Any, str, tuple[Any, ...], Any], Any]


class EncoderCache:
    """The latest answers of encoders, as many as these bytes hold.

    An answer is a function of a part's weights, settings and arguments; where it may be one of
    something else (noise, hooks, dropout) the part is asked each time.
    """

    def __init__(self, most: int) -> None:
        if type(most) is not int or most < 0:
            raise InputError(f"Engine: remember={most!r}: give a number of bytes, 0 for none")
        self.most = most
        self.held = 0
        self._answers: OrderedDict[Key, Any] = OrderedDict()
        self._watches: dict[int, Weights] = {}  # of the parts whose answers these are
        self._lock = threading.Lock()

    def adopt(self, pipe: Any, denoisers: Mapping[str, Any]) -> None:
        """Let this request's own pipeline ask here first."""
        for name, part in parts_around(pipe, denoisers).items():
            if self.most and isinstance(part, nn.Module):
                run = getattr(part, "maskfx_run", run_here)
                own = getattr(part, "maskfx_part", part)
                pipe.__dict__[name] = RemoteModule(own, partial(self.ask, run))

    def ask(self, run: Run, part: nn.Module, method: str, args: Any, kwargs: Any) -> Any:
        """The answer that this call had before, else that of whoever runs the part."""
        if method not in ENCODERS or not is_function(part, (args, kwargs)):
            return run(part, method, args, kwargs)
        key = id(part), digest([method, settings_of(part), list(args), kwargs])
        with self._lock:
            self._look_at(part)
            answer = self._answers.get(key)
            if answer is not None:
                self._answers.move_to_end(key)
        if answer is None:
            answer = run(part, method, args, kwargs)
            self._keep(key, answer)
        return copy.deepcopy(answer)  # pipelines may write into what they get

    def _look_at(self, part: nn.Module) -> None:
        """Nothing is known of a part that is new, or whose weights aren't those of before."""
        watch = self._watches.pop(id(part), None) or Weights(part)
        if watch.change() is not WeightChange.NONE:
            for key in [key for key in self._answers if key[0] == id(part)]:
                self._drop(key)
        self._watches[id(part)] = watch

    def _keep(self, key: Key, answer: Any) -> None:
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


def run_here(part: nn.Module, method: str, args: tuple[Any, ...], kwargs: Any) -> Any:
    return getattr(part, method)(*args, **kwargs)


def is_function(part: nn.Module, arguments: Any) -> bool:
    """Is the answer one of weights, settings and arguments alone, as far as can be seen?"""
    noisy = any(isinstance(v, torch.Generator) for v in pytree.tree_leaves(arguments))
    if noisy or torch.is_grad_enabled():
        return False
    return not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in part.modules())


def bytes_of(answer: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(answer))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those that a result holds, in whatever class."""
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
