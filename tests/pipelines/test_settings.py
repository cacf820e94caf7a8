"""Settings of a denoiser: what of its plain values stands in the code that computes it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import maskfx
from maskfx.ir.modules.callables import is_plain
from maskfx.ir.modules.module_settings import KnownSettings, Switches, settings_of
from tests.factories.pipelines import PIPES, call_of, distance, latents, pipe_of, white
from tests.factories.small_unets import sd


class Processor:
    """What attention calls, and no module."""

    def __init__(self, scale: float) -> None:
        self.scale, self.seen = scale, torch.ones(1)

    def __call__(self, x: Tensor) -> Tensor:
        return self.scale * x


def test_settings_are_the_plain_values_of_all_parts():
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    before = settings_of(module)
    module[0].weight.data.add_(1)
    assert settings_of(module) == before
    module[1].p = 0.2
    assert settings_of(module) != before
    before = settings_of(module)
    module[1]._disable_adapters = False
    switched = settings_of(module)
    module[1]._disable_adapters = True
    assert before != switched != settings_of(module)
    module[1]._active_adapter = ["one"]
    before = settings_of(module)
    module[1]._active_adapter = ["other"]
    assert settings_of(module) != before
    before = settings_of(module)
    module[1]._calls, module[1]._kept = 7, {"a": 1}  # bookkeeping
    assert settings_of(module) == before
    assert is_plain({"default": 0.5})
    assert not is_plain({"default": torch.ones(1)})


def test_what_parts_call_counts_among_their_settings():
    module: Any = nn.Sequential(nn.Linear(2, 2))
    found = []
    for called in (Processor(1.0), Processor(2.0), functional.relu, functional.gelu):
        module[0].processor = called
        found.append(settings_of(module))
    assert len(set(found)) == 4
    module[0].processor = table = Processor(1.0)
    table.seen = None  # type: ignore[assignment]
    assert settings_of(module) == found[0]


def scaled(by: float) -> Callable[..., Any]:
    return lambda module, given, result: result * by


def test_functions_of_one_name_differ_by_their_code_and_what_they_refer_to():
    module: Any = nn.Sequential(nn.Linear(2, 2))
    found = []
    for called in (
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x.sin(),
        lambda x: x.cos(),
        lambda x, by=1: x + by,
        lambda x, by=2: x + by,
        scaled(1.0),
        scaled(2.0),
        partial(scaled(2.0), 1),
        partial(scaled(2.0), 2),
        partial(scaled(3.0), 2),
    ):
        module[0].forward = called
        found.append(settings_of(module))
    assert len(set(found)) == len(found)
    module[0].forward = scaled(1.0)
    assert settings_of(module) == found[6]


def test_what_a_function_notes_of_its_calls_is_no_setting():
    module, seen = nn.Sequential(nn.Linear(2, 2)), list[int]()
    module[0].register_forward_hook(lambda *_: seen.append(1))
    before = settings_of(module)
    module(torch.ones(1, 2))
    assert seen
    assert settings_of(module) == before


def test_hooks_are_settings():
    module: Any = nn.Sequential(nn.Linear(2, 2))
    known, before = KnownSettings(module), settings_of(module)
    seen = [before]
    for hook in (scaled(1.0), scaled(2.0)):
        handle = module[0].register_forward_hook(hook)
        seen.append(known.digest())
        handle.remove()
        assert known.digest() == before
    handle = module[0].register_forward_pre_hook(lambda *_: None)
    seen.append(known.digest())
    handle.remove()
    assert len(set(seen)) == 4


def test_the_modules_own_hooks_are_no_settings():
    module: Any = nn.Sequential(nn.Linear(2, 2))
    known, before = KnownSettings(module), settings_of(module)
    module.register_forward_hook(print)
    assert settings_of(module) == known.digest() == before


def test_known_settings_are_digested_again_when_a_value_changes(monkeypatch: pytest.MonkeyPatch):
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    module[0].processor, module[1].names, module[1].table = Processor(1.0), ["one"], None
    module[1]._active, module[1]._kind, module[1].whole = [], None, 1
    known, digests = KnownSettings(module), []

    def counted(given: nn.Module) -> str:
        digests.append(given)
        return settings_of(given)

    monkeypatch.setattr("maskfx.ir.modules.module_settings.settings_of", counted)
    changes: list[Callable[[], object]] = [
        lambda: setattr(module[1], "p", 0.2),
        lambda: module[1].names.append("two"),
        lambda: setattr(module[1], "_disable_adapters", True),
        lambda: setattr(module[1], "_active", ["one"]),
        lambda: setattr(module[1], "_kind", "other"),
        lambda: setattr(module[1], "whole", True),  # which equals the 1 that it was
        lambda: setattr(module[0].processor, "scale", 3.0),
        lambda: setattr(module[0], "processor", functional.relu),
        lambda: setattr(module[1], "table", torch.ones(3)),
        lambda: setattr(module[1], "p", torch.ones(3)),  # in place of a number
        lambda: module[1].register_forward_hook(print),
        lambda: module[1].register_forward_pre_hook(print),
        lambda: module[1]._forward_hooks.clear(),
        lambda: module.append(nn.Identity()),
        lambda: module.train(not module.training),
    ]
    for number, change in enumerate(changes, 1):
        for _ in range(3):
            assert known.digest() == settings_of(module)
        assert len(digests) == number
        change()
    assert known.digest() == settings_of(module)


def test_switches_are_restored():
    module: Any = nn.Sequential(nn.Linear(2, 2))
    module[0].enabled = True
    switches = Switches(module)
    assert not switches.changed()
    module[0].enabled = False
    assert switches.changed()
    with switches.restored():
        assert module[0].enabled
    assert not module[0].enabled


def test_a_call_that_fails_leaves_the_settings_of_before():
    """Pipelines restore what they replace at the end of a call alone."""
    name = "StableDiffusionPAGInpaintPipeline"
    pipe = maskfx.compile(pipe_of(name, sd), mode="patch_batch")
    before = dict(pipe.unet.attn_processors)

    def fail(*_: object) -> None:
        assert dict(pipe.unet.attn_processors) != before
        raise RuntimeError("the caller stops")

    given = call_of(PIPES[name], 0, white(), pag_scale=3.0, strength=1.0)
    with pytest.raises(RuntimeError, match="the caller stops"):
        pipe(**given, callback_on_step_end=fail)
    assert dict(pipe.unet.attn_processors) == before


@pytest.mark.slow
def test_attention_that_one_call_replaces_is_not_that_of_the_next():
    """Perturbed attention alone has the batch of guidance alone."""
    name = "StableDiffusionPAGInpaintPipeline"
    own, pipe = pipe_of(name, sd), maskfx.compile(pipe_of(name, sd), quality="all-steps")
    for guidance, pag in ((1.0, 3.0), (7.5, 0.0), (1.0, 3.0)):
        given = {"guidance_scale": guidance, "pag_scale": pag, "strength": 1.0}
        found, wanted = (
            latents(one, **call_of(PIPES[name], 0, white(), **given)) for one in (pipe, own)
        )
        assert distance(found, wanted) < 1e-4, (guidance, pag)


INPAINT = "StableDiffusionInpaintPipeline"


def inpainting() -> Any:
    return pipe_of(INPAINT, sd)


def agree(pipe: Any, own: Any, **more: Any) -> bool:
    """Whether an edit of the whole picture is the original pipeline's."""
    found, wanted = (
        latents(one, **call_of(PIPES[INPAINT], 0, white(), **more)) for one in (pipe, own)
    )
    return distance(found, wanted) < 1e-4


@pytest.mark.slow
def test_hooks_on_parts_act_in_edits():
    own, pipe = inpainting(), maskfx.compile(inpainting(), quality="all-steps")
    assert agree(pipe, own)
    for by in (0.5, 0.9):  # after the first edit captured the denoiser
        handles = [one.unet.mid_block.register_forward_hook(scaled(by)) for one in (pipe, own)]
        assert agree(pipe, own)
        for handle in handles:
            handle.remove()
    assert agree(pipe, own)


@pytest.mark.slow
def test_hooks_on_a_denoiser_act_once():
    own, pipe = inpainting(), maskfx.compile(inpainting(), quality="all-steps")
    for one in (pipe, own):
        one.unet.register_forward_hook(lambda module, given, result: (result[0] * 0.9,))
    assert agree(pipe, own)


class Halved:
    """Attention as it was, halved."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 0.5 * self.own(*args, **kwargs)


def halve_attention(unet: Any) -> None:
    unet.set_attn_processor({n: Halved(p) for n, p in unet.attn_processors.items()})


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda unet: setattr(unet.mid_block.resnets[0], "output_scale_factor", 2.0),
        lambda unet: unet.mid_block.register_forward_hook(scaled(0.5)),
        halve_attention,
    ],
)
def test_what_a_callback_sets_acts_from_the_next_step_on(change: Callable[[Any], object]):
    own, pipe = inpainting(), maskfx.compile(inpainting(), quality="all-steps")

    def ended(one: Any, step: int, time: object, given: Any) -> dict[str, Any]:
        if step == 1:
            change(one.unet)
        return {}

    assert agree(pipe, own)
    for _ in range(2):  # the second run has it from the start
        assert agree(pipe, own, callback_on_step_end=ended, num_inference_steps=4)
    assert "unet: a setting of it changes during the run" in maskfx.explain(pipe)
