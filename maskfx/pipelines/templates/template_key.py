"""Template keys: what a template depends on, and the arguments of the run that records it.

A recording must not depend on which request came first, so it is made by a separate run: with an
empty prompt (states of zeros where the pipeline can't read text, and black images for similar
arguments), the same noise for all templates and, if the pipeline itself restores the original
outside the mask, nothing masked. All other arguments of the call are part of the key. The noise
isn't derived from the name: names differ for ways of computing the same result, which must give the
same image.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from maskfx.errors import SignatureError
from maskfx.pipelines.digests import digest
from maskfx.pipelines.masks.masks import like_mask
from maskfx.pipelines.parts.guiders import is_guider, settings_of
from maskfx.pipelines.parts.pipeline import config_of
from maskfx.pipelines.parts.stand_in import named_arguments
from maskfx.runtime.reuse.step_selection import StepSelection
from maskfx.runtime.weights import Weights

# Arguments that change nothing outside the mask: by name, or by part of a name.
FREE = ("generator", "latents", "output", "output_type", "return_dict", "state")
FREE_PARTS = ("prompt", "callback")
GUIDANCE = ("guidance", "cfg")
PROMPT_IMAGES = ("ip_adapter_image", "example_image")  # images that act as a prompt
TEMPLATE = "template"  # purpose of the noise that all templates are recorded from
NOTHING = 64  # pixels per side of an empty image


@dataclass(frozen=True)
class TemplateKey:
    """A call's template: its name, the arguments that record it, and the steps that it stores."""

    name: str
    arguments: dict[str, Any]
    selection: StepSelection


def bind_arguments(
    call: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return a pipeline call's arguments by name, without defaults."""
    signature = inspect.signature(call)
    try:
        return named_arguments(signature, args, kwargs)
    except TypeError as error:
        raise SignatureError(
            f"{type_name(call)}: {error}; it accepts {', '.join(list(signature.parameters)[1:])}, "
            "and maskfx adds quality, template and record"
        ) from error


def is_free(name: str) -> bool:
    return name in FREE or any(part in name for part in FREE_PARTS)


def is_guidance(name: str, value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and any(part in name for part in GUIDANCE)


def recording_arguments(
    call: Callable[..., object],
    arguments: Mapping[str, Any],
    masked: bool,
    usual: Mapping[str, object] | None = None,
    own_prompt: bool = False,
    mask_name: str | None = "mask_image",
) -> tuple[dict[str, Any], str]:
    """Return the arguments of the run that records this call's template, and the template's name.

    Args:
        call: The pipeline's `__call__`.
        arguments: Arguments of the call to record for.
        masked: Record with the call's mask, because it enters the denoiser or chooses the crop.
        usual: Default arguments of the model that differ from those of its class.
        own_prompt: Record with the call's texts in place of empty ones, or with states of zeros in
            place of the call's text states.
        mask_name: The parameter that is the mask.
    """
    parameters = inspect.signature(call).parameters
    defaults = {
        name: p.default
        for name, p in parameters.items()
        if p.default is not inspect.Parameter.empty
    }
    several = has_several(arguments.get("image"))
    if not own_prompt:
        arguments = texts_for_states(arguments, parameters, several)
    batch = prompt_batch(arguments)
    out: dict[str, object] = {}
    for name, value in arguments.items():
        if name == mask_name and not masked:
            out[name] = like_mask(value, 0)
        elif name in ("num_images_per_prompt", "num_videos_per_prompt"):
            if several:  # how images are repeated is up to the pipeline
                out[name] = value
        elif own_prompt and "prompt" in name and is_text(value):
            out[name] = value if isinstance(value, str) or several else value[:1]
        elif "prompt" in name or "embeds" in name and isinstance(value, Tensor):
            # offsets of texts, such as cumulated lengths, are no batch
            other = isinstance(value, Tensor) and batch not in (None, value.shape[:1].numel())
            out[name] = empty_prompt(value, several or other)
        elif "embeds" in name and are_states(value):  # one per adapter
            out[name] = list(map(empty_states, value))
        elif any(part in name for part in PROMPT_IMAGES):
            out[name] = empty_picture(value)
        elif is_guidance(name, value):
            out[name] = usual_guidance(value, {**defaults, **(usual or {})}.get(name))
        elif not is_free(name):
            out[name] = value
    key = {n: digest(only_one(v)) for n, v in out.items() if n != mask_name or masked}
    key = {n: v for n, v in key.items() if n not in defaults or v != digest(defaults[n])}
    text = json.dumps([type_name(call), sorted(key.items())])
    return out, hashlib.sha256(text.encode()).hexdigest()[:32]


def texts_for_states(
    arguments: Mapping[str, Any], accepted: Collection[str], several: bool
) -> Mapping[str, object]:
    """Return arguments with texts in place of text states, so that both have the same template.

    Unchanged where the call has no such states, or where the pipeline accepts no such text.
    """
    states = {name for name, value in arguments.items() if is_states_of_text(name, value)}
    negative = {name for name in states if name.startswith("negative")}
    parts = {"prompt": states - negative, "negative_prompt": negative}
    texts = [name for name, found in parts.items() if found]
    given = any(arguments.get(name) is not None for name in texts)
    if not states or given or not {"prompt", *texts} <= set(accepted):
        return arguments
    kept = {name: value for name, value in arguments.items() if name not in states}
    batch = max(len(arguments[name]) for name in states)
    return kept | dict.fromkeys(texts, [""] * batch if several else "")


def prompt_batch(arguments: Mapping[str, object]) -> int | None:
    """Return the batch of a call's text states; None without any."""
    states = (v for n, v in arguments.items() if "prompt" in n and isinstance(v, Tensor))
    return next((len(v) for v in states if v.is_floating_point() and v.dim()), None)


def has_several(pictures: object) -> bool:
    """Return True if there is a separate image per sample."""
    return count_pictures(pictures) > 1


def count_pictures(pictures: object) -> int:
    """Return the number of images; those of a batch count one by one."""
    if isinstance(pictures, (Tensor, np.ndarray)):
        return len(pictures) if pictures.ndim == 4 else 1
    return len(pictures) if isinstance(pictures, (list, tuple)) else 1


def only_one(value: object) -> object:
    """Unwrap a list of one text."""
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    return value


def type_name(call: object) -> str:
    return str(getattr(call, "__qualname__", call))


def empty_prompt(value: object, several: bool) -> object:
    """Return an empty prompt of the same form; a batch of one is enough unless `several`."""
    if isinstance(value, str):
        return ""
    if isinstance(value, Tensor):
        return empty_states(value if several else value[:1])
    if isinstance(value, (list, tuple)):
        kept = value if several else value[:1]  # each item of a list belongs to one sample
        return [empty_states(v) if isinstance(v, Tensor) else empty_prompt(v, True) for v in kept]
    return value


def is_text(value: object) -> bool:
    """Return True for a text or a list of texts."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(is_text, value))
    return isinstance(value, str)


def are_states(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, Tensor) for one in value)


def is_states_of_text(name: str, value: object) -> bool:
    """Return True for a prompt's states and what belongs to them, such as attention masks."""
    if "prompt" not in name or "image" in name:
        return False
    return isinstance(value, Tensor) and value.dim() > 0 or bool(value) and are_states(value)


def empty_states(value: Tensor) -> Tensor:
    """Return text states of zeros; attention masks and token counts are unchanged."""
    return torch.zeros_like(value) if value.is_floating_point() else value


def empty_picture(value: object) -> object:
    """Return a black image of the same form; encoders resize images to their input size."""
    if isinstance(value, Image.Image):
        return Image.new("RGB", (NOTHING, NOTHING))
    if isinstance(value, (list, tuple)):
        return [empty_picture(one) for one in value]
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def usual_guidance(value: float, usual: object) -> float:
    """Return the model's default guidance if `value` turns guidance on (above 1), else `value`."""
    if value <= 1:
        return value
    return float(usual) if isinstance(usual, (int, float)) and usual > 1 else 4.0


def seeded_noise(purpose: str) -> torch.Generator:
    """Return a generator for runs that maskfx makes itself, seeded by their purpose."""
    return torch.Generator().manual_seed(int(digest(purpose)[:15], 16))


class PipelineFingerprint:
    """Digests a pipeline except its denoisers' weights: scheduler, guider, encoders, settings."""

    def __init__(self) -> None:
        self._watched: dict[int, Weights] = {}

    def digest(
        self,
        components: Mapping[str, object],
        denoisers: Mapping[str, nn.Module],
        settings: Mapping[str, str],
    ) -> str:
        """Return the digest; `settings` are those of the denoisers, as `settings_of` returns."""
        own = {id(module) for module in denoisers.values()}
        parts = []
        for name, given in sorted(components.items()):
            part = getattr(given, "maskfx_part", given)  # a proxy's methods may run elsewhere
            if isinstance(part, nn.Module):
                if id(part) not in own and not hasattr(part, "nets"):
                    parts.append([name, type(part).__name__, self._weights(part)])
            elif hasattr(part, "config") and hasattr(part, "step"):
                parts.append([name, type(part).__name__, digest(config_of(part))])
            elif is_guider(part):
                parts.append([name, type(part).__name__, digest(settings_of(part))])
        parts.extend([name, now] for name, now in sorted(settings.items()))
        return digest(parts)

    def let_go(self, module: nn.Module) -> None:
        """Hold a module no longer; it may be digested again."""
        self._watched.pop(id(module), None)

    def _weights(self, module: nn.Module) -> str:
        watch = self._watched.get(id(module))
        if watch is None or watch.module is not module:
            watch = self._watched[id(module)] = Weights(module)
        if watch.overwritten():
            watch.forget()
        watch.change()
        return watch.fingerprint()
