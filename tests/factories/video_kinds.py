"""All pipelines that make videos; each file adds its own."""

from tests.factories import (  # noqa: F401
    late_video_pipelines,
    more_video_pipelines,
    motion_pipelines,
    sounding_pipelines,
)
from tests.factories.video_pipelines import (
    FRAMES,
    SIDE,
    VIDEO_KINDS,
    VideoKind,
    film,
    moving,
    videos_of,
)

__all__ = ["FRAMES", "SIDE", "VIDEO_KINDS", "VideoKind", "film", "moving", "videos_of"]
