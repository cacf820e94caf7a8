"""Full differences in files of adapters: tensors that are added to a layer's weight or bias.

Three kinds are known: names that end with `.diff`, `.diff_b`, `.w_norm` or `.b_norm` (LyCORIS,
ComfyUI); names of parameters alone (IC-Light); and Fooocus's patches, whose tensors are compressed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maskfx.errors import InputError
from maskfx.runtime.lora.adapter import Difference, LayerChange
from maskfx.runtime.lora.layers import wider_input

PATCH = ".patch"  # ending of Fooocus's files, which are pickles of tensors
ENDINGS = {".diff": "weight", ".diff_b": "bias", ".w_norm": "weight", ".b_norm": "bias"}
PARAMETERS = {".weight": "weight", ".bias": "bias"}
ALPHA = ".alpha"
HEAD = "head"  # the tensor of Fooocus's inpaint head
LATENTS = 4  # channels of the latents, before those of the mask and the masked picture
WHOLE = 0.5  # mean of normalisations' weights above which a file holds weights, not differences

Shape = tuple[int, ...]
Parameters = Mapping[str, Mapping[str, Shape]]  # part -> "layer.weight" or "layer.bias" -> shape
Place = tuple[str, str]  # part and layer


@dataclass(eq=False)
class FoundDifferences:
    """The full differences of a file, and its other tensors."""

    by_part: dict[str, dict[str, dict[str, Tensor]]] = field(default_factory=dict)
    rest: dict[str, Tensor] = field(default_factory=dict)

    def add(self, place: Place, name: str, value: Tensor) -> None:
        part, layer = place
        self.by_part.setdefault(part, {}).setdefault(layer, {})[name] = value


def parse_patch(name: str, content: bytes, count: int) -> dict[str, Tensor]:
    """Return the tensors of a file of Fooocus; code in a pickle isn't run.

    Each is stored as bytes, with the numbers that the least and the greatest byte stand for.
    """
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise InputError(
            f"{name}: not a file of tensors ({error!s:.120}); copy it again, or convert it to "
            "safetensors where you trust it"
        ) from error
    if not isinstance(found, dict) or not found or len(found) > count:
        raise InputError(f"{name}: no table of up to {count} tensors; is it another kind of file?")
    return {str(key): decompressed(name, str(key), value) for key, value in found.items()}


def decompressed(name: str, key: str, value: object) -> Tensor:
    if isinstance(value, (tuple, list)) and len(value) == 3:
        steps, low, high = value
        if all(isinstance(one, Tensor) for one in value) and steps.dtype == torch.uint8:
            low, high = low.float(), high.float()
            wide: Tensor = steps.float() / 255.0 * (high - low) + low
            return wide.to(value[1].dtype)
    raise InputError(
        f"{name}: {key} isn't bytes with their least and greatest number, as Fooocus writes; "
        "convert the file to safetensors where you trust it"
    )


def find_differences(
    name: str,
    tensors: Mapping[str, Tensor],
    place_of: Callable[[str], Place | None],
    parameters: Parameters,
    main: str | None,
) -> FoundDifferences:
    """Split a file's tensors into full differences and others.

    Args:
        name: Name of the file.
        tensors: The tensors.
        place_of: Finds the layer that a file spells so.
        parameters: Shapes of the pipeline's parameters.
        main: The component of the denoiser.
    """
    found = FoundDifferences()
    if set(tensors) == {HEAD} and main is not None:
        found.add((main, "conv_in"), "weight", widened(name, tensors[HEAD], parameters[main]))
        return found
    for key, value in tensors.items():
        ending = next((end for end in ENDINGS if key.endswith(end)), None)
        place = None if ending is None else place_of(key.removesuffix(ending))
        if ending is None or place is None:
            found.rest[key] = value
        else:
            found.add(place, ENDINGS[ending], value)
    if found.by_part:  # full differences have no alpha that counts
        low_rank = {key.partition(".lora")[0] for key in found.rest if not key.endswith(ALPHA)}
        for key in [key for key in found.rest if key.endswith(ALPHA)]:
            if key.removesuffix(ALPHA) not in low_rank and place_of(key.removesuffix(ALPHA)):
                del found.rest[key]
    if found.by_part or not found.rest:
        return found
    named = {
        key: (place_of(key[: key.rfind(".")]), PARAMETERS.get(key[key.rfind(".") :]))
        for key in found.rest
    }
    if all(place is not None and own is not None for place, own in named.values()):
        check_are_differences(name, found.rest)
        for key, (place, own) in named.items():
            assert place is not None
            assert own is not None
            found.add(place, own, found.rest[key])
        found.rest = {}
    return found


def check_are_differences(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise InputError for the weights of a model, whose names are the same."""
    norms = [v for key, v in tensors.items() if v.dim() == 1 and key.endswith(".weight")]
    if norms and float(torch.cat([one.float() for one in norms]).mean()) > WHOLE:
        raise InputError(
            f"{name}: it holds the weights of a model and not differences of them (those of its "
            "normalisations are about 1); load it as the model, or subtract the base's weights"
        )


def widened(name: str, head: Tensor, parameters: Mapping[str, Shape]) -> Tensor:
    """Return Fooocus's inpaint head as a difference of the first convolution's weight."""
    wanted = parameters.get("conv_in.weight", ())
    seen = tuple(head.shape)
    if len(seen) != 4 or wanted != (seen[0], LATENTS + seen[1], *seen[2:]):
        needs = LATENTS + seen[1] if len(seen) > 1 else 0
        raise InputError(
            f"{name}: an inpaint head of {seen} belongs to a first convolution with {needs} input "
            f"channels, and the pipeline's is {wanted or 'not named conv_in'}; load a pipeline "
            f"whose denoiser takes {needs} channels"
        )
    whole = head.new_zeros(wanted)
    whole[:, LATENTS:] = head
    return whole


def differences_of(
    name: str, part: str, layers: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, Shape]
) -> dict[str, LayerChange]:
    """Return one component's full differences, each checked against its parameter."""
    found: dict[str, LayerChange] = {}
    for layer, own in layers.items():
        for kind, value in own.items():
            check_shape(f"{name}: {part}.{layer}.{kind}", value, shapes.get(f"{layer}.{kind}"))
        found[layer] = Difference(**own)
    return found


def check_shape(where: str, value: Tensor, wanted: Shape | None) -> None:
    if wanted is None:
        raise InputError(
            f"{where}: the pipeline's layer has no such parameter; the file was made for another "
            "model"
        )
    if not value.is_floating_point():
        raise InputError(f"{where}: {value.dtype}; a difference has floating-point numbers")
    if tuple(value.shape) != wanted:
        seen = tuple(value.shape)
        raise InputError(
            f"{where}: a difference of {seen}, but the pipeline's parameter is {wanted}"
            f"{wider_input(seen, wanted)}"
        )
    if not bool(value.isfinite().all()):
        raise InputError(f"{where}: numbers that aren't finite; the file is damaged")
