"""The rooms of a compiled pipeline, one by one: masks, sites, names of templates, stand-ins."""

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import maskfx
from maskfx.config import Settings
from maskfx.errors import InputError, MaskError
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.digests import digest
from maskfx.pipelines.handlers.call_handler import DenseHandler, RecordHandler
from maskfx.pipelines.handlers.edit_handler import EditHandler
from maskfx.pipelines.handlers.template_reader import TemplateReader
from maskfx.pipelines.masks.mask_grids import MaskGrids, picture_part
from maskfx.pipelines.masks.masks import (
    alpha_of,
    as_numbers,
    grid_of,
    like_mask,
    margin_sites,
    overlay,
    pixel_masks,
)
from maskfx.pipelines.parts.stand_in import (
    MethodCall,
    find_denoisers,
    install,
    installed,
    is_hooked,
    remove,
    running,
)
from maskfx.pipelines.quality import Quality
from maskfx.pipelines.runs.interception import WatchedStep
from maskfx.pipelines.runs.run import PipelineRun
from maskfx.pipelines.state import PipelineState
from maskfx.pipelines.templates.recording_attempts import KNOWN
from maskfx.pipelines.templates.template_key import (
    PipelineFingerprint,
    recording_arguments,
    usual_guidance,
)
from maskfx.pipelines.templates.template_library import TemplateLibrary, TemplateSource
from maskfx.pipelines.waiting import Waiting, wait_uninterrupted
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.denoiser import CompiledDenoiser
from tests.factories.pipelines import PIPES, ddim

MASK = torch.zeros(6, 8, dtype=torch.bool)
MASK[1:3, 2:5] = True


# Masks.


@pytest.mark.parametrize(
    "given",
    [
        MASK,
        MASK.float(),
        MASK[None].float(),
        MASK[None, None].float(),
        (MASK * 255).to(torch.uint8),
        MASK.to(torch.uint8),
        MASK.numpy(),
        MASK.numpy().astype(np.uint8),
        MASK.numpy()[..., None].astype(np.float32),
        (MASK * 255).numpy().astype(np.uint8)[None, ..., None],
        Image.fromarray((MASK * 255).numpy().astype(np.uint8)),
        Image.fromarray((MASK * 255).numpy().astype(np.uint8)).convert("RGB"),
        [MASK],
    ],
)
def test_masks_of_every_kind(given: Any):
    [found] = pixel_masks(given)
    assert torch.equal(found, MASK)
    [white] = pixel_masks(like_mask(given, 1))
    [black] = pixel_masks(like_mask(given, 0))
    assert white.all()
    assert not black.any()


@pytest.mark.parametrize("given", ["mask", 3, torch.zeros(5), torch.zeros(0, 4), np.zeros(2)])
def test_what_is_no_mask_is_an_error(given: Any):
    with pytest.raises(MaskError, match="mask_image"):
        pixel_masks(given)


def test_masks_of_several_sizes_are_an_error():
    with pytest.raises(MaskError, match="masks of one size, got shapes"):
        pixel_masks([MASK, torch.ones(3, 3)])


def test_the_feather_is_inside():
    mask = torch.zeros(20, 20, dtype=torch.bool)
    mask[4:16, 4:16] = True
    alpha = alpha_of(mask, (20, 20), 3)[..., 0]
    assert (alpha[~mask.numpy()] == 0).all()
    assert (alpha[7:13, 7:13] == 1).all()
    assert (np.diff(alpha[10, 3:9]) >= 0).all()
    assert 0 < alpha[4, 10] < 1


def test_each_picture_has_its_own_original_and_mask():
    other = ~MASK
    new = torch.full((4, 3, 6, 8), 0.25)
    new[1, 0, 0, 0] = torch.nan
    old = torch.stack([torch.full((3, 6, 8), 0.5), torch.full((3, 6, 8), 0.75)])
    found = overlay(new, old, [MASK, other])
    assert (found[1][:, ~MASK] == 0.5).all()
    assert (found[1][:, MASK] == 0.25).all()
    assert (found[2][:, MASK] == 0.75).all()
    assert (found[2][:, ~MASK] == 0.25).all()


def test_an_original_of_linear_light_is_kept_as_it_is() -> None:
    """Numbers above 1 and a little below 0, as results of a high dynamic range have."""
    old = np.linspace(-0.02, 55.0, 16 * 16 * 3, dtype=np.float32).reshape(1, 16, 16, 3)
    mask = torch.zeros(16, 16, dtype=torch.bool)
    assert np.array_equal(overlay(np.zeros_like(old), list(old), [mask]), old)
    for least, most in ((-1.0, 1.0), (-1.04, 1.03), (-0.1, 1.0), (-1.0, -0.2)):
        signed = np.linspace(least, most, 16 * 16 * 3, dtype=np.float32).reshape(1, 16, 16, 3)
        found = overlay(np.zeros_like(signed), list(signed), [mask])
        assert np.allclose(found, signed / 2 + 0.5)


def test_pictures_of_one_sample_are_laid_over_theirs():
    new, old = (torch.full((3, 6, 8), value) for value in (0.25, 0.5))
    [[one, two]] = overlay([[new, new]], [[old, new]], [MASK])
    assert (one[:, ~MASK] == 0.5).all()
    assert (one[:, MASK] == 0.25).all()
    assert (two == 0.25).all()


def test_an_original_is_read_as_the_pipelines_read_it():
    value = torch.rand(3, 6, 8)
    shape = (6, 8, 3)
    wanted = value.permute(1, 2, 0).numpy()
    assert np.array_equal(as_numbers(value, shape, np.dtype(np.float32)), wanted)
    halved = as_numbers(value * 2 - 1, shape, np.dtype(np.float32))
    assert np.allclose(halved, wanted, atol=1e-6)
    whole = as_numbers(value, shape, np.dtype(np.uint8))
    assert np.array_equal(whole, np.rint(wanted * 255))
    assert as_numbers(value, (12, 16, 3), np.dtype(np.uint8)).shape == (12, 16, 3)


# Sites.


def test_grids_of_square_patches():
    assert grid_of(64, 32, 32) == (8, 8)
    assert grid_of(24, 64, 96) == (4, 6)
    assert grid_of(6, 40, 56) == (2, 3)
    assert grid_of(128, 32, 32) is None


def test_a_site_is_masked_if_any_pixel_of_it_is():
    pixels = torch.zeros(32, 32, dtype=torch.bool)
    pixels[9, 3:29] = True
    sites = MaskGrids(pixels, 0, torch.zeros(1, 64, 16))
    found = sites.of_input((64,), None)
    assert found is not None
    assert found.view(8, 8).nonzero()[:, 0].unique().tolist() == [2]
    assert sites.grid((16, 16)).any(1).nonzero().flatten().tolist() == [4]
    assert MaskGrids(pixels, 1).grid((16, 16)).any(1).nonzero().flatten().tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("margin", "pixels", "sites"),
    [(2, 8, 2), (2, 4, 2), (2, 1, 2), (2, 16, 1), (1, 16, 1), (3, 16, 2), (4, 32, 1), (0, 16, 0)],
)
def test_a_margin_counts_wide_sites_as_several(margin: int, pixels: int, sites: int) -> None:
    assert margin_sites(margin, pixels) == sites
    mask = torch.zeros(16 * pixels, 16 * pixels, dtype=torch.bool)
    mask[8 * pixels : 9 * pixels, 8 * pixels] = True
    across = MaskGrids(mask, margin).grid((16, 16))[8]
    assert across.nonzero().flatten().tolist() == list(range(8 - sites, 9 + sites))


def test_references_are_told_from_latents_by_their_numbers():
    pixels = torch.zeros(32, 32, dtype=torch.bool)
    pixels[:4] = True
    latents, references = torch.randn(1, 64, 16), torch.randn(1, 36, 16)
    sites = MaskGrids(pixels, 0, latents)
    after = sites.of_input((100,), torch.cat([latents, references], 1))
    before = sites.of_input((100,), torch.cat([references, latents], 1))
    assert after is not None
    assert before is not None
    assert after.nonzero().flatten().tolist() == list(range(8))
    assert before.nonzero().flatten().tolist() == list(range(36, 44))
    assert sites.of_input((100,), torch.randn(1, 100, 16)) is None
    whole = MaskGrids(torch.ones(32, 32) > 0, 0, latents)
    every = whole.of_input((100,), torch.cat([latents, references], 1))
    assert every is not None
    assert every.all()


def test_a_mask_beside_latents_tells_the_tokens_of_the_picture():
    pixels = torch.zeros(32, 32, dtype=torch.bool)
    pixels[:4] = True
    latents = torch.randn(2, 100, 4, 1, 2, 2)  # patches of a reference, and 8x8 of the picture
    own = (torch.arange(100) >= 36).expand(2, -1)
    sites = MaskGrids(pixels, 0, latents, part=picture_part([latents, own, [(1, 8, 8)]]))
    found, over = sites.of_input((100,), latents), sites.of_latents(latents)
    assert found is not None
    assert over is not None
    assert found.nonzero().flatten().tolist() == list(range(36, 44))
    assert over.shape == (100, 1, 1, 1, 1)
    assert torch.equal(over.flatten(), found)
    more = sites.of_input((110,), torch.cat([torch.randn(2, 10, 4, 1, 2, 2), latents], 1))
    assert more is not None
    assert more.nonzero().flatten().tolist() == list(range(46, 54))
    assert picture_part([latents, torch.arange(100).expand(2, -1) % 2 > 0]) is None, "no run"
    assert picture_part([latents, torch.stack([own[0], own[0].flip(0)])]) is None, "they differ"
    assert picture_part([torch.randn(2, 4, 8, 8), own]) is None, "latents of rows and columns"


def test_latents_beside_a_reference_are_found_in_a_wider_picture():
    pixels = torch.zeros(32, 32, dtype=torch.bool)
    pixels[:4] = True
    latents, reference = torch.randn(1, 4, 16, 16), torch.randn(1, 4, 16, 16)
    sites = MaskGrids(pixels, 0, latents)
    wide = sites.of_input((16, 32), torch.cat([latents, reference], 3))
    high = sites.of_input((32, 16), torch.cat([reference, latents], 2))
    assert wide is not None
    assert high is not None
    assert wide.nonzero().tolist() == [[y, x] for y in range(2) for x in range(16)]
    assert high.nonzero().tolist() == [[y, x] for y in (16, 17) for x in range(16)]
    assert sites.of_input((16, 32), torch.randn(1, 4, 16, 32)) is None, "the latents aren't in it"
    other = sites.of_input((32, 32), torch.randn(1, 4, 32, 32))
    assert other is not None
    assert other[:4].all(), "another resolution of the whole picture"
    assert not other[4:].any()


def test_an_embedding_has_no_sites():
    sites = MaskGrids(torch.ones(32, 32) > 0, 0, torch.zeros(2, 16))
    assert sites.of_input((16,), None) is None
    assert sites.of_input((4, 4), None) is None
    assert sites.of_latents(torch.zeros(2, 16)) is None


@pytest.mark.parametrize("shape", [(1, 1, 16, 8, 5), (1, 16, 8, 5)])
def test_channels_of_latents_may_be_last(shape: tuple[int, ...]):
    pixels = torch.zeros(32, 16, dtype=torch.bool)
    pixels[4:8, 2] = True
    sites = MaskGrids(pixels).of_latents(torch.zeros(shape))
    assert sites is not None
    assert sites.shape == (16, 8, 1)
    assert sites[..., 0].nonzero().tolist() == [[2, 1], [3, 1]]
    first = MaskGrids(pixels).of_latents(torch.zeros(1, 5, 16, 8))
    assert first is not None
    assert torch.equal(first, sites[..., 0])


def test_tokens_of_spatial_latents_are_their_patches():
    sites = MaskGrids(torch.ones(32, 32) > 0, 0, torch.zeros(1, 4, 16, 16))
    assert sites.of_input((256,), None) is not None
    assert sites.of_input((64,), None) is not None
    assert sites.of_input((128,), None) is None
    assert MaskGrids(torch.ones(32, 32) > 0).of_input((64,), None) is None


# What a template is of.


def call(
    self: Any,
    prompt: Any = None,
    image: Any = None,
    mask_image: Any = None,
    negative_prompt: Any = None,
    guidance_scale: float = 7.5,
    control_guidance_end: float = 1.0,
    num_images_per_prompt: int = 1,
    masked_image_latents: Any = None,
    latents: Any = None,
    prompt_embeds: Any = None,
    generator: Any = None,
) -> None: ...


def name_of(masked: bool = False, **arguments: Any) -> str:
    return recording_arguments(call, {"image": torch.zeros(1, 3, 4, 4), **arguments}, masked)[1]


def test_what_changes_nothing_outside_the_mask_changes_no_name():
    one = name_of(prompt="a", guidance_scale=3.0, mask_image=MASK, latents=1)
    assert one == name_of(prompt="b", guidance_scale=9.0, mask_image=~MASK, generator=2)
    assert one == name_of(prompt="b", guidance_scale=2.0, mask_image=MASK, num_images_per_prompt=2)
    usual: dict[str, Any] = {"prompt": "a", "guidance_scale": 3.0, "mask_image": MASK}
    others: tuple[dict[str, Any], ...] = (
        {"image": torch.ones(1, 3, 4, 4)},
        {"control_guidance_end": 0.5},
        {"guidance_scale": 1.0},
        {"masked_image_latents": torch.zeros(1)},
        {"negative_prompt": "c"},
    )
    for other in others:
        assert name_of(**{**usual, **other}) != one
    assert one == name_of(prompt=["a"], num_images_per_prompt=1)  # the usual guidance
    assert name_of(True, mask_image=MASK) != name_of(True, mask_image=~MASK)


def test_guidance_is_recorded_at_the_models_own_strength():
    """Which its folder may know better than its class."""
    for given, usual, wanted in ((2.0, {}, 7.5), (2.0, {"guidance_scale": 3.0}, 3.0), (1.0, {}, 1)):
        found, _ = recording_arguments(call, {"guidance_scale": given}, False, usual)
        assert found["guidance_scale"] == wanted


def test_a_recording_is_of_no_prompt():
    given = {"prompt": ["a", "b"], "prompt_embeds": torch.ones(2, 3, 4), "generator": 1}
    found, _ = recording_arguments(call, given, False)
    assert found["prompt"] == [""]
    assert found["prompt_embeds"].shape == (1, 3, 4)
    assert not found["prompt_embeds"].any()
    assert "generator" not in found
    offsets = {"prompt_embeds": torch.ones(1, 5, 4), "prompt_cu_seqlens": torch.tensor([0, 5])}
    found, _ = recording_arguments(call, offsets, False, own_prompt=True)
    assert found["prompt_cu_seqlens"].tolist() == [0, 5], "no batch"
    one_each = {"prompt_embeds": [torch.ones(5, 4)] * 2}
    listed, _ = recording_arguments(call, one_each, False, own_prompt=True)
    assert [v.shape for v in listed["prompt_embeds"]] == [(5, 4)]
    # no words either
    told, _ = recording_arguments(call, {"image_embeds": torch.ones(2, 4)}, False)
    assert torch.equal(told["image_embeds"], torch.zeros(1, 4))
    adapters = {"ip_adapter_image_embeds": [torch.ones(2, 1, 4), torch.ones(2, 1, 6)]}
    told, _ = recording_arguments(call, adapters, False)
    assert [v.shape for v in told["ip_adapter_image_embeds"]] == [(2, 1, 4), (2, 1, 6)]
    assert not any(v.any() for v in told["ip_adapter_image_embeds"])
    photo = Image.new("RGBA", (90, 70), "red")
    shown = {"ip_adapter_image": [photo, [photo, np.ones((9, 7, 3))]], "example_image": photo}
    found, name = recording_arguments(call, shown, False)
    one, (two, three) = found["ip_adapter_image"]
    assert not any(np.asarray(v).any() for v in (one, two, three, found["example_image"]))
    smaller: dict[str, Any] = {
        "ip_adapter_image": [photo, [photo.resize((50, 40)), np.zeros((9, 7, 3))]]
    }
    smaller["example_image"] = photo.convert("RGB")
    assert recording_arguments(call, smaller, False)[1] == name
    several = {**given, "image": [1, 2], "num_images_per_prompt": 2}
    found, _ = recording_arguments(call, several, False)
    assert found["prompt"] == ["", ""]
    assert found["num_images_per_prompt"] == 2


def test_text_states_have_the_template_of_a_text():
    image = torch.zeros(1, 3, 4, 4)
    states = {"image": image, "prompt_embeds": torch.ones(2, 3, 4)}
    found, name = recording_arguments(call, states, False)
    assert found["prompt"] == ""
    assert "prompt_embeds" not in found
    assert name == recording_arguments(call, {"image": image, "prompt": "a"}, False)[1]
    negative = {**states, "negative_prompt_embeds": torch.ones(2, 3, 4)}
    found, name = recording_arguments(call, negative, False)
    assert (found["prompt"], found["negative_prompt"]) == ("", "")
    of_text = {"image": image, "prompt": "a", "negative_prompt": ""}
    assert name == recording_arguments(call, of_text, False)[1]
    several, _ = recording_arguments(call, {**states, "image": [1, 2]}, False)
    assert several["prompt"] == ["", ""]
    zeros, name = recording_arguments(call, states, False, own_prompt=True)
    assert not zeros["prompt_embeds"].any()
    assert "prompt" not in zeros


def test_a_recording_with_its_own_prompt_is_of_that_prompt():
    image = torch.zeros(1, 3, 4, 4)
    names = set()
    for prompt in ("a", "b"):
        given = {"image": image, "prompt": prompt, "negative_prompt": ["c", "d"]}
        found, name = recording_arguments(call, given, False, own_prompt=True)
        assert (found["prompt"], found["negative_prompt"]) == (prompt, ["c"])
        names.add(name)
        assert name != recording_arguments(call, given, False)[1]
    assert len(names) == 2


def test_guidance_is_recorded_at_the_usual_strength():
    assert usual_guidance(3.0, 7.5) == 7.5
    assert usual_guidance(3.0, 1.0) == 4.0
    assert usual_guidance(1.0, 7.5) == 1.0


def test_digests_are_of_contents():
    picture = Image.new("RGB", (2, 2), "red")
    assert digest(picture) == digest(picture.copy())
    assert digest([picture]) != digest(picture)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(torch.zeros(2)) != digest(torch.zeros(1, 2))
    assert digest(np.zeros(2)) == digest(np.zeros(2))
    assert digest(1) != digest(1.0)
    assert digest(torch.float32) == digest(torch.float32)
    assert digest(lambda: 1) != digest(lambda: 1)  # nothing to compare


def test_one_picture_of_several_is_every_so_many_elements():
    assert list(TemplateSource("t", 1, 2).elements(4)) == [1, 3]
    assert list(TemplateSource("t").elements(3)) == [0, 1, 2]
    assert list(TemplateSource("t", 1, 2).elements(1)) == [0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"first": -1}, "first=-1: give a whole number, 0 or more"),
        ({"refresh": 0}, "refresh=0: give a whole number, 1 or more"),
        ({"reuse": "all"}, "reuse='all': choose one of template, steps, auto"),
    ],
)
def test_qualities_are_checked(given: dict[str, Any], said: str):
    with pytest.raises(InputError, match=said):
        Quality(**given)


# Stand-ins.


class Denoiser(nn.Module):
    def forward(self, sample: Tensor, timestep: Any, **more: Any) -> Tensor:
        return sample * 2


class Caller:
    """A run that answers by itself."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = modules

    def handles(self, module: nn.Module) -> bool:
        return module in self.modules

    def call(self, module: nn.Module, inputs: dict[str, Any]) -> Any:
        return sorted(inputs)

    def codes(self, autoencoder: nn.Module, method: str) -> bool:
        return False

    def code(self, part: nn.Module, method: str, call: MethodCall) -> Any:
        return None


def test_denoisers_are_modules_that_are_told_of_a_timestep():
    multi = nn.Module()
    multi.nets = nn.ModuleList([Denoiser(), nn.Linear(1, 1), Denoiser()])
    parts = {"unet": Denoiser(), "vae": nn.Linear(1, 1), "controlnet": multi, "scheduler": object()}
    assert list(find_denoisers(parts)) == ["unet", "controlnet.0", "controlnet.2"]


def test_the_step_may_be_a_share_of_the_timesteps():
    class Cascade(nn.Module):
        def forward(self, sample: Tensor, timestep_ratio: Tensor) -> Tensor:
            return sample * timestep_ratio

    class Coder(nn.Module):
        def forward(self, sample: Tensor, temb: Tensor) -> Tensor:
            return sample

    assert list(find_denoisers({"decoder": Cascade(), "vae": Coder()})) == ["decoder"]


def test_a_stand_in_hands_its_calls_to_the_run_that_knows_it():
    one, other, x = Denoiser(), Denoiser(), torch.ones(1)
    install(one)
    install(one)
    install(other)
    assert torch.equal(one(x, 1), x * 2)
    with running(Caller(one)):
        assert one(x, timestep=1, scale=3) == ["sample", "scale", "timestep"]
        assert torch.equal(other(x, 1), x * 2)
        with running(None):
            assert torch.equal(one(x, 1), x * 2)
    remove(one)
    assert installed(one) is not None
    remove(one)
    remove(one)
    assert "forward" not in vars(one)


def test_hooks_of_any_part_count():
    module: Any = nn.Sequential(Denoiser())
    assert not is_hooked(module)
    module[0]._hf_hook = object()
    assert is_hooked(module)


def test_captures_are_of_the_settings_that_a_run_begins_with(monkeypatch: pytest.MonkeyPatch):
    """Pipelines set some themselves, after those before the run became part of a template's key."""
    module: Any = Denoiser()
    denoiser, forgotten = CompiledDenoiser(module, Settings()), list[float]()
    monkeypatch.setattr(denoiser, "follow_settings", lambda: forgotten.append(module.scale))
    one, other = (
        PipelineState(
            call, {"unet": denoiser}, TemplateLibrary(Tiers(host_bytes=1)), Quality(), print
        )
        for _ in range(2)
    )

    def run(before: float, begun: float, state: PipelineState = one) -> None:
        module.scale = before
        state.follow_settings()
        module.scale = begun
        made = PipelineRun(object(), state.denoisers, DenseHandler(), print, follow=state.follow)
        for _ in range(2):
            assert made.handles(module)
            module.scale += 1

    run(1.0, 5.0)
    run(1.0, 5.0)
    run(5.0, 5.0)
    assert forgotten == []
    run(1.0, 2.0)
    assert forgotten == [2.0]
    run(1.0, 2.0, other)
    run(1.0, 3.0, other)
    run(1.0, 3.0)
    assert forgotten == [2.0, 3.0]


# Schedulers.


class Scheduler:
    """Counts its own steps."""

    def __init__(self) -> None:
        self.made = 0

    def step(self, sample: Tensor) -> tuple[Tensor]:
        self.made += 1
        return (sample,)


def test_a_copied_scheduler_makes_its_own_steps():
    run = PipelineRun(object(), {}, DenseHandler(), lambda calls: None)
    scheduler: Any = Scheduler()
    scheduler.step = WatchedStep(run, scheduler, scheduler.step)
    other = copy.deepcopy(scheduler)
    other.step(torch.ones(1))
    assert (scheduler.made, other.made, run.step) == (0, 1, 1)


# What is remembered of templates.


def test_of_templates_without_number_little_is_remembered():
    library = TemplateLibrary(Tiers(host_bytes=1 << 10))
    for k in range(2 * KNOWN):
        assert library.attempts.count_request(str(k)) == 1
        library.refuse(str(k), "it is too large")
        library._recorded[str(k)] = frozenset()
        with library.recording(str(k)):
            library.begin(str(k))
    library.finish("x", [])
    for known in (
        library.attempts.asked,
        library.attempts.failed,
        library._recorded,
        library._locks,
    ):
        assert len(known) <= KNOWN + 1
    assert not library._placed
    assert library.attempts.count_request(str(2 * KNOWN - 1)) == 2


def test_a_second_recording_waits_once_for_the_first():
    """Without polling, unless the wait gives a time limit."""
    library = TemplateLibrary(Tiers(host_bytes=1 << 10))
    waits: list[Waiting] = []
    waited, entered = threading.Event(), threading.Event()

    def wait(waiting: Waiting) -> None:
        waits.append(waiting)
        waited.set()
        wait_uninterrupted(waiting)

    def second() -> None:
        with library.recording("t", wait):
            entered.set()

    thread = threading.Thread(target=second)
    with library.recording("t"):
        thread.start()
        assert waited.wait(60)
        assert not entered.wait(0.1)
        [waiting] = waits
        assert not waiting(0.01)
    thread.join(60)
    assert entered.is_set()
    assert len(waits) == 1
    assert waiting(None), "the lock is free again"


def test_a_shelf_that_is_let_go_pins_nothing():
    tiers = Tiers(host_bytes=1 << 20)
    library = TemplateLibrary(tiers)
    for name in ("a", "b"):
        library.begin(name)
        library.finish(name, [torch.ones(1)])
        library.pin(name)
    library.unpin()
    assert not tiers._pins


# What is kept outside the mask.


def test_latents_outside_the_mask_are_the_templates_at_every_step():
    library = TemplateLibrary(Tiers(host_bytes=1 << 20))
    start, after = torch.randn(1, 4, 3, 4), torch.randn(1, 4, 3, 4)
    library.begin("t")
    library.put_latents("t", 0, after)
    library.finish("t", [start])
    reader = TemplateReader(library, TemplateSource("t"))
    handler = EditHandler(MASK, Quality(margin=0), reader)
    own = torch.randn(2, 4, 3, 4)
    inside = torch.zeros(3, 4, dtype=torch.bool)
    inside[:2, 1:3] = True
    [begun] = handler.prepare([own], 6, 8, None)
    for found, kept in ((begun, start), (handler.after_step(0, own), after)):
        assert torch.equal(found[:, :, inside], own[:, :, inside])
        assert torch.equal(found[:, :, ~inside], kept.expand(2, -1, -1, -1)[:, :, ~inside])
    assert torch.equal(handler.after_step(1, own), own)  # no such step


def test_each_chunk_of_a_run_begins_with_its_own_recorded_latents():
    library = TemplateLibrary(Tiers(host_bytes=1 << 20))
    chunks, own = torch.randn(2, 1, 4, 3, 4), torch.randn(1, 4, 3, 4)
    recording = RecordHandler(library, "t")
    for chunk in chunks:
        recording.prepare([chunk, 6], 6, 8, None)
    recording.finish()
    reader = TemplateReader(library, TemplateSource("t"))
    handler = EditHandler(MASK, Quality(margin=0), reader)
    inside = torch.zeros(3, 4, dtype=torch.bool)
    inside[:2, 1:3] = True
    for chunk in chunks:
        begun, number = handler.prepare([own, 6], 6, 8, None)
        assert torch.equal(begun[:, :, ~inside], chunk[:, :, ~inside])
        assert torch.equal(begun[:, :, inside], own[:, :, inside])
        assert number == 6


def test_surroundings_are_the_same_in_every_process():
    """Diffusers keeps a set's random order in a scheduler's config."""
    found = []
    for defaults in (["a", "b"], ["b", "a"]):
        scheduler = ddim()
        scheduler.register_to_config(_use_default_values=defaults)
        found.append(PipelineFingerprint().digest({"scheduler": scheduler}, {}, {}))
    other = PipelineFingerprint().digest({"scheduler": ddim(beta_start=0.002)}, {}, {})
    assert found[0] == found[1] != other


def test_templates_are_of_the_denoisers_weights():
    pipe = maskfx.compile(PIPES["StableDiffusionPipeline"].build(), quality="all-steps")
    shared = pipeline_state_of(pipe)
    shared.follow_settings()
    before = shared.digest(pipe)
    assert shared.digest(pipe) == before
    with torch.no_grad():
        next(pipe.unet.parameters()).add_(1)
    assert shared.digest(pipe) != before
