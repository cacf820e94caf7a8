"""Autoencoders: `encode` and `decode` of a pipeline's VAE as modules that the compiler can narrow.

A template holds recordings of these calls too. A later call computes the sites where its input
differs from the recorded one, and some around them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from maskfx.errors import CacheError
from maskfx.pipelines.call_policy import CallPosition
from maskfx.pipelines.deferred import force_all, pending_in
from maskfx.pipelines.encoder_cache import EncoderCache
from maskfx.pipelines.handlers.call_handler import CallHandler, CallPart
from maskfx.pipelines.masks.masks import grown
from maskfx.pipelines.parts.stand_in import MethodCall, installed, is_denoiser, is_hooked
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.hardware.offload import whole_hook
from maskfx.runtime.steps import EditStep, RecordStep

METHODS = ("encode", "decode")
INPUT = "sample"  # the argument of AutoencoderMethod
MARGIN = 1  # latent sites around a changed part of a picture that `encode` computes too
MOST = 0.6  # share of changed sites from which all sites are computed: rows cost more than gains
CLOSE = 1e-5  # inputs that differ by less, relative to the largest, are the same
SWITCHES = ("use_tiling", "use_slicing")  # those of autoencoders that compute a picture in parts


@dataclass(frozen=True)
class OutputForm:
    """How the result of a method holds its tensor: `kind(field=inner(tensor))`."""

    kind: type
    field: str
    inner: type | None = None

    @classmethod
    def of(cls, output: Mapping[str, object]) -> OutputForm:
        """Return the form of a result that holds one tensor, or a distribution made of one."""
        [(name, value)] = output.items()
        return cls(type(output), name, None if isinstance(value, Tensor) else type(value))

    def tensor(self, output: object) -> Tensor:
        value = getattr(output, self.field)
        found: Tensor = value if self.inner is None else value.parameters
        return found

    def built(self, tensor: Tensor, as_object: bool) -> Any:
        """Return the tensor as the method returns it: an object, or a tuple."""
        value = tensor if self.inner is None else self.inner(tensor)
        return self.kind(**{self.field: value}) if as_object else (value,)


class AutoencoderMethod(nn.Module):
    """One method of an autoencoder as a module from a tensor to a tensor."""

    def __init__(self, autoencoder: nn.Module, method: str) -> None:
        super().__init__()
        self.autoencoder, self.method = autoencoder, method
        self.form: OutputForm | None = None  # known after the first run

    def forward(self, sample: Tensor) -> Tensor:
        run: Callable[..., Any] = getattr(type(self.autoencoder), self.method)
        output = run(self.autoencoder, sample)
        self.form = OutputForm.of(output)
        return self.form.tensor(output)

    def place(self) -> object:
        """Return what changes when the weights are moved or converted."""
        first = next(self.autoencoder.parameters(), None)
        return None if first is None else (first.data_ptr(), first.dtype, first.device)

    def refusal(self, began: object) -> str | None:
        """Return why its calls can't be narrowed now; None if they can.

        `began` is the `place` at the beginning of the run. Where a pipeline converts or moves the
        autoencoder for each call, every call would be captured anew.
        """
        if is_hooked(self.autoencoder) or whole_hook(self.autoencoder) is not None:
            return "hooks act on it or its parts (offloading?)"
        for switch in SWITCHES:
            if getattr(self.autoencoder, switch, False):
                return f"{switch} is on"
        moved = self.place() != began
        return "its weights were moved or converted since the run began" if moved else None


def find_methods(components: Mapping[str, object]) -> dict[str, AutoencoderMethod]:
    """Return the methods of a pipeline's autoencoders by name, such as `vae.decode`.

    A method that was replaced on the object, not by a stand-in, isn't the autoencoder's own.
    """
    return {
        f"{name}.{method}": AutoencoderMethod(part, method)
        for name, part in components.items()
        if isinstance(part, nn.Module)
        and not is_denoiser(part)
        and all(callable(getattr(type(part), method, None)) for method in METHODS)
        for method in METHODS
        if method not in vars(part) or installed(part, method) is not None
    }


def input_of(arguments: Mapping[str, object]) -> Tensor | None:
    """Return the input of a call; None if other arguments matter too, or it is no picture."""
    values = dict(arguments)
    values.pop("return_dict", None)
    sample = values.pop(next(iter(values), ""), None)
    plain = all(v is None or isinstance(v, torch.Generator) for v in values.values())
    return sample if plain and isinstance(sample, Tensor) and sample.dim() == 4 else None


def edit_of(cache: StepCache, inputs: Mapping[str, Any]) -> EditStep | None:
    """Return the edit of a recorded call at the sites where the input differs from the recorded.

    None if the input isn't comparable, or most of it differs.
    """
    sample: Tensor = inputs[INPUT]
    [recorded] = cache.given or [None]
    [output] = cache.output
    if not isinstance(recorded, Tensor) or recorded.shape != sample.shape:
        return None
    recorded = recorded.to(sample)
    apart = (sample - recorded).abs().amax((0, 1))
    mask = (apart > CLOSE * recorded.abs().max()).cpu()
    finer = sample.shape[-1] // output.shape[-1]  # sites of the input by one of the latent
    mask = grown(mask, MARGIN * finer if finer > 1 else 0)
    if mask.float().mean() > MOST:
        return None
    return EditStep(inputs, mask, cache, any_step=True)


@dataclass
class AutoencoderCalls:
    """The calls of autoencoders and encoders in one run, in the request's thread, at once.

    Args:
        methods: The compiled methods by name.
        handler: Chooses what a call becomes.
        notes: Receives the calls that can't be narrowed, for `explain()`.
        encoders: Keeps outputs of encoders; None where nothing is kept.
    """

    methods: Mapping[str, CompiledDenoiser]
    handler: CallHandler
    notes: Counter[str]
    encoders: EncoderCache | None = None
    _counts: Counter[str] = field(default_factory=Counter)
    _places: dict[str, object] = field(default_factory=dict)  # of weights, as the run began

    def __post_init__(self) -> None:
        self._places = {name: method_of(one).place() for name, one in self.methods.items()}

    def codes(self, autoencoder: nn.Module, method: str) -> bool:
        """Return True if a call may be narrowed or recorded."""
        return self.handler.codes and self._name(autoencoder, method) is not None

    def code(self, autoencoder: nn.Module, method: str, call: MethodCall) -> object:
        """Return the result of a call that is narrowed or recorded; None for another one.

        A call's position is the number of the method's calls before it, at step 0. Its branch names
        the method too: both methods have the same weights, which the key of a recording holds.
        """
        name = self._name(autoencoder, method)
        if name is None or not self.handler.codes:
            return None
        position = CallPosition(name, 0, f"{method} {self._counts[name]}")
        self._counts[name] += 1
        given = force_all(call.arguments)
        sample, compiled = input_of(given), self.methods[name]
        module = method_of(compiled)
        why = module.refusal(self._places[name])
        if sample is None or why is not None:
            self.notes[f"{name}: {why or 'its arguments are others'}; it runs dense"] += 1
            return None
        step = self.handler.code(CallPart(position, compiled, {INPUT: sample}))
        if step is None:
            return None
        try:
            result = compiled.step([step])[0]
        except CacheError as error:
            self.notes[f"{name}: computed in full: {error}"] += 1
            return None
        if isinstance(step, RecordStep):
            result[1].given = [sample.clone()]
        output: Any = self.handler.take(position, result)
        if module.form is None:  # a saved program ran, and the module itself never did
            compiled.plain(**step.inputs)
        assert module.form is not None
        return module.form.built(output, bool(given.get("return_dict", True)))

    def kept(self, part: nn.Module, method: str, call: MethodCall) -> object:
        """Return an encoder's output, kept of an earlier call or new; None if none are kept."""
        if self.encoders is None or pending_in((call.args, call.kwargs)):
            return None

        def run(
            _: object, __: str, args: tuple[object, ...], kwargs: Mapping[str, object]
        ) -> object:
            return call.original(*args, **kwargs)

        return self.encoders.ask(run, part, method, call.args, call.kwargs)

    def _name(self, autoencoder: nn.Module, method: str) -> str | None:
        for name, compiled in self.methods.items():
            module = method_of(compiled)
            if module.autoencoder is autoencoder and module.method == method:
                return name
        return None


def method_of(compiled: CompiledDenoiser) -> AutoencoderMethod:
    assert isinstance(compiled.module, AutoencoderMethod)
    return compiled.module


def same_method(one: CompiledDenoiser, other: CompiledDenoiser) -> bool:
    first, second = method_of(one), method_of(other)
    return first.autoencoder is second.autoencoder and first.method == second.method
