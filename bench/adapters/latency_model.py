"""Katz's latency model, from parts that are measured in a run of diffusers.

Equation 1 is a request in serial: T = sum of C.load + sum of (L.load + L.patch) + encode + (sum of
C.step + base) x steps + decode. Equation 2 is what remains if adapters cost nothing:
T = encode + base* x steps + decode. Gustafson's bound on what ControlNets beside the denoiser gain
is s + p N on N devices: s is the share of the UNet's decoder, p that of its encoder and middle,
beside which the networks run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from torch import nn

from bench.adapters.workflow import load_net, nets_of, read_lora
from maskfx.runtime.lora.patch import patched


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of one request; lists have an item per ControlNet or LoRA."""

    net_load: list[float]
    lora_load: list[float]
    lora_patch: list[float]
    encode: float  # the picture and the mask; a text encoder isn't counted
    net_step: list[float]
    base_step: float
    base_decoder: float  # of these, in the UNet's decoder
    decode: float
    steps: int

    @property
    def serial(self) -> float:
        """Equation 1."""
        adapters = sum(self.net_load) + sum(self.lora_load) + sum(self.lora_patch)
        return (
            adapters
            + self.encode
            + (sum(self.net_step) + self.base_step) * self.steps
            + (self.decode)
        )

    def free_adapters(self, base_step: float | None = None, steps: float | None = None) -> float:
        """Equation 2, with another time of a step or another number of them if given."""
        base = self.base_step if base_step is None else base_step
        return self.encode + base * (self.steps if steps is None else steps) + self.decode

    def gustafson(self) -> dict[str, float]:
        """The bound for the steps, and its terms."""
        devices = 1 + len(self.net_step)
        serial = self.base_decoder / self.base_step
        return {
            "serial_share": serial,
            "parallel_share": 1 - serial,
            "devices": devices,
            "bound": serial + (1 - serial) * devices,
        }

    def report(self) -> dict[str, Any]:
        return {
            "parts": asdict(self),
            "equation_1": self.serial,
            "equation_2": self.free_adapters(),
            "gustafson": self.gustafson(),
        }


def line(found: Mapping[str, Any]) -> str:
    """Return a report's equations and bound, as a benchmark prints them."""
    bound = found["gustafson"]
    return (
        f"equation 1: {found['equation_1']:.3f} s; equation 2: {found['equation_2']:.3f} s; "
        f"Gustafson: {bound['serial_share']:.2f} + {bound['parallel_share']:.2f} x "
        f"{bound['devices']} = {bound['bound']:.2f}"
    )


def measured(
    pipe: Any, call: Callable[[], Mapping[str, Any]], nets: Sequence[Path], loras: Sequence[Path]
) -> Parts:
    """Run diffusers' pipeline once, and load its adapters once, part by part."""
    net_load = [seconds_of(partial(load_net, path)) for path in nets]
    lora_load = [seconds_of(partial(read_lora, pipe, path)) for path in loras]
    lora_patch = []
    for path in loras:
        update = read_lora(pipe, path)
        began = time.perf_counter()
        with patched(pipe.unet, [update]):
            lora_patch.append(time.perf_counter() - began)
    spent: dict[str, list[float]] = defaultdict(list)
    with timed_parts(pipe, spent):
        pipe(**call())
    blocks = len(pipe.unet.up_blocks)
    decoder = [sum(spent["up"][i : i + blocks]) for i in range(0, len(spent["up"]), blocks)]
    return Parts(
        net_load,
        lora_load,
        lora_patch,
        sum(spent["encode"]),
        [median(spent[f"net {number}"]) for number in range(len(nets))],
        median(spent["unet"]),
        median(decoder),
        sum(spent["decode"]),
        len(spent["unet"]),
    )


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def timed_parts(pipe: Any, spent: dict[str, list[float]]) -> Iterator[None]:
    """Note the seconds of each call of a pipeline's parts within the context."""
    parts: list[tuple[str, nn.Module, str]] = [("unet", pipe.unet, "forward")]
    parts += [(f"net {i}", net, "forward") for i, net in enumerate(nets_of(pipe))]
    parts += [("up", block, "forward") for block in pipe.unet.up_blocks]
    parts += [("encode", pipe.vae, "encode"), ("decode", pipe.vae, "decode")]
    with ExitStack() as stack:
        for name, part, method in parts:
            wrapper = timed(getattr(part, method), spent[name])
            stack.enter_context(mock.patch.object(part, method, wrapper))
        yield


def timed(original: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = original(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        return result

    return run
