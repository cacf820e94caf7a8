"""Attention by PyTorch during a capture: a graph can't look into kernels of other packages.

`set_attention_backend` and `enable_xformers_memory_efficient_attention` of diffusers choose kernels
that compute the same as PyTorch's attention. A capture holds PyTorch's, which the passes know, and
which is compared with the module as it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor

from maskfx.compiler.capture.tracing.plain_writes import plain_writes

DISPATCH, REGISTRY = "diffusers.models.attention_dispatch", "_AttentionBackendRegistry"
XFORMERS = "xformers.ops"
Attention = Callable[..., object]


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let attention run by PyTorch within the context, whichever kernels were chosen for it.

    Masks are written in a way that a graph can hold.
    """
    changed = [*backends_of_diffusers(), *function_of_xformers()]
    before = [getattr(owner, name) for owner, name, _ in changed]
    try:
        for owner, name, value in changed:
            setattr(owner, name, value)
        with plain_writes():
            yield
    finally:
        for (owner, name, _), value in zip(changed, before, strict=True):
            setattr(owner, name, value)


def backends_of_diffusers() -> list[tuple[object, str, object]]:
    """Return what to set so that each backend of diffusers is PyTorch's; nothing if there's none.

    Masks in a form that only one backend knows are left to it.
    """
    dispatch = sys.modules.get(DISPATCH)
    registry: object = getattr(dispatch, REGISTRY, None)
    own: Mapping[object, Attention] = getattr(registry, "_backends", {})
    accepted: Mapping[object, set[str]] = getattr(registry, "_supported_arg_names", {})
    native = getattr(getattr(dispatch, "AttentionBackendName", None), "NATIVE", None)
    if native not in own or own.keys() != accepted.keys():
        return []

    def by_pytorch(backend: object) -> Attention:
        def attend(**given: object) -> object:
            mask = given.get("attn_mask")
            used = native if mask is None or isinstance(mask, Tensor) else backend
            return own[used](**{k: v for k, v in given.items() if k in accepted[used]})

        return attend

    every = set().union(*accepted.values())
    return [
        (registry, "_backends", {**{name: by_pytorch(name) for name in own}, native: own[native]}),
        (registry, "_supported_arg_names", {**dict.fromkeys(own, every), native: accepted[native]}),
        (registry, "_checks_enabled", False),
    ]


def function_of_xformers() -> list[tuple[object, str, object]]:
    """Return what to set so that xformers' attention is PyTorch's; nothing if it isn't loaded."""
    module = sys.modules.get(XFORMERS)
    own: Attention | None = getattr(module, "memory_efficient_attention", None)
    if own is None:
        return []

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: object = None,
        p: float = 0.0,
        scale: float | None = None,
        **others: object,
    ) -> object:
        if not (attn_bias is None or isinstance(attn_bias, Tensor)) or query.dim() not in (3, 4):
            return own(query, key, value, attn_bias, p, scale, **others)
        heads = query.dim() == 4  # samples, tokens, heads, features; without heads if three
        q, k, v = (x.transpose(1, 2) if heads else x for x in (query, key, value))
        found = F.scaled_dot_product_attention(q, k, v, attn_bias, p, scale=scale)
        return found.transpose(1, 2) if heads else found

    return [(module, "memory_efficient_attention", attend)]
