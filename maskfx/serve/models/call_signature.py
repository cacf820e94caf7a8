"""The arguments that a pipeline's call accepts, and the mapping of a request's parameters to them.

A parameter that the pipeline has no argument for is refused, never dropped.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard, TypeVar

from maskfx.errors import InputError
from maskfx.serve.controls import (
    Chosen,
    check_controls,
    check_modes,
    check_range,
    check_scales,
    nets_in,
)
from maskfx.serve.errors import ApiError
from maskfx.serve.request import Parameter, Request, parameters_of

# A call may have two guidance arguments; the one that is enabled by default has the effect.
GUIDANCE = ("guidance_scale", "true_cfg_scale")
SCALE, MODE = "controlnet_conditioning_scale", "control_mode"
SCALES = (SCALE, "adapter_conditioning_scale")  # of ControlNets, and of T2I-Adapters
CONTROL = "control_image"
CALLBACK = "callback_on_step_end"
TENSORS = "callback_on_step_end_tensor_inputs"
LONGEST = 100  # letters of a ControlNet's name
T = TypeVar("T")
NOTHING: Mapping[str, object] = {}
# Arguments that the server sets on each call; a model's folder can't set them.
OURS = frozenset(
    {
        *("prompt", "image", "mask_image", CONTROL, "generator", "latents"),
        *("ip_adapter_image", "ip_adapter_image_embeds"),
        *("height", "width", "max_area", "num_images_per_prompt", "output_type", "return_dict"),
        "padding_mask_crop",
        *(CALLBACK, TENSORS),
    }
)


@dataclass(frozen=True)
class CallSignature:
    """The arguments of a pipeline's call, with the model's defaults, else those of the class."""

    defaults: Mapping[str, object]
    told: Mapping[str, object] = field(default_factory=dict)  # values from the model's folder
    usual: Mapping[str, object] = field(default_factory=dict)  # defaults of the pipeline class
    # ControlNets or T2I-Adapters that get lists of images; None: one gets an image
    nets: int | None = None
    names: tuple[str, ...] = ()  # of these
    grey: tuple[bool, ...] = ()  # whether each takes images of one channel
    kinds: int | None = None  # of control images that its ControlNet distinguishes
    union: bool = False  # whether the ControlNet takes images of several kinds at once
    typed: bool = False  # whether each of its ControlNets could take several kinds

    @classmethod
    def of(cls, pipe: object, told: Mapping[str, object] = NOTHING) -> CallSignature:
        """Read a pipeline's signature.

        `told` has the model's call arguments (`maskfx/pipelines/call_defaults.py`); names that the
        call doesn't have are ignored.
        """
        call = getattr(type(pipe), "maskfx_original", type(pipe)).__call__
        parameters = list(inspect.signature(call).parameters.items())[1:]  # without the pipeline
        defaults = {name: each.default for name, each in parameters}
        own = {name: value for name, value in told.items() if name in defaults}
        found = cls(defaults | own, own, defaults)
        if found.control_argument is None:
            return found
        net = getattr(pipe, "controlnet" if found.scaling in (None, SCALE) else "adapter", None)
        nets = getattr(net, "nets", getattr(net, "adapters", None))
        each = [] if net is None else [net] if nets is None else [*nets]
        config = getattr(next(iter(each), None), "config", None)
        found = replace(
            found,
            nets=None if nets is None else len(each),
            names=() if found.scaling is None else names_of(each),
            grey=tuple(takes_one_channel(one) for one in each),
        )
        if MODE not in defaults:
            return found
        several = getattr(config, "num_control_type", None)
        kinds = several or getattr(config, "num_mode", None)
        typed = several is not None
        return replace(found, kinds=kinds, union=typed and nets is None, typed=typed)

    def check_told(self, where: str) -> None:
        """Raise InputError if the model's folder has an invalid value for an argument."""
        for name, value in self.told.items():
            if wanted := wanted_instead(name, value, self.usual.get(name)):
                raise InputError(f"{where}: {name} is {value!r}; give {wanted}")

    def has(self, name: str) -> bool:
        return name in self.defaults

    @property
    def scaling(self) -> str | None:
        """The argument with the strength of ControlNets or T2I-Adapters; None if there is none."""
        return next(filter(self.has, SCALES), None)

    @property
    def control_argument(self) -> str | None:
        """The argument that takes control images; None if there is none.

        A call with such a strength and no other argument for them takes them as `image`.
        """
        if self.has(CONTROL):
            return CONTROL
        edits = self.has("strength") or self.has("mask_image")
        return "image" if self.has("image") and self.scaling is not None and not edits else None

    @property
    def takes_picture(self) -> bool:
        """Whether `image` is a picture to edit, or one to begin with."""
        return self.has("image") and self.control_argument != "image"

    def number(self, name: str) -> float | None:
        """Return an argument's default if it is a number, else None."""
        value = self.defaults.get(name)
        return float(value) if is_number(value) else None

    @property
    def guidance(self) -> str | None:
        """The name of the guidance argument that has an effect; None if there is none."""
        there = [name for name in GUIDANCE if self.has(name)]
        acting = [name for name in there if (self.number(name) or 0.0) > 1]
        return next(iter([*acting, *there]), None)

    @property
    def negates(self) -> bool:
        """Whether a negative prompt has any effect.

        It has none if it depends on a second guidance argument that is disabled by default.
        """
        other = [n for n in GUIDANCE if self.has(n) and n != self.guidance]
        off = any(n == "true_cfg_scale" and (self.number(n) or 0.0) <= 1 for n in other)
        return self.has("negative_prompt") and not off

    @property
    def calls_back(self) -> bool:
        """Whether the call has a step callback that receives the latents."""
        return self.has(CALLBACK) and self.has(TENSORS)

    def argument(self, parameter: Parameter) -> str | None:
        """Return the argument that a parameter sets; None if it has no effect on the call."""
        if parameter.name == GUIDANCE[0]:
            return self.guidance
        if parameter.name == SCALE:
            return None if self.control_argument is None else self.scaling
        there = self.negates if parameter.name == "negative_prompt" else self.has(parameter.name)
        if parameter.name == MODE:
            there = self.kinds is not None
        return parameter.name if parameter.argument and there else None

    @property
    def controls(self) -> int:
        """The number of control images of a call that takes any and names no kinds."""
        known = self.defaults.get(MODE)
        return len(known) if self.union and isinstance(known, list) else self.nets or 1

    def used(self, request: Request) -> int:
        """Return the number of control images that a request needs."""
        if self.union and request.control_mode is not None:
            return len(request.control_mode)
        return self.controls if request.nets is None else len(self.chosen(request.nets))

    def mode(self, request: Request | None) -> int | list[int] | None:
        """Return the value of `control_mode`; None for the pipeline's default.

        Without a request that of a warm-up: the first kind, unless the model's folder has another.
        """
        sent = [0] * self.controls if request is None else request.control_mode
        if self.kinds is None or sent is None or (request is None and self.told.get(MODE)):
            return None
        if request is not None and request.nets is not None:  # nets that aren't used get the first
            given = dict(zip((name for name, _ in self.chosen(request.nets)), sent, strict=True))
            sent = [given.get(name, 0) for name in self.names]
        return sent[0] if self.nets is None and len(sent) == 1 else list(sent)

    def control(
        self, images: Sequence[T], nets: str | None = None, blank: T | None = None
    ) -> object:
        """Return the value of `control_argument` for the images of the chosen nets.

        Others get `blank`; their scale is 0.
        """
        if nets is not None:
            assert blank is not None, "a net that isn't used gets an image"
            given = dict(zip((name for name, _ in self.chosen(nets)), images, strict=True))
            images = [given.get(name, blank) for name in self.names]
        alone = self.nets is None and len(images) == 1
        return images[0] if alone else list(images)

    def chosen(self, nets: str | None) -> Chosen:
        """Return the nets that the field `controlnet` chooses, with the scales in it."""
        return nets_in(nets, self.names)

    def scale(self, request: Request) -> float | list[float] | None:
        """Return the value of `scaling`; None for the pipeline's default.

        One scale is for all nets; those that aren't chosen get 0, and ControlNets among them aren't
        computed.
        """
        sent, scales = request.control_scale, list[float]()
        if request.nets is None:
            if sent is None:
                return self.default_scale()
            scales = [*sent] * self.used(request) if len(sent) == 1 else [*sent]
        else:
            found = self.chosen(request.nets)
            usual = [*(sent or [self.usual_scale()])]
            usual = usual * len(found) if len(usual) == 1 else usual
            pairs = zip(found, usual, strict=True)
            given = {name: other if own is None else own for (name, own), other in pairs}
            scales = [given.get(name, 0.0) for name in self.names]
        return scales[0] if self.nets is None and len(scales) == 1 else scales

    def default_scale(self) -> list[float] | None:
        """Return one scale for each of several T2I-Adapters, which accept no single one."""
        if self.nets is None or self.scaling in (None, SCALE):
            return None
        return [self.usual_scale()] * self.nets

    def usual_scale(self) -> float:
        found = None if self.scaling is None else self.number(self.scaling)
        return 1.0 if found is None else found

    def guides(self, request: Request) -> bool:
        """Whether a request is guided away from its negative prompt."""
        usual = None if self.guidance is None else self.number(self.guidance)
        return ((usual if request.guidance is None else request.guidance) or 0.0) > 1

    def takes(self) -> set[str]:
        """Return the supported parameters, by the names of the fields of `Request`."""
        named = {
            "seed": self.has("generator"),
            "size": self.has("height") and self.has("width"),
            "control": self.control_argument is not None,
            "nets": bool(self.names),
        }
        found = {name for name, one in parameters_of().items() if self.argument(one) is not None}
        return found | {name for name, there in named.items() if there}

    def check(self, request: Request, controls: int) -> None:
        """Raise ApiError for unsupported parameters and for a wrong number of control images."""
        for parameter, _ in arguments_in(request):
            if self.argument(parameter) is None:
                raise refused(parameter.name)
        if request.nets is not None and not self.names:
            raise refused("controlnet")
        used = self.used(request)
        if self.control_argument is not None:
            check_controls(controls, used)
        elif controls:
            raise refused("control_image")
        check_scales(request.control_scale, used)
        check_range(request.control_start, request.control_end)
        if request.guess_mode and self.typed and self.guides(request):
            # diffusers passes the samples of one branch and the kinds of both
            raise ApiError(
                "unsupported_parameter",
                "diffusers can't run guess_mode with a ControlNet that takes several kinds of "
                "images at once in a guided request; leave guess_mode out, or send "
                "guidance_scale=1.",
                param="guess_mode",
            )
        if self.kinds is not None and controls:
            check_modes(request.control_mode, self.defaults.get(MODE), self.kinds, used, self.union)

    def arguments(self, request: Request) -> dict[str, object]:
        """Return the call arguments for text and numbers; others keep their defaults."""
        found = dict(self.told)
        for parameter, value in arguments_in(request):
            found[self.argument(parameter) or parameter.name] = value
        found |= {
            name: value
            for name, value in ((self.scaling, self.scale(request)), (MODE, self.mode(request)))
            if name is not None and value is not None
        }
        # true_cfg_scale guides away from the negative prompt and has no effect without one
        if "true_cfg_scale" in found and self.negates:
            found.setdefault("negative_prompt", "")
        return found


def arguments_in(request: Request) -> Iterator[tuple[Parameter, object]]:
    """Yield the parameters of a pipeline's call that the request sets, and their values."""
    for name, parameter in parameters_of(type(request)).items():
        value = getattr(request, name)
        if parameter.argument and value is not None:
            yield parameter, value


def names_of(nets: Iterable[object]) -> tuple[str, ...]:
    """Return the names of ControlNets: those of the folders or repositories they were loaded from.

    A name that comes again gets a number.
    """
    found: list[str] = []
    for net in nets:
        source = str(getattr(getattr(net, "config", None), "_name_or_path", "") or "controlnet")
        name = re.sub(r"[^A-Za-z0-9._-]", "-", source.rstrip("/").rpartition("/")[2]).lstrip("._-")
        name = (name or "controlnet")[:LONGEST]
        again = sum(one == name or one.startswith(f"{name}-") for one in found)
        found.append(f"{name}-{again + 1}" if name in found else name)
    return tuple(found)


def takes_one_channel(net: object) -> bool:
    """Whether a T2I-Adapter takes images of one channel, as those for edges may."""
    return getattr(getattr(net, "config", None), "in_channels", None) == 1


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def wanted_instead(name: str, value: object, usual: object) -> str | None:
    """Return a description of valid values if `value` is invalid for the argument, else None.

    `usual` is the class's default; its type determines the valid type.
    """
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
    return ApiError(
        "unsupported_parameter", f"This model doesn't take {param}; leave it out.", param=param
    )
