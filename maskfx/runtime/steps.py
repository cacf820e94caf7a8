"""The kinds of members of a step (edit, recording, dense call), and a validated member."""

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
    """Computes the masked sites only and reads the rest from `cache`.

    Args:
        inputs: The denoiser's arguments by name.
        mask: Boolean, True = edit: (height, width) of the latent, or (tokens,) for packed inputs.
        cache: The recording of this step.
        any_step: Accept a cache that was recorded at another timestep.
        plan: For a region of keys and values, by its number in `CompiledDenoiser.regions`: the
            sites that it computes from loaded inputs, a mask that covers `mask`. A region that
            isn't named computes the masked sites.
        wide: For a stretch (consecutive blocks), by its number in `CompiledDenoiser.stretches`:
            the sites that it computes, a mask that covers `mask`. These sites see the edit there,
            so the picture changes; the blocks after it read the recording again. Stretches that
            compute all sites from the first on load nothing; a stretch that is wider than the one
            before it starts from the values recorded between the two. The output is computed at
            masked sites only, independent of `wide`.
    """

    inputs: Mapping[str, Any]
    mask: Tensor
    cache: StepCache
    any_step: bool = False
    plan: Mapping[int, Tensor] = field(default_factory=dict)
    wide: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordStep:
    """Computes all sites and records what later edits need."""

    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class DenseStep:
    """Computes all sites and records nothing."""

    inputs: Mapping[str, Any]


AnyStep = EditStep | RecordStep | DenseStep


@dataclass
class CheckedCall:
    """A validated member of a step: its flattened arguments and the compilation that serves it."""

    step: AnyStep
    values: list[Any]
    spec: pytree.TreeSpec
    sizes: dict[str, int]
    compilation: Compilation
    mask: Tensor | None = None
    regions: dict[int, Tensor] = field(default_factory=dict)
    output_spec: pytree.TreeSpec | None = None


def step_arguments(call: CheckedCall) -> list[tuple[str, Tensor]]:
    """Return the names and values of the arguments that identify the step (timestep, sigma)."""
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
    """Return copies of the arguments that identify the step, for a recording."""
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
    """Return the dtype of the latent."""
    return latent_of(call).dtype


def device_of(call: CheckedCall) -> torch.device:
    """Return the device of the latent, on which the step computes."""
    return latent_of(call).device


def unflatten(call: CheckedCall, flat: list[Any]) -> Any:
    """Return flat outputs in the module's structure."""
    capture_ = call.compilation.capture
    spec = capture_.out_spec if capture_.module is not None else call.output_spec
    assert spec is not None
    return pytree.tree_unflatten(flat, spec)


def effective_mask(call: CheckedCall) -> Tensor | None:
    """Return the mask, or None if all sites are computed."""
    if not isinstance(call.step, EditStep) or call.mask is None or bool(call.mask.all()):
        return None
    return call.mask


def constants_of(capture_: Capture, values: Sequence[Any]) -> list[Any]:
    """Return the arguments that aren't tensors, among them the picture's sizes."""
    leaves = zip(capture_.leaves, values, strict=True)
    return [v for leaf, v in leaves if not leaf.tensor and leaf.argument != "return_dict"]


def masked(new: Any, old: Any, mask: Tensor) -> Any:
    """Return new values where masked and recorded ones elsewhere.

    Values whose shape doesn't match the mask are returned new.
    """
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
