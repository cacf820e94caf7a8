"""What a template is a function of, and the run that records it.

A recording must not depend on who came first, so it is made by a run of its own: with an empty
prompt, noise seeded by the template's name and, where the pipeline itself puts the original back
outside the mask, nothing masked. All other arguments of the call count.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from maskfx.weights import Weights

# Arguments that change nothing outside the mask, by a part of their names.
FREE = ("prompt", "generator", "latents", "output_type", "return_dict", "callback", "num_images")
GUIDANCE = ("guidance", "cfg")


def arguments_of(call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A pipeline call's arguments by name, without defaults."""
    return dict(inspect.signature(call).bind(*args, **kwargs).arguments)


def is_free(name: str) -> bool:
    return any(part in name for part in FREE)


def is_guidance(name: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and any(part in name for part in GUIDANCE)


def recorded_arguments(
    call: Any, arguments: Mapping[str, Any], masked: bool
) -> tuple[dict[str, Any], str]:
    """The arguments of the run that records the template of this call, and the template's name.

    masked: the recording is of this very mask (it enters the denoiser, or chooses the crop).
    """
    defaults = {
        name: p.default
        for name, p in inspect.signature(call).parameters.items()
        if p.default is not inspect.Parameter.empty
    }
    several = isinstance(arguments.get("image"), (list, tuple)) and len(arguments["image"]) > 1
    out: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "mask_image" and not masked:
            out[name] = blank(value)
        elif "prompt" in name and not name.startswith("num"):
            out[name] = empty_prompt(value, several)
        elif is_guidance(name, value):
            out[name] = usual_guidance(value, defaults.get(name))
        elif not is_free(name):
            out[name] = value
    key = {n: digest(v) for n, v in out.items() if n != "mask_image" or masked}
    text = json.dumps([type_name(call), sorted(key.items())])
    return out, hashlib.sha256(text.encode()).hexdigest()[:32]


def type_name(call: Any) -> str:
    return str(getattr(call, "__qualname__", call))


def empty_prompt(value: Any, several: bool) -> Any:
    """No prompt, in the form that this one has."""
    if isinstance(value, str):
        return ""
    if isinstance(value, Tensor):
        kept = value if several else value[:1]
        return kept if kept.dtype in (torch.bool, torch.int64) else torch.zeros_like(kept)
    if isinstance(value, (list, tuple)):
        kept = [empty_prompt(v, several) for v in value]
        return kept if several else kept[:1]
    return value


def usual_guidance(value: float, default: Any) -> float:
    """Guidance is on above 1; how strong it is, is the pipeline's own default."""
    on = value > 1
    usual = isinstance(default, (int, float)) and (default > 1) == on
    return float(default) if usual else (4.0 if on else float(value))


def blank(mask: Any) -> Any:
    """A mask of this kind and size that masks nothing."""
    if isinstance(mask, (list, tuple)):
        return [blank(one) for one in mask]
    if isinstance(mask, Image.Image):
        return Image.new("L", mask.size, 0)
    if isinstance(mask, Tensor):
        return torch.zeros_like(mask)
    return np.zeros_like(mask)


def noise_of(name: str) -> torch.Generator:
    """The noise that belongs to a template."""
    return torch.Generator().manual_seed(int(name[:15], 16))


def digest(value: Any) -> str:
    """The same text for values of the same content, in every process."""
    found = hashlib.sha256()
    feed(found, value)
    return found.hexdigest()


def feed(found: Any, value: Any) -> None:
    if isinstance(value, Image.Image):
        feed(found, ["picture", value.mode, list(value.size)])
        found.update(value.tobytes())
    elif isinstance(value, Tensor):
        feed(found, ["tensor", str(value.dtype), list(value.shape)])
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        feed(found, ["array", str(value.dtype), list(value.shape)])
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, (list, tuple)):
        found.update(f"list {len(value)}".encode())
        for item in value:
            feed(found, item)
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)}".encode())
        for name in sorted(value, key=str):
            found.update(str(name).encode())
            feed(found, value[name])
    elif isinstance(value, (str, int, float, bool, type(None))):
        found.update(f"{type(value).__name__} {value!r}".encode())
    else:  # an object with an identity of its own: recordings with it serve it alone
        found.update(f"{type(value).__name__} at {id(value)}".encode())


class Surroundings:
    """All of a pipeline but its denoisers, as text: scheduler, encoders, adapters of them."""

    def __init__(self) -> None:
        self._watched: dict[int, Weights] = {}

    def digest(self, components: Mapping[str, Any], denoisers: Mapping[str, nn.Module]) -> str:
        own = {id(module) for module in denoisers.values()}
        parts = []
        for name, given in sorted(components.items()):
            part = getattr(given, "maskfx_part", given)  # its methods may run elsewhere
            if isinstance(part, nn.Module):
                if id(part) not in own and not hasattr(part, "nets"):
                    parts.append([name, type(part).__name__, self._weights(part)])
            elif hasattr(part, "config") and hasattr(part, "step"):
                parts.append([name, type(part).__name__, digest(dict(part.config))])
        return digest(parts)

    def _weights(self, module: nn.Module) -> str:
        watch = self._watched.get(id(module))
        if watch is None or watch.module is not module:
            watch = self._watched[id(module)] = Weights(module)
        watch.change()
        return watch.fingerprint()
