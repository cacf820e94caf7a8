"""All cases of denoisers as users write them; each file adds its own."""

from tests.factories import (  # noqa: F401
    own_blocks,
    own_calls,
    own_experts,
    own_frames,
    own_gridded,
    own_held,
    own_lines,
    own_mixtures,
    own_networks,
    own_packed,
    own_resampling,
    own_sides,
    own_transformers,
    own_unets,
    own_videos,
    own_weights,
    own_windows,
)
from tests.factories.own_denoisers import OWN, QUICK

__all__ = ["OWN", "QUICK"]
