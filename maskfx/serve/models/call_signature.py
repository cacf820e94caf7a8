"""What a pipeline's call takes, read off its signature, and a job's wishes under those names.

A wish that a pipeline has no argument for is refused; nothing is dropped on the way.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from maskfx.errors import InputError
from maskfx.serve.errors import ApiError
from maskfx.serve.messages import Job

# A call may have two numbers for guidance; the one that is on by itself is the one that acts.
GUIDANCE = ("guidance_scale", "true_cfg_scale")
CALLBACK = "callback_on_step_end"
TENSORS = "callback_on_step_end_tensor_inputs"
NOTHING: Mapping[str, Any] = {}
# What a server tells each call by itself, so that no model's folder can.
OURS = frozenset(
    {
        *("prompt", "image", "mask_image", "control_image", "generator", "latents"),
        *("height", "width", "max_area", "num_images_per_prompt", "output_type", "return_dict"),
        "padding_mask_crop",
        *(CALLBACK, TENSORS),
    }
)


@dataclass(frozen=True)
class CallSignature:
    """The arguments of a pipeline's call and their defaults: the model's own, else the class's."""

    defaults: Mapping[str, Any]
    told: Mapping[str, Any] = field(default_factory=dict)  # by the model, of these arguments
    usual: Mapping[str, Any] = field(default_factory=dict)  # the class's own

    @classmethod
    def of(cls, pipe: Any, told: Mapping[str, Any] = NOTHING) -> CallSignature:
        """told: what the model has for its calls (`maskfx/pipelines/call_defaults.py`)."""
        call = getattr(type(pipe), "maskfx_original", type(pipe)).__call__
        parameters = inspect.signature(call).parameters
        defaults = {name: each.default for name, each in parameters.items() if name != "self"}
        own = {name: value for name, value in told.items() if name in defaults}
        return cls(defaults | own, own, defaults)

    def check_told(self, where: str) -> None:
        """InputError where the model says of an argument what it can't be."""
        for name, value in self.told.items():
            if wanted := wanted_instead(name, value, self.usual.get(name)):
                raise InputError(f"{where}: {name} is {value!r}; give {wanted}")

    def has(self, name: str) -> bool:
        return name in self.defaults

    def number(self, name: str) -> float | None:
        """An argument's default, if it is a number."""
        value = self.defaults.get(name)
        return float(value) if is_number(value) else None

    @property
    def guidance(self) -> str | None:
        """The argument that says how much the prompt weighs."""
        there = [name for name in GUIDANCE if self.has(name)]
        acting = [name for name in there if (self.number(name) or 0.0) > 1]
        return next(iter([*acting, *there]), None)

    @property
    def negates(self) -> bool:
        """Has a negative prompt any effect?

        Not where a second number for guidance, which is off by itself, would have to be on.
        """
        other = [n for n in GUIDANCE if self.has(n) and n != self.guidance]
        off = any(n == "true_cfg_scale" and (self.number(n) or 0.0) <= 1 for n in other)
        return self.has("negative_prompt") and not off

    @property
    def calls_back(self) -> bool:
        """Is one told of each step, with its latents?"""
        return self.has(CALLBACK) and self.has(TENSORS)

    def takes(self) -> set[str]:
        """The wishes that can be met, by the names that jobs have for them."""
        named = {
            "steps": self.has("num_inference_steps"),
            "seed": self.has("generator"),
            "size": self.has("height") and self.has("width"),
            "strength": self.has("strength"),
            "guidance": self.guidance is not None,
            "negative_prompt": self.negates,
            "control": self.has("control_image"),
        }
        return {"prompt"} | {name for name, there in named.items() if there}

    def check(self, job: Job, controlled: bool) -> None:
        """Refuse wishes that nothing here would hear."""
        takes = self.takes()
        for name in ("steps", "guidance", "strength", "negative_prompt"):
            if getattr(job, name) is not None and name not in takes:
                raise refused(name)
        if controlled and "control" not in takes:
            raise refused("control_image")
        if "control" in takes and not controlled:
            raise ApiError(
                "missing_parameter",
                "This model needs a control image; send one as control_image.",
                param="control_image",
            )

    def arguments(self, job: Job) -> dict[str, Any]:
        """The job's text and numbers; what it doesn't say is the model's own affair."""
        found: dict[str, Any] = {**self.told, "prompt": job.prompt}
        if job.steps is not None:
            found["num_inference_steps"] = job.steps
        if job.strength is not None:
            found["strength"] = job.strength
        if job.negative_prompt is not None:
            found["negative_prompt"] = job.negative_prompt
        if job.guidance is not None and self.guidance is not None:
            found[self.guidance] = job.guidance
        # this kind of guidance is away from the negative prompt and off without one
        if "true_cfg_scale" in found and self.negates:
            found.setdefault("negative_prompt", "")
        return found


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def wanted_instead(name: str, value: Any, usual: Any) -> str | None:
    """What an argument with this default could be, if not this value."""
    if name == "num_inference_steps":
        return None if type(value) is int and value > 0 else "a whole number, 1 or more"
    if name == "strength":
        return None if is_number(value) and 0 < value <= 1 else "a number above 0, up to 1"
    if isinstance(usual, bool):
        return None if isinstance(value, bool) else "true or false"
    if is_number(usual):
        return None if is_number(value) else "a number"
    return "a text" if isinstance(usual, str) and not isinstance(value, str) else None


def refused(param: str) -> ApiError:
    public = {"steps": "num_inference_steps", "guidance": "guidance_scale"}.get(param, param)
    return ApiError(
        "unsupported_parameter", f"This model doesn't take {public}; leave it out.", param=public
    )
