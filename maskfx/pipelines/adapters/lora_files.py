"""LoRA files of a pipeline: its class converts their formats, without peft and without loading.

diffusers' `lora_state_dict` of the pipeline's class renames the tensors of the formats that exist
(diffusers', peft's, kohya's, XLabs' and others); what is left is to find each layer's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import xxhash
from torch import Tensor, nn

from maskfx.errors import InputError
from maskfx.pipelines.adapters.layer_spellings import main_part, spellings
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.runtime.lora.adapter import Adapter
from maskfx.runtime.lora.differences import differences_of, find_differences
from maskfx.runtime.lora.files import (
    ALPHA,
    DOWN,
    ELSEWHERE,
    UP,
    FileLimits,
    Shape,
    Targets,
    adapter_of,
    known_layer,
    parameters_of,
    refuse_methods,
    split_parts,
    targets_of,
)

CONVERTER = "lora_state_dict"


@dataclass(frozen=True)
class LoraTarget:
    """What a LoRA file is checked against: a pipeline without its weights.

    Args:
        module: Module of the class that converts the pipeline's files.
        kind: Name of the class.
        layers: Shapes of the weights by component and layer.
        parameters: Shapes of all weights and biases by component and name.
        unet: Config of the UNet, if there is one.
    """

    module: str
    kind: str
    layers: Targets
    unet: Mapping[str, object] | None = None
    parameters: Targets = field(default_factory=dict)

    @classmethod
    def of(cls, pipe: Pipeline) -> LoraTarget:
        """Describe a pipeline; InputError if its class takes no LoRA."""
        original = getattr(type(pipe), "maskfx_original", type(pipe))
        if not hasattr(original, CONVERTER):
            raise InputError(f"{original.__name__} accepts no LoRA; leave lora out")
        kind = next(c for c in original.__mro__ if CONVERTER in vars(c))  # shared by pipelines
        parts = {n: p for n, p in pipe.components.items() if isinstance(p, nn.Module)}
        config = getattr(parts.get("unet"), "config", None)
        unet = None if config is None else json.loads(json.dumps(dict(config), default=str))
        parts.pop("vae", None)
        layers = {name: targets_of(part) for name, part in parts.items()}
        parameters = {name: parameters_of(part) for name, part in parts.items()}
        return cls(kind.__module__, kind.__qualname__, layers, unet, parameters)

    @cached_property
    def fields(self) -> dict[str, object]:
        return {
            "module": self.module,
            "kind": self.kind,
            "layers": {part: dict(layers) for part, layers in self.layers.items()},
            "unet": self.unet,
            "parameters": {part: dict(own) for part, own in self.parameters.items()},
        }

    @cached_property
    def spellings(self) -> Mapping[str, tuple[str, str]]:
        """Part and layer by each spelling in files."""
        return spellings({p: {n.rpartition(".")[0] for n in o} for p, o in self.parameters.items()})

    @cached_property
    def kind_digest(self) -> str:
        """A digest of all fields; adapters are loaded once for pipelines with equal ones."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.fields, sort_keys=True).encode())

    def pipeline_class(self) -> Any:
        return getattr(import_module(self.module), self.kind)


def converted(
    name: str,
    tensors: dict[str, Tensor],
    settings: Mapping[str, object],
    target: LoraTarget,
    limits: FileLimits,
) -> Adapter:
    """Return the adapter of a file's tensors; InputError if it doesn't fit the pipeline."""
    shapes = {  # of a request that another process sent, lists
        part: {key: tuple(shape) for key, shape in own.items()}
        for part, own in target.parameters.items()
    }
    main = main_part(shapes)
    found = find_differences(name, tensors, target.spellings.get, shapes, main)
    whole = {
        part: differences_of(name, part, layers, shapes[part])
        for part, layers in found.by_part.items()
    }
    low_rank = converted_low_rank(name, found.rest, target) if found.rest else Converted({}, {})
    return adapter_of(
        name, low_rank.by_part, low_rank.alphas, settings, target.layers, limits, whole
    )


@dataclass(frozen=True)
class Converted:
    """Low-rank tensors under peft's names by component, and the alphas of their layers."""

    by_part: Mapping[str, Mapping[str, Tensor]]
    alphas: Mapping[str, object]


def converted_low_rank(name: str, tensors: dict[str, Tensor], target: LoraTarget) -> Converted:
    """Return a file's low-rank tensors, converted by the pipeline's class."""
    kind = target.pipeline_class()
    more = {} if target.unet is None else {"unet_config": SimpleNamespace(**target.unet)}
    try:
        found = getattr(kind, CONVERTER)(tensors, return_alphas=True, **more)
    except Exception as error:  # the type depends on the format
        raise InputError(
            f"{name}: {kind.__name__} can't convert it ({type(error).__name__}: {error!s:.120}); "
            f"{ELSEWHERE}"
        ) from error
    state, alphas = (found if isinstance(found, tuple) else (found, None))[:2]
    refuse_methods(name, state)
    by_part = {
        part: {peft_key(key, target.layers.get(part, {})): value for key, value in own.items()}
        for part, own in split_parts(state).items()
    }
    return Converted(by_part, peft_alphas(alphas or {}, target.layers))


def peft_key(key: str, layers: Mapping[str, Shape]) -> str:
    """Return a tensor's name as peft has it: the spelling that names a layer of the pipeline."""
    from diffusers.utils import state_dict_utils

    spelling: Any = state_dict_utils
    tables: tuple[Mapping[str, str], ...] = (
        {},
        spelling.UNET_TO_DIFFUSERS,
        spelling.DIFFUSERS_TO_PEFT,
        spelling.DIFFUSERS_OLD_TO_PEFT,
    )
    found = key
    for table in tables:
        one = str(next(iter(spelling.convert_state_dict({key: None}, table))))
        ending = next((end for end in (DOWN, UP) if one.endswith(end)), None)
        if ending is not None:
            found = one
            if known_layer(one.removesuffix(ending), layers) in layers:
                return found
    return found


def peft_alphas(alphas: Mapping[str, object], targets: Targets) -> dict[str, object]:
    """Return alphas by component, layer and ".alpha"; some formats name a matrix, not the layer."""
    found = {}
    for key, value in alphas.items():
        part, _, rest = key.removesuffix(ALPHA).partition(".")
        if rest.endswith(".weight"):
            rest = peft_key(rest, targets.get(part, {})).removesuffix(DOWN)
        found[f"{part}.{rest}{ALPHA}"] = value
    return found
