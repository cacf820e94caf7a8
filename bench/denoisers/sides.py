"""The sides of the contest: the denoiser as diffusers runs it, as PyTorch compiles it, and ours."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import maskfx
from bench import masks
from bench.harness import describe
from bench.shapes import Inputs, Shape
from maskfx import CompiledDenoiser, EditStep, StepCache

DENSE = (
    "dense",
    "dense-channels-last",
    "dense-compile",
    "dense-compile-channels-last",
    "dense-freezing",
)
OURS = ("ours-eager", "ours-inductor", "ours-prepack")
GROUPS = {"dense": ("dense",), "all-dense": DENSE, "ours": OURS, "all": (*DENSE, *OURS)}

Dense = Callable[[Inputs], Tensor]


def read_sides(text: str) -> tuple[str, ...]:
    """Names and groups, separated by commas; a leading minus takes one away."""
    chosen: list[str] = []
    for word in text.split(","):
        name = word.strip()
        drop = name.startswith("-")
        name = name.removeprefix("-")
        if name not in GROUPS and name not in GROUPS["all"]:
            known = ", ".join([*GROUPS["all"], "all-dense", "ours", "all"])
            raise ValueError(f"--sides: {name!r} is none of {known}")
        if drop and not chosen:
            chosen = list(GROUPS["all"])
        members = GROUPS.get(name, (name,))
        chosen = [c for c in chosen if c not in members] if drop else [*chosen, *members]
    return tuple(side for side in GROUPS["all"] if side in chosen)


@dataclass
class Contest:
    """One denoiser, its sides, and the steps that they run on."""

    shape: Shape
    module: nn.Module
    steps: list[Inputs]
    dense: dict[str, Dense] = field(default_factory=dict)
    ours: dict[str, CompiledDenoiser] = field(default_factory=dict)
    caches: dict[str, list[StepCache]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    counting: CompiledDenoiser | None = None

    def expected(self, inputs: Inputs) -> Tensor:
        """What diffusers computes."""
        with torch.no_grad():
            output: Tensor = self.module(**inputs)[0]
        return output

    def run_dense(self, side: str, index: int) -> Tensor:
        return self.dense[side](self.steps[index % len(self.steps)])

    def edit_steps(self, side: str, grid: Tensor) -> list[EditStep]:
        """An edit of each step, from its recording."""
        mask = self.shape.as_mask(grid)
        pairs = zip(self.steps, self.caches[side], strict=True)
        return [EditStep(step, mask, cache) for step, cache in pairs]

    def counting_denoiser(self) -> CompiledDenoiser:
        """One that runs eagerly, whose operators can be counted."""
        if self.counting is None:
            self.counting = self.ours.get("ours-eager") or maskfx.compile(self.module)
        return self.counting

    def edit(self, side: str, step: EditStep) -> Tensor:
        output: Tensor = self.ours[side].edit([step])[0][0]
        return output


def text_of(steps: list[Inputs]) -> list[Inputs]:
    """Steps of one request: latents and timesteps differ, the other tensors are the same ones."""
    changing = ("sample", "hidden_states", "timestep")
    return [{**steps[0], **{k: v for k, v in s.items() if k in changing}} for s in steps]


def prepare(
    shape: Shape, sides: Iterable[str], say: Callable[[str], None], module: nn.Module | None = None
) -> Contest:
    """Build, compile and warm up every side; one that fails is noted and left out."""
    torch._dynamo.config.recompile_limit = 64
    module = module or shape.build()
    contest = Contest(shape, module, text_of([shape.inputs(seed) for seed in (0, 1)]))
    laid: list[nn.Module] = []  # the channels-last copy, made when it is needed
    for side in sides:
        say(f"preparing {side}")
        try:
            if side in OURS:
                add_ours(contest, side)
            elif shape.has_convolutions or not side.endswith("channels-last"):
                add_dense(contest, side, laid)
        except Exception as error:  # a side that fails is a result, not the end of the run
            contest.failures[side] = describe(error)
            say(f"{side} failed: {contest.failures[side]}")
    return contest


def add_dense(contest: Contest, side: str, laid: list[nn.Module]) -> None:
    """A dense side, warmed up. Freezing starts from the layout that suits the denoiser."""
    module: nn.Module = contest.module
    last = side.endswith("channels-last") or (
        side == "dense-freezing" and contest.shape.has_convolutions
    )
    if last:
        if not laid:
            copied = copy.deepcopy(module)
            laid.append(copied.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
        module = laid[0]
    call: Callable[..., tuple[Tensor, ...]] = module
    if side.startswith("dense-compile"):
        call = torch.compile(module, dynamic=False)
    elif side == "dense-freezing":
        call = torch.compile(module, dynamic=False, options={"freezing": True})

    def run(inputs: Inputs) -> Tensor:
        if last:
            latent = inputs["sample"].contiguous(memory_format=torch.channels_last)
            inputs = {**inputs, "sample": latent}
        with torch.no_grad():
            return call(**inputs)[0]

    for step in contest.steps:
        run(step)
    contest.dense[side] = run


def add_ours(contest: Contest, side: str) -> None:
    """A side of ours, with recordings of the steps: one set for all sides of one program."""
    compiled = side != "ours-eager"
    denoiser = maskfx.compile(contest.module, inductor=compiled, prepack=side == "ours-prepack")
    caches = [denoiser.record(**step)[1] for step in contest.steps]
    if not denoiser.programs:
        raise RuntimeError(f"nothing was narrowed: {denoiser.compilations[0].reasons}")
    for known in contest.caches.values():
        if known[0].program == caches[0].program:
            caches = known
    size = contest.shape.size
    mask = contest.shape.as_mask(masks.make("square", size.height, size.width, 0.2))
    denoiser.edit(
        [EditStep(contest.steps[0], mask, caches[0])]
    )  # compiles, and fails here if at all
    contest.ours[side], contest.caches[side] = denoiser, caches


def blank(cache: StepCache) -> StepCache:
    """The same recording without its output: an edit can't pass by handing that back."""
    empty = [torch.full_like(o, torch.nan) if isinstance(o, Tensor) else o for o in cache.output]
    return dataclasses.replace(cache, output=empty)


def relative_error(seen: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest value; NaN counts as infinitely wrong."""
    difference = float((seen - wanted).abs().max() / wanted.abs().max())
    return difference if difference == difference else float("inf")
