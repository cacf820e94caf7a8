"""What a template is a function of, and the run that records it.

A recording must not depend on who came first, so it is made by a run of its own: with an empty
prompt (and states or pictures of nothing, whatever they are called), noise that is the same for all
templates and, where the pipeline itself puts the original back outside the mask, nothing masked.
All other arguments of the call count. The noise doesn't follow from the name: names tell apart what
computes the same in another way, and that must give the same picture.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import pickle
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from maskfx.errors import InputError
from maskfx.pipelines.masks import like_mask
from maskfx.pipelines.stand_in import named_arguments
from maskfx.runtime.weights import Weights

# Arguments that change nothing outside the mask: by name, or by a part of it.
FREE = ("generator", "latents", "output_type", "return_dict")
FREE_PARTS = ("prompt", "callback")
GUIDANCE = ("guidance", "cfg")
SPOKEN = ("ip_adapter_image", "example_image")  # pictures that say what to make, as a prompt does
TEMPLATE = "template"  # all are recorded from the same noise
NOTHING = 64  # pixels a side, of a picture of nothing


def arguments_of(call: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A pipeline call's arguments by name, without defaults."""
    signature = inspect.signature(call)
    try:
        return named_arguments(signature, args, kwargs)
    except TypeError as error:
        raise InputError(
            f"{type_name(call)}: {error}; it takes {', '.join(list(signature.parameters)[1:])}, "
            "and maskfx adds quality, template and record"
        ) from error


def is_free(name: str) -> bool:
    return name in FREE or any(part in name for part in FREE_PARTS)


def is_guidance(name: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and any(part in name for part in GUIDANCE)


def recorded_arguments(
    call: Any,
    arguments: Mapping[str, Any],
    masked: bool,
    usual: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], str]:
    """The arguments of the run that records the template of this call, and the template's name.

    masked: the recording is of this very mask (it enters the denoiser, or chooses the crop).
    usual: what the model's calls are told where its class has another default.
    """
    defaults = {
        name: p.default
        for name, p in inspect.signature(call).parameters.items()
        if p.default is not inspect.Parameter.empty
    }
    several = has_several(arguments.get("image"))
    out: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "mask_image" and not masked:
            out[name] = like_mask(value, 0)
        elif name == "num_images_per_prompt":
            if several:  # which picture is repeated how, is the pipeline's own affair
                out[name] = value
        elif "prompt" in name or "embeds" in name and isinstance(value, Tensor):
            out[name] = empty_prompt(value, several)
        elif "embeds" in name and are_states(value):  # one of each adapter
            out[name] = list(map(empty_states, value))
        elif any(part in name for part in SPOKEN):
            out[name] = empty_picture(value)
        elif is_guidance(name, value):
            out[name] = usual_guidance(value, {**defaults, **(usual or {})}.get(name))
        elif not is_free(name):
            out[name] = value
    key = {n: digest(only_one(v)) for n, v in out.items() if n != "mask_image" or masked}
    key = {n: v for n, v in key.items() if n not in defaults or v != digest(defaults[n])}
    text = json.dumps([type_name(call), sorted(key.items())])
    return out, hashlib.sha256(text.encode()).hexdigest()[:32]


def has_several(pictures: Any) -> bool:
    """Does each sample have a picture of its own?"""
    return number_of(pictures) > 1


def number_of(pictures: Any) -> int:
    """How many pictures these are; those of a batch count one by one."""
    if isinstance(pictures, (Tensor, np.ndarray)):
        return len(pictures) if pictures.ndim == 4 else 1
    return len(pictures) if isinstance(pictures, (list, tuple)) else 1


def only_one(value: Any) -> Any:
    """A list of one text is that text."""
    one = isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], str)
    return value[0] if one else value


def type_name(call: Any) -> str:
    return str(getattr(call, "__qualname__", call))


def empty_prompt(value: Any, several: bool) -> Any:
    """No prompt, in the form that this one has; of a batch one is enough."""
    if isinstance(value, str):
        return ""
    if isinstance(value, Tensor):
        return empty_states(value if several else value[:1])
    if isinstance(value, (list, tuple)):
        kept = value if several else value[:1]  # states in a list are each a sample's own
        return [empty_states(v) if isinstance(v, Tensor) else empty_prompt(v, True) for v in kept]
    return value


def are_states(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, Tensor) for one in value)


def empty_states(value: Tensor) -> Tensor:
    """Text states of zeros; masks and numbers of tokens stay."""
    return torch.zeros_like(value) if value.is_floating_point() else value


def empty_picture(value: Any) -> Any:
    """Black, in the form that this one has; encoders bring pictures to a size of their own."""
    if isinstance(value, Image.Image):
        return Image.new("RGB", (NOTHING, NOTHING))
    if isinstance(value, (list, tuple)):
        return [empty_picture(one) for one in value]
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def usual_guidance(value: float, usual: Any) -> float:
    """Guidance that is on, above 1, is recorded at the model's own strength."""
    if value <= 1:
        return value
    return float(usual) if isinstance(usual, (int, float)) and usual > 1 else 4.0


def noise_of(purpose: str) -> torch.Generator:
    """The noise of runs that maskfx makes by itself."""
    return torch.Generator().manual_seed(int(digest(purpose)[:15], 16))


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
    else:
        found.update(type(value).__name__.encode() + content_of(value))


def content_of(value: Any) -> bytes:
    """Any other object; one that has no content to compare is like no other."""
    try:
        return pickle.dumps(value)
    except Exception:
        return uuid.uuid4().bytes


class PipelineFingerprint:
    """All of a pipeline but its denoisers' weights, as text: scheduler, encoders, settings."""

    def __init__(self) -> None:
        self._watched: dict[int, Weights] = {}

    def digest(
        self,
        components: Mapping[str, Any],
        denoisers: Mapping[str, nn.Module],
        settings: Mapping[str, str],
    ) -> str:
        """`settings` are the denoisers', as `settings_of` gives them."""
        own = {id(module) for module in denoisers.values()}
        parts = []
        for name, given in sorted(components.items()):
            part = getattr(given, "maskfx_part", given)  # its methods may run elsewhere
            if isinstance(part, nn.Module):
                if id(part) not in own and not hasattr(part, "nets"):
                    parts.append([name, type(part).__name__, self._weights(part)])
            elif hasattr(part, "config") and hasattr(part, "step"):
                parts.append([name, type(part).__name__, digest(config_of(part))])
        parts.extend([name, now] for name, now in sorted(settings.items()))
        return digest(parts)

    def _weights(self, module: nn.Module) -> str:
        watch = self._watched.get(id(module))
        if watch is None or watch.module is not module:
            watch = self._watched[id(module)] = Weights(module)
        watch.change()
        return watch.fingerprint()


def config_of(part: Any) -> dict[str, Any]:
    """A part's settings; what begins with _ is diffusers' own bookkeeping, in a random order."""
    config = getattr(part, "config", {})
    return {k: v for k, v in dict(config).items() if not k.startswith("_")}


def settings_of(module: nn.Module) -> str:
    """The plain values that a module and its parts hold: strengths of adapters, switches, names.

    What its parts call that is no module, such as attention processors, holds some too. They stand
    in the code that computes it, so a captured graph is of these values alone.
    """
    found = hashlib.sha256()
    for name, part in module.named_modules():
        found.update(f"{name} {type(part).__name__} {part.training}".encode())
        for line in state_of(part):
            found.update(line.encode())
        for key, value in vars(part).items():
            if not key.startswith("_") and is_called(value):
                found.update(f"{key}: {name_of(value)}".encode())
                for line in state_of(value):
                    found.update(line.encode())
    return found.hexdigest()


def state_of(part: Any) -> Iterator[str]:
    """The plain values that it holds itself; of what begins with _ only switches and names.

    Others are often bookkeeping, which changes from call to call; None may be a table that the
    first call fills. What a wrapped function is called says nothing: offloading wraps `forward`.
    """
    for key, value in getattr(part, "__dict__", {}).items():
        if key.startswith("__"):
            continue
        known = value is not None and not key.startswith("_") and is_plain(value)
        if known or is_switch(value):
            yield f"{key}={value!r}"


def is_called(value: Any) -> bool:
    return callable(value) and not isinstance(value, (nn.Module, type))


def name_of(called: Any) -> str:
    """A function's name, or that of an object's class."""
    named = called if hasattr(called, "__qualname__") else type(called)
    return f"{named.__module__}.{named.__qualname__}"


def is_switch(value: Any) -> bool:
    """On or off, or names: which adapters are active."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(one, (bool, str)) for one in value)
    return isinstance(value, (bool, str))


def is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))
