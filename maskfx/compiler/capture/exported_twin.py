"""The module that an export changes in place of the one that is captured: its twin.

What saves memory and changes no result is off in it, as a graph would have each part of it once.
"""

from __future__ import annotations

import logging
import sys

import torch

from maskfx.compiler.capture.tracing.light_run import NotLight, light_twin
from maskfx.compiler.capture.tracing.twin import NoTwin
from maskfx.ir.modules.callables import is_called

log = logging.getLogger(__name__)

# of diffusers' blocks: the number of tokens that feed-forward layers compute at once, which saves
# memory and changes no result; a graph would have each of these layers once per chunk
CHUNKS = "_chunk_size"
# of attention processors: the number of heads that attention computes at once; the same holds
SLICES = "slice_size"


def twin_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return a module with the same weights to export, or the module itself if it has no twin."""
    try:
        twin = light_twin(module).module
    except (NoTwin, NotLight) as error:
        log.debug("%s is exported itself: %s", type(module).__name__, error)
        return module
    for part in twin.modules():
        if vars(part).get(CHUNKS):
            setattr(part, CHUNKS, None)
        for called in filter(is_called, vars(part).values()):
            if type(getattr(called, "__dict__", {}).get(SLICES)) is int:
                setattr(called, SLICES, sys.maxsize)
    return twin
