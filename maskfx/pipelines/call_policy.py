"""Call policy: what each denoiser call of an edit becomes, from step numbers alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from maskfx.pipelines.quality import Quality
from maskfx.runtime.reuse.step_selection import StepSelection


class CallPosition(NamedTuple):
    """The position of a call in a run: denoiser name, scheduler step, branch within the step."""

    name: str
    step: int
    branch: str


def sample_branch(branch: str, index: int, count: int) -> str:
    """Return the branch name of one sample of a call that lists `count` samples."""
    return f"{branch}.{index}/{count}"


class CallKind(Enum):
    """What a denoiser call of an edit becomes."""

    DENSE = "dense"  # computed in full
    TEMPLATE = "template"  # an edit of the template's recording
    SESSION = "session"  # recorded, or an edit of an earlier step: the EditSession decides


@dataclass(frozen=True)
class EditPolicy:
    """Decides what the calls of an edit become.

    Args:
        quality: Quality of the edit.
        recorded: Number of steps of the template; None without a template.
        whole: Whether all of a picture is made, so that its calls read nothing of a template.
    """

    quality: Quality
    recorded: int | None = None
    whole: bool = False

    @property
    def selection(self) -> StepSelection:
        """The steps whose calls are computed; outputs of the others are extrapolated."""
        return self.quality.whole_selection if self.whole else self.quality.selection

    def kind(self, step: int, steps: int | None) -> CallKind:
        """Return what a call at this step becomes; `steps` is None if their number is unknown."""
        if step < self.quality.first or self._is_last(step, steps):
            return CallKind.DENSE
        if self.recorded is not None:
            return CallKind.DENSE if self.whole else CallKind.TEMPLATE
        reads_none = (self.whole or self.quality.refresh == 1) and self.quality.patches is None
        return CallKind.DENSE if reads_none else CallKind.SESSION

    def following(self, step: int, steps: int | None) -> int | None:
        """Return the next computed step if its calls are edits of the template, else None."""
        found = self.selection.following(step, steps)
        if found is None or self.kind(found, steps) is not CallKind.TEMPLATE:
            return None
        return found

    def ignores_last(self, steps: int | None) -> bool:
        """Return True if the last steps can't be determined, because their number is unknown."""
        return bool(self.quality.last) and steps is None and self.recorded is None

    def _is_last(self, step: int, steps: int | None) -> bool:
        count = self.recorded if steps is None else steps
        return bool(self.quality.last) and count is not None and step >= count - self.quality.last
