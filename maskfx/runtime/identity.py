"""Whether two denoisers compute the same: by code, settings and weights."""

from __future__ import annotations

import torch
from torch import nn

from maskfx.compiler.artifact.graphs import weights_of
from maskfx.compiler.artifact.key import module_key
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.programs.program_files import compiled_as


def identity_of(denoiser: CompiledDenoiser) -> str:
    """Return a digest of a denoiser's code, settings, and sums of its weights.

    Denoisers with equal digests compute the same if `same_weights` is True for their modules.
    """
    module = denoiser.module
    code = module_key(module, weights_of(module), compiled_as(denoiser.settings, denoiser.roles))
    return f"{code} {denoiser.fingerprint()}"


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Return True if all parameters and buffers of two modules are equal."""
    mine, theirs = weights_of(one), weights_of(other)
    return mine.keys() == theirs.keys() and all(
        mine[name] is theirs[name] or torch.equal(mine[name], theirs[name]) for name in mine
    )


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers, shared memory counted once."""
    memory = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
        for weight in weights_of(module).values()
        if not weight.is_meta
    }
    return sum(memory.values())


def is_plain(module: nn.Module) -> bool:
    """Return True for a module whose weights are all it computes with: it has no PEFT adapters."""
    return not getattr(module, "peft_config", None)
