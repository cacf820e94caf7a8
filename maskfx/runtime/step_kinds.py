"""The kinds of members of a step, by what they compute. No torch: front ends read them too."""

from __future__ import annotations

from enum import StrEnum


class StepKind(StrEnum):
    """What a member of a step computes."""

    EDIT = "edit"  # masked sites, the rest is read from a recording
    DENSE = "dense"  # all sites
    RECORD = "record"  # all sites, and records them
    REUSE = "reuse"  # changed patches, and replaces their rows in its own recording
