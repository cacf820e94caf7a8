"""What a request lets an edit change for speed; fixed per request, never by load."""

from __future__ import annotations

from dataclasses import dataclass

from maskfx.errors import InputError
from maskfx.runtime.reuse.policy import ReusePolicy
from maskfx.runtime.reuse.step_selection import StepSelection

REUSES = ("template", "steps", "auto")


@dataclass(frozen=True)
class Quality:
    """How faithful a masked run is to the dense one.

    first: so many steps at the start, and last: at the end, are computed in full.
    wide: so many of the denoiser's first stretches of blocks compute everything: the rest of the
    picture sees the edit there. It needs compile(pipe, stretches=True).
    margin: so many sites of the latent around the mask are computed too: what surrounds the new
    thing sees it. Each costs most where the mask is small, and brings the picture much nearer to
    the dense one.
    every: one step in so many is computed, more of the last than of the first ones; the others
    continue the course of the denoiser's last answers. The very first and last are computed, and
    of a short run six. Given to compile(), templates keep the computed steps only; a call that
    computes others has a template of its own.
    feather: over so many pixels inside the mask's edge the new picture fades in.
    reuse: "template" records a template that isn't there, then edits; "steps" needs none: some of
    the run's own steps are computed in full (`refresh`) and the others are edits of them; "auto"
    edits the template if it is there, or was asked for before, and goes by steps otherwise.
    refresh: with steps, an edit's recording is fewer than so many steps old; else the step is
    computed in full, and recorded.
    any_mask: where the denoiser is told of the mask (in channels of its own, through a
    ControlNet), the template is recorded with nothing masked, and serves every mask; if False, each
    mask has a template of its own, which says exactly what the denoiser saw around it.
    """

    first: int = 0
    last: int = 0
    wide: int = 0
    margin: int = 1
    every: int = 1
    feather: int = 0
    reuse: str = "template"
    refresh: int = 4
    any_mask: bool = True

    def __post_init__(self) -> None:
        for name in ("first", "last", "wide", "margin", "feather"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise InputError(f"Quality: {name}={value!r}: give a whole number, 0 or more")
        for name in ("every", "refresh"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"Quality: {name}={value!r}: give a whole number, 1 or more")
        if type(self.any_mask) is not bool:
            raise InputError(f"Quality: any_mask={self.any_mask!r}: give True or False")
        if self.reuse not in REUSES:
            raise InputError(f"Quality: reuse={self.reuse!r}: choose one of {', '.join(REUSES)}")

    @classmethod
    def of(cls, given: Quality | str | None) -> Quality:
        """By name, or as it is; every step is computed unless something else is asked for."""
        if given is None:
            return cls()
        if isinstance(given, Quality):
            return given
        if given not in NAMED:
            raise InputError(
                f"quality={given!r}: choose one of {', '.join(NAMED)}, or give a maskfx.Quality"
            )
        return NAMED[given]

    @property
    def selection(self) -> StepSelection:
        return StepSelection(self.every, self.first, self.last)

    def told(self) -> str:
        """What an edit computes, in words."""
        sites = "the masked sites"
        if self.margin:
            sites += f" and {self.margin} around them"
        steps = "at every step"
        if self.selection.skips:
            steps = f"at one step in {self.every}; the others continue the last answers"
        return f"{sites}, {steps}"

    def cold(self) -> ReusePolicy:
        """How a run goes that has no template."""
        return ReusePolicy(
            reuse="steps", refresh=self.refresh, first=max(2, self.first), keep="none"
        )


# Points of the frontier that bench.quality measured.
NAMED = {
    "fast": Quality(margin=1, every=4, refresh=12),
    "balanced": Quality(margin=2, every=4, refresh=12),
    "faithful": Quality(margin=4, every=4, refresh=4),
}
