"""What a request allows an edit to change for speed; fixed per request, independent of load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from maskfx.errors import InputError
from maskfx.ir.argument_checks import check_choice, check_flag, check_whole, is_number
from maskfx.runtime.reuse.patches import PatchReuse
from maskfx.runtime.reuse.policy import ReusePolicy
from maskfx.runtime.reuse.step_selection import LEAST, WHOLE, StepSelection

TIMES = ("sync", "late")
# of the fields of a quality: what they may be
CHOICES: dict[str, tuple[str, ...]] = {
    "reuse": ("template", "steps", "auto", "idle"),
    "vae": ("auto", "full", "mask"),
    "forecast": ("output", "clean", "fitted", "auto"),
    "control": TIMES,
    "parallel": TIMES,
}
LEAST_NUMBERS = {"first": 0, "last": 0, "wide": 0, "margin": 0, "feather": 0}
LEAST_NUMBERS |= {"every": 1, "least": 2, "refresh": 1}


@dataclass(frozen=True)
class Quality:
    """How faithful a masked run is to the dense one.

    Args:
        first: Number of steps at the start that are computed in full. Defaults to 0.
        last: Number of steps at the end that are computed in full. Defaults to 0.
        wide: Number of the denoiser's first stretches (runs of blocks) that compute all sites, so
            that the rest of the image sees the edit there. Defaults to 0; requires
            compile(pipe, stretches=True).
        margin: Number of latent sites around the mask that are computed too, so that the
            surroundings see the edit. Defaults to 1. Each additional site costs most where the mask
            is small, and brings the image much closer to the dense one. A site that is wider than
            8 pixels, as in packed latents, counts as several.
        every: Run the denoiser on about one step in `every` and extrapolate its outputs on the
            others: more often toward the end, and evenly if all of a picture is made without a
            template. Defaults to 1. First and last steps run, and at least `least`. If passed to
            compile(), templates store only the computed steps; a call that computes other steps
            gets a separate template.
        unmasked: Whether `every` also applies to calls without a mask. Defaults to False: they
            compute every step.
        least: Number of steps that run at least where `every` is more than one. Defaults to 6, so
            that short runs keep their likeness. A lower number is faster: `every=7, least=2` runs
            4 of 20 steps.
        forecast: What is extrapolated on the other steps. "output" (default): the denoiser's
            outputs. "clean": the clean latents that they predict, from which an output follows at
            the latents of its step. Applies where the denoiser predicts noise or velocity by a
            table of noise levels, as in Stable Diffusion; others, such as flow models, extrapolate
            outputs. "fitted": outputs by weights of the latents and of all outputs computed before,
            which `maskfx fit-forecast` fits on the model's own runs and keeps in its folder, with
            the steps of whole pictures to compute.
            Applies to the schedules and selections of steps that were fitted, and to those of
            other numbers of steps that are near; others extrapolate outputs, which explain()
            reports. "auto", that of "fast" and "balanced": the same, without a report, but
            "output" for edits of a part without a template, which none are fitted for.
        feather: Width in pixels, inside the mask's edge, over which the new image fades in.
            Defaults to 0.
        reuse: "template" (default) records a missing template, then edits it. "steps" needs none:
            some steps of the run are computed in full (see `refresh`), the others are edits of
            them. "auto" uses a template that exists or was requested before, and otherwise falls
            back to "steps". "idle" uses one that exists, and otherwise falls back to "steps", and
            an engine records the template while it runs no request; without an engine it is "auto".
        refresh: Without a template, a step is computed in full and recorded once the last
            recording is `refresh` steps old. Defaults to 4.
        any_mask: If the mask is an input of the denoiser (as channels, or through a ControlNet),
            True (default) records the template with nothing masked, and it serves every mask. False
            records a separate template per mask, with exactly what the denoiser saw around it.
        vae: "full" (default) encodes and decodes all of the picture. "mask" does so only where it
            or its latents differ from the template's. Passed to compile(), it makes templates
            hold recordings of these calls too. "auto", that of "fast" and "balanced", is "mask"
            where templates hold them, and "full" elsewhere.
        patches: Compute only the patches (squares of latent sites) that changed since they were
            last computed, in each stretch of blocks, and keep the rows of the others from step to
            step: a threshold of relative change, or a `maskfx.PatchReuse`. Defaults to None. Also
            applies to calls without a mask; edits keep patches inside of the mask. Requires this
            quality in compile(pipe, quality=...), or compile(pipe, stretches=True).
        control: "sync" (default): a denoiser reads this step's results of the networks beside it,
            such as ControlNets. "late": those of the previous computed step, and always those, so
            that the picture doesn't depend on when results come. With
            Engine(own_process=["controlnet"]) no step waits for the network's own step, which
            pays where it is slow or far. The first step reads its own results, and so does a step
            at which guidance ends, a ControlNet's range begins or an adapter joins. Also applies
            to calls without a mask; templates are recorded with "sync".
        parallel: How a step is divided over the processes of Engine(ranks=2) or more. "sync"
            (default): each waits for the rows of the others, and the picture is that of one
            process. "late": each computes with the others' rows of the step before, and sends its
            own while it computes, which changes the picture. The `first` steps wait, at least one,
            and so does a step after extrapolated ones, and one that is divided in another way or
            at which the denoiser's settings change. Such a request is cut into equal parts, so
            that its picture depends on the number of processes, and not on other requests. Also
            applies to calls without a mask; templates are recorded with "sync".
    """

    first: int = 0
    last: int = 0
    wide: int = 0
    margin: int = 1
    every: int = 1
    unmasked: bool = False
    least: int = LEAST
    forecast: str = "output"
    feather: int = 0
    reuse: str = "template"
    refresh: int = 4
    any_mask: bool = True
    vae: str = "full"
    patches: PatchReuse | float | None = None
    control: str = "sync"
    parallel: str = "sync"

    def __post_init__(self) -> None:
        for name, least in LEAST_NUMBERS.items():
            check_whole("Quality", name, getattr(self, name), least)
        for name in ("any_mask", "unmasked"):
            check_flag("Quality", name, getattr(self, name))
        for name, known in CHOICES.items():
            check_choice("Quality", name, getattr(self, name), known)
        number = is_number(self.patches) and self.patches >= 0  # type: ignore[operator]
        if not (number or self.patches is None or isinstance(self.patches, PatchReuse)):
            raise InputError(
                f"Quality: patches={self.patches!r}: give a relative change such as 0.1, a "
                "maskfx.PatchReuse, or None"
            )

    @classmethod
    def of(cls, given: Quality | str | None) -> Quality:
        """Return a quality by name, or `given` itself; None gives the default."""
        if given is None:
            return NAMED[DEFAULT]
        if isinstance(given, Quality):
            return given
        if not isinstance(given, str) or given not in NAMED:
            raise InputError(
                f"quality={given!r}: choose one of {', '.join(NAMED)}, or give a maskfx.Quality"
            )
        return NAMED[given]

    def whole(self, name: str) -> Quality:
        """Return the quality with the steps of a name in `WHOLE`, in calls without a mask too."""
        chosen = WHOLE[name]
        every, least, skips = chosen.every, chosen.least, chosen.skips
        return replace(self, every=every, least=least, unmasked=skips, forecast="auto")

    @property
    def codes(self) -> bool:
        """Whether the autoencoder may compute only where a picture differs from its template's."""
        return self.vae != "full"

    @property
    def selection(self) -> StepSelection:
        """The computed steps of an edit."""
        return StepSelection(self.every, self.first, self.last, self.least)

    @property
    def whole_selection(self) -> StepSelection:
        """The computed steps of a whole picture."""
        return replace(self.selection, even=True)

    @property
    def patch_reuse(self) -> PatchReuse | None:
        """Return how patches are reused across steps; None if they aren't."""
        if self.patches is None:
            return None
        found = PatchReuse.of(self.patches)
        first, last = max(found.first, self.first), max(found.last, self.last)
        return replace(found, first=first, last=last)

    def description(self) -> str:
        """Describe what an edit computes."""
        sites = "the masked sites"
        if self.margin:
            sites += f" and {self.margin} around them"
        steps = "at every step"
        if self.selection.skips:
            steps = f"at one step in {self.every}; the others are extrapolated"
        coded = "; the autoencoder only where the picture differs" if self.codes else ""
        return f"{sites}, {steps}{coded}"

    def policy_without_template(self) -> ReusePolicy:
        """Return the reuse policy of a run without a template."""
        return ReusePolicy(
            reuse="steps", refresh=self.refresh, first=max(2, self.first), keep="none"
        )


# Points of the speed and quality frontier measured by bench.quality; "all-steps" extrapolates none.
# Those of `WHOLE` apply to calls without a mask too, and are points of bench.patches.
NAMED = {
    "fast": Quality(margin=1, every=4, refresh=12, vae="auto", forecast="auto"),
    "balanced": Quality(margin=2, every=4, refresh=12, vae="auto", forecast="auto"),
    "faithful": Quality(margin=4, every=4, refresh=4),
    "all-steps": Quality(),
}
NAMED |= {name: Quality(margin=2).whole(name) for name in WHOLE if name not in NAMED}
DEFAULT = "balanced"
