"""Placement: where encoders, VAE and image codecs, the work around the denoiser, run.

In helper processes it never delays a step (`HelperProcesses`). In the requests' threads it shares
the interpreter with the steps (`InRequestThreads`). In the engine's loop it blocks all requests'
steps (`InEngineLoop`, as in servers without such a split; kept for comparison).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from maskfx.engine.processes.stateful_parts import StatefulParts
from maskfx.pipelines.adapters.lora import adapters_of
from maskfx.runtime.hardware.cpu_threads import beside, computing_with, cores_left
from maskfx.runtime.transport.sendable import on_cpu

METHODS = ("forward", "encode", "decode", "preprocess", "postprocess", "encode_image")

Part = TypeVar("Part")  # a component of a pipeline
Run = Callable[[Part, str, tuple[object, ...], Mapping[str, object]], object]  # calls its method


class StepLoop(Protocol):
    """What a placement uses of the engine."""

    def stepping(self) -> bool:
        """Return True while any request is in its denoising loop."""
        ...

    def errand(self, work: Callable[[], None]) -> None:
        """Execute work in the loop, between two steps."""
        ...


class Placement(Protocol):
    """Runs the components of a pipeline that aren't denoisers."""

    def start(self, engine: StepLoop) -> None: ...

    def adopt(self, pipe: object, denoisers: Mapping[str, object]) -> None:
        """Replace those components of a request's pipeline copy by proxies."""
        ...

    def stop(self) -> None: ...


class InRequestThreads:
    """Runs components in each request's thread, on the cores that steps leave free.

    Another device decodes one picture at a time: the activations of a VAE are the largest of a
    request, and a second decode at the same time would only wait for the first one's operators. On
    a CPU it runs on other cores, unless the module keeps state while it runs.
    """

    def __init__(self) -> None:
        self._stateful = StatefulParts()

    def start(self, engine: StepLoop) -> None:
        self.engine = engine

    def adopt(self, pipe: object, denoisers: Mapping[str, object]) -> None:
        for name, part in parts_around(pipe, denoisers).items():
            self.take(pipe, name, part)

    def stop(self) -> None:
        return

    def take(self, pipe: object, name: str, part: object) -> None:
        """Wrap a module: on the CPU its threads are accounted for, elsewhere its decodes queue."""
        if isinstance(part, nn.Module):
            pipe.__dict__[name] = RemoteModule(part, self.run if on_cpu(part) else self._on_device)

    def run(
        self, part: nn.Module, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        threads = spared(self.engine)
        with self._stateful.calling(part, method), beside(threads), computing_with(threads):
            return getattr(part, method)(*args, **kwargs)

    def _on_device(
        self, part: nn.Module, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        queue = decoding[device_of(part)] if method == "decode" else nullcontext()
        with queue, self._stateful.calling(part, method):
            return getattr(part, method)(*args, **kwargs)


class RemoteModule:
    """Proxy of a pipeline component: dispatches `METHODS` to `run`, forwards all other access."""

    def __init__(self, part: Part, run: Run[Part]) -> None:
        self.__dict__.update(maskfx_part=part, maskfx_run=run)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.maskfx_part, name)
        if name not in METHODS or not callable(value):
            return value
        return lambda *args, **kwargs: self.maskfx_run(self.maskfx_part, name, args, kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.maskfx_part, name, value)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.maskfx_run(self.maskfx_part, "__call__", args, kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.maskfx_part)


def parts_around(pipe: object, denoisers: Mapping[str, object]) -> dict[str, object]:
    """Return the modules that aren't denoisers, and the image processors, by name."""
    stepping = {name.split(".")[0] for name in denoisers}
    return {
        name: part
        for name, part in pipe.__dict__.items()
        if name not in stepping
        and (isinstance(part, nn.Module) or name.endswith("_processor"))
        and any(hasattr(part, method) for method in METHODS)
    }


# locks by device: several engines of a process may share it
decoding: defaultdict[torch.device, threading.Lock] = defaultdict(threading.Lock)


def device_of(part: nn.Module) -> torch.device:
    """Return the device of a module's first parameter."""
    return next(part.parameters()).device


def spared(engine: StepLoop | None) -> int:
    """Return the number of threads for a call that starts now.

    One while any request is in its denoising loop, which needs the cores; else all idle cores.
    """
    if engine is None or engine.stepping():
        return 1
    return cores_left(torch.get_num_threads())


class InEngineLoop:
    """Runs components in the engine's loop, between two steps."""

    def start(self, engine: StepLoop) -> None:
        self.engine = engine

    def adopt(self, pipe: object, denoisers: Mapping[str, object]) -> None:
        for name, part in parts_around(pipe, denoisers).items():
            pipe.__dict__[name] = RemoteModule(part, self._run)

    def stop(self) -> None:
        return

    def _run(
        self, part: object, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        if adapters_of(part) is not None:  # they act in the request's thread
            return getattr(part, method)(*args, **kwargs)
        box: list[tuple[object, BaseException | None]] = []
        done = threading.Event()

        def work() -> None:
            try:
                with torch.no_grad():
                    box.append((getattr(part, method)(*args, **kwargs), None))
            except BaseException as error:
                box.append((None, error))
            done.set()

        self.engine.errand(work)
        done.wait()
        value, error = box[0]
        if error is not None:
            raise error
        return value
