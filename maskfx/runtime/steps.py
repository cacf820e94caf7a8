"""What a step may ask for: an edit, a recording, a dense call; and one member of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.captured import Capture
from maskfx.compiler.compile import Compilation
from maskfx.ir.values import copy_of
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.devices import moved


@dataclass(frozen=True)
class EditStep:
    """Compute the masked sites only; the rest comes from `cache`.

    `mask` is boolean, True = edit: (height, width) of the latent, or (tokens,) for packed inputs.
    `any_step` allows a cache that was recorded at another timestep. `plan` names, by the number of
    a region (`CompiledDenoiser.regions`), the sites that it computes from loaded inputs: a mask
    that covers `mask`. A region that isn't named computes what is masked.

    `wide` names, by the number of a stretch of blocks (`CompiledDenoiser.stretches`), the sites
    that it computes: a mask that covers `mask`. These sites see the edit there, so the picture
    changes; what follows reads the recording again. Stretches that compute everything from the
    first on load nothing; one that is wider than the stretch before it begins with what the
    recording has between them. The output is computed where masked, whatever was wide.
    """

    inputs: Mapping[str, Any]
    mask: Tensor
    cache: StepCache
    any_step: bool = False
    plan: Mapping[int, Tensor] = field(default_factory=dict)
    wide: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordStep:
    """Compute everything and keep what later edits need."""

    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class DenseStep:
    """Compute everything."""

    inputs: Mapping[str, Any]


AnyStep = EditStep | RecordStep | DenseStep


@dataclass
class CheckedCall:
    """One member of a step: its flattened arguments and the compilation that serves it."""

    step: AnyStep
    values: list[Any]
    spec: pytree.TreeSpec
    sizes: dict[str, int]
    compilation: Compilation
    mask: Tensor | None = None
    regions: dict[int, Tensor] = field(default_factory=dict)
    output_spec: pytree.TreeSpec | None = None


def step_arguments(call: CheckedCall) -> list[tuple[str, Tensor]]:
    """The arguments that say which step this is."""
    leaves = call.compilation.capture.leaves
    return [
        (leaf.path, v)
        for leaf, v in zip(leaves, call.values, strict=True)
        if leaf.tensor
        and leaf.step
        and ("timestep" in leaf.path or leaf.path in ("t", "sigma"))
        and v.dim() <= 1
    ]


def steps_of(call: CheckedCall) -> dict[str, Tensor]:
    """Copies of these arguments, for a recording."""
    return {name: value.clone() for name, value in step_arguments(call)}


def latent_of(call: CheckedCall) -> Tensor:
    leaves = call.compilation.capture.leaves
    value: Tensor = next(
        v
        for v, leaf in zip(call.values, leaves, strict=True)
        if leaf.step and leaf.tensor and v.dim() >= 3
    )
    return value


def dtype_of(call: CheckedCall) -> torch.dtype:
    """The type of the latent."""
    return latent_of(call).dtype


def device_of(call: CheckedCall) -> torch.device:
    """Where the latent is, and so where the step computes."""
    return latent_of(call).device


def unflatten(call: CheckedCall, flat: list[Any]) -> Any:
    """Outputs in the module's structure."""
    capture_ = call.compilation.capture
    spec = capture_.out_spec if capture_.module is not None else call.output_spec
    assert spec is not None
    return pytree.tree_unflatten(flat, spec)


def effective_mask(call: CheckedCall) -> Tensor | None:
    """The mask, or None where everything is computed."""
    if not isinstance(call.step, EditStep) or call.mask is None or bool(call.mask.all()):
        return None
    return call.mask


def constants_of(capture_: Capture, values: Sequence[Any]) -> list[Any]:
    """Arguments that are no tensors: sizes of the picture among them."""
    leaves = zip(capture_.leaves, values, strict=True)
    return [v for leaf, v in leaves if not leaf.tensor and leaf.argument != "return_dict"]


def masked(new: Any, old: Any, mask: Tensor) -> Any:
    """New values where masked, recorded ones elsewhere; values of another shape are new."""
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        return new
    mask, old = moved(mask, new.device), moved(old, new.device)
    if mask.dim() == 2 and new.dim() >= 3 and new.shape[-2:] == mask.shape:
        return torch.where(mask, new, old)
    if mask.dim() == 1 and new.dim() == 3 and new.shape[1] == mask.shape[0]:
        return torch.where(mask[:, None], new, old)
    return new


def clone_tensors(tree: Any) -> Any:
    return pytree.tree_map(copy_of, tree)
