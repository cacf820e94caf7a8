"""All pipelines that make videos; each file adds its own."""

from tests.factories import motion_pipelines  # noqa: F401
from tests.factories.video_pipelines import FRAMES, SIDE, VIDEO_KINDS, VideoKind, film, moving

__all__ = ["FRAMES", "SIDE", "VIDEO_KINDS", "VideoKind", "film", "moving"]
