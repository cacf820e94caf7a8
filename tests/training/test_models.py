"""The models at a tiny size: autoencoder, latents, both denoisers, the folders and their loader."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import maskfx
from maskfx.errors import InputError
from maskfx.shipped import names
from training import build, crops, dit, latents, resume, text, unet, vae, words
from training.loop import Run, Task, weights_of
from training.masks import masks_of
from training.probe import CROP, ProbeTask, crop_around
from training.scenes import draw_scene

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    small_vae, small_unet, small_dit = vae.make_vae, unet.make_unet, dit.make_transformer
    for module in (vae, latents):
        monkeypatch.setattr(module, "make_vae", lambda count: small_vae(count, (8, 8, 8, 8)))
    monkeypatch.setattr(unet, "make_unet", lambda: small_unet((8, 8, 8), groups=4))
    monkeypatch.setattr(dit, "make_transformer", lambda: small_dit(1, 1, 1, 16))
    monkeypatch.setattr(latents, "SHARD", 4)
    for module in (unet, dit):
        monkeypatch.setattr(module, "SHARDS_AT_START", 1)


def trained(runs: Path, name: str) -> Path:
    """A run of one step, made if it isn't there."""
    tasks: dict[str, Callable[[], Task]] = {
        "vae4": lambda: vae.VaeTask(4, CPU),
        "text": lambda: words.TextTask(runs, batch=4),
        "t5": lambda: words.PiecesTask(runs, batch=4),
        "unet": lambda: unet.UnetTask(runs, CPU, batch=2),
        "dit": lambda: dit.DitTask(runs, CPU, batch=2),
    }
    if not (runs / name / "checkpoint.pt").exists():
        Run(tasks[name](), runs / name).train(60, steps=1)
    return runs / name


def picture_and_mask() -> tuple[Image.Image, Image.Image]:
    pixels = np.full((256, 256, 3), 90, np.uint8)
    mask = np.zeros((256, 256), np.uint8)
    mask[64:160, 64:160] = 255
    return Image.fromarray(pixels), Image.fromarray(mask)


def test_the_tokenizer_keeps_every_word_of_the_captions_whole(runs: Path):
    tokenizer = text.learn_tokenizer(runs / "tokenizer")
    words = {word for line in text.some_captions(300) for word in line.replace(",", "").split()}
    broken = [word for word in words if len(tokenizer(word).input_ids) != 3]
    assert broken == []
    ids = text.tokens_of(tokenizer, ["a red ball", ""])
    assert ids.shape == (2, text.LENGTH)
    assert ids.max() < len(tokenizer)
    again = text.learn_tokenizer(runs / "tokenizer")
    assert torch.equal(text.tokens_of(again, ["a red ball", ""]), ids)


def test_shards_are_made_once_and_read_again(runs: Path, monkeypatch: pytest.MonkeyPatch):
    trained(runs, "vae4")
    frozen = latents.frozen_vae(runs, 4)
    one = latents.Latents(frozen, runs / "some")
    one.need(2)
    assert one.shards[0]["full"].shape == (4, 4, 32, 32)
    assert one.shards[0]["kept"].shape == (4, 2, 4, 32, 32)
    assert not torch.equal(one.shards[0]["full"], one.shards[1]["full"])
    monkeypatch.setattr(latents.Latents, "make", None)
    other = latents.Latents(frozen, runs / "some")
    other.need(2)
    assert torch.equal(one.shards[1]["kept"], other.shards[1]["kept"])


def test_latents_have_unit_spread(runs: Path):
    trained(runs, "vae4")
    made = latents.Latents(latents.frozen_vae(runs, 4), runs / "some")
    made.need(1)
    assert 0.5 < made.shards[0]["full"].float().std() < 2


def test_a_frozen_autoencoder_stays_as_it_is(runs: Path):
    before: Any = latents.frozen_vae(trained(runs, "vae4").parent, 4)
    run = Run(vae.VaeTask(4, CPU), runs / "vae4")
    run.train(60, steps=run.step + 1)
    after: Any = latents.frozen_vae(runs, 4)
    kept, now = before.state_dict(), after.state_dict()
    assert all(torch.equal(kept[key], now[key]) for key in kept)


def test_the_unet_folder_loads_into_the_inpaint_pipeline(runs: Path, tmp_path: Path):
    for name in ("vae4", "text", "unet"):
        trained(runs, name)
    folder = build.build("unet", runs, tmp_path)
    assert "license: apache-2.0" in (folder / "README.md").read_text()
    pipe = maskfx.reference("unet", folder=tmp_path)
    assert type(pipe).__name__ == "StableDiffusionInpaintPipeline"
    image, mask = picture_and_mask()
    made = pipe("a red ball", image=image, mask_image=mask, num_inference_steps=2).images[0]
    assert made.size == (256, 256)


def test_training_goes_on_from_a_shipped_folder(runs: Path, tmp_path: Path):
    for name in ("vae4", "text", "unet"):
        trained(runs, name)
    build.build("unet", runs, tmp_path / "shipped")
    again = tmp_path / "again"
    resume.resume("unet", tmp_path / "shipped", again)
    trained_on, before = (Run(task, at / "unet") for task, at in tasks_of(again, runs))
    assert trained_on.step == before.step == 1
    for key, value in before.average.weights.items():
        torch.testing.assert_close(trained_on.average.weights[key], value, rtol=1e-3, atol=1e-6)
    trained_on.train(60, steps=2)
    with pytest.raises(FileExistsError, match="goes on from there"):
        resume.resume("unet", tmp_path / "shipped", again)
    # and what comes of it may be shipped in its turn
    card = (build.build("unet", again, tmp_path / "next") / "README.md").read_text()
    assert "| unet | 2 |" in card


def tasks_of(*folders: Path) -> list[tuple[Task, Path]]:
    return [(unet.UnetTask(runs, CPU, batch=2), runs) for runs in folders]


def test_more_latents_are_made_as_a_training_goes_on(runs: Path):
    trained(runs, "vae4")
    made = latents.Latents(latents.frozen_vae(runs, 4), runs / "growing")
    held = []
    for step in (70, 79, 80, 90):
        made.grow(step, first=1, per_shard=10)
        held.append(len(made.shards))
    assert held == [1, 1, 2, 3]
    later = latents.Latents(made.vae, runs / "growing")
    later.grow(91, first=1, per_shard=10)
    assert len(later.shards) == 3  # what is on disk is used from the first step on


@pytest.mark.slow
def test_an_encoder_learns_which_colours_a_caption_names(tmp_path: Path):
    torch.manual_seed(0)
    run = Run(words.TextTask(tmp_path, batch=32), tmp_path / "text")
    before = run.task.judge(run.task.module)["below"]
    run.train(600, steps=150)
    assert run.task.judge(run.task.module)["below"] > before + 0.2
    read = words.read_encoder(tmp_path, text.learn_tokenizer(tmp_path / "tokenizer"))
    for key, value in weights_of(read).items():
        expected = run.average.weights[f"text_encoder.{key}"]
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-3)


def all_trained(runs: Path) -> None:
    for name in ("vae4", "text", "unet", "t5", "dit"):
        trained(runs, name)


def test_the_dit_folder_loads_into_the_fill_pipeline(runs: Path, tmp_path: Path):
    all_trained(runs)
    build.build("dit", runs, tmp_path)
    pipe = maskfx.reference("dit", folder=tmp_path)
    assert type(pipe).__name__ == "FluxFillPipeline"
    image, mask = picture_and_mask()
    size = dict(height=256, width=256)
    made = pipe("a red ball", image=image, mask_image=mask, num_inference_steps=2, **size).images[0]
    assert made.size == (256, 256)


def test_the_transformer_is_told_in_training_what_the_pipeline_tells_it(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Same texts, same places, and the channels of the same picture and mask."""
    all_trained(runs)
    build.build("dit", runs, tmp_path)
    pipe = maskfx.reference("dit", folder=tmp_path)
    heard: list[dict[str, Any]] = []
    task = dit.DitTask(runs, CPU, batch=1)
    for transformer in (pipe.transformer, task.module.get_submodule("transformer")):
        transformer.register_forward_pre_hook(
            lambda module, args, kwargs: heard.append(kwargs), with_kwargs=True
        )
    monkeypatch.setattr(dit, "MANY_CHANCE", 0)
    monkeypatch.setattr(dit, "DROPPED", 0)
    monkeypatch.setattr(dit, "quick_numbers", lambda _: nullcontext())
    rng = np.random.default_rng(0)
    task.latents.need(1)
    task.loss_on(rng, task.module, cropped=False, shards=1)
    drawn = task.examples.pictures(np.random.default_rng(0), shards=1)
    mask = drawn.mask.repeat_interleave(8, 2).repeat_interleave(8, 3)
    scale = pipe.vae.config.scaling_factor
    monkeypatch.setattr(pipe.vae, "encode", lambda _: Told(drawn.kept / scale))
    pipe(
        drawn.texts,
        image=torch.zeros(1, 3, 256, 256),
        mask_image=mask,
        max_sequence_length=text.LENGTH,
        num_inference_steps=1,
        height=256,
        width=256,
        output_type="latent",
    )
    ours, theirs = heard
    for name in ("txt_ids", "img_ids"):
        torch.testing.assert_close(ours[name], theirs[name])
    conditions = 4 * 4
    torch.testing.assert_close(
        ours["hidden_states"][..., conditions:], theirs["hidden_states"][..., conditions:]
    )
    for name in ("encoder_hidden_states", "pooled_projections"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)


class Told:
    """What an encoder gave."""

    def __init__(self, latents: torch.Tensor) -> None:
        self.latents = latents


def test_what_the_teacher_says_is_what_flow_matching_asks_for(runs: Path):
    """Where it knows the answer, both are noise less data."""
    all_trained(runs)
    task = dit.DitTask(runs, CPU, batch=1)
    task.latents.need(1)
    seen: list[torch.Tensor] = []

    def perfect(noisy: Any, drawn: Any, times: Any, ids: Any) -> torch.Tensor:
        signal = task.signals[times].view(-1, 1, 1, 1)
        noise = (noisy - signal.sqrt() * drawn.full) / (1 - signal).sqrt().clamp_min(1e-6)
        seen.append(dit.packed(noise - drawn.full))
        return signal.sqrt() * noise - (1 - signal).sqrt() * drawn.full

    class Student(torch.nn.Module):
        def forward(self, **given: Any) -> tuple[torch.Tensor]:
            return (seen[-1],)

    task.teacher.velocity = perfect  # type: ignore[method-assign]
    task.module["transformer"] = Student()  # type: ignore[operator]
    assert task.loss_on(np.random.default_rng(1), task.module, True).item() < 1e-6


def test_pieces_hold_every_word_of_the_captions(runs: Path):
    pieces = text.learn_pieces(runs / "pieces")
    words = {w for line in text.some_captions(300) for w in line.replace(",", "").split()}
    assert [word for word in words if len(pieces(word).input_ids) != 2] == []
    again = text.learn_pieces(runs / "pieces")
    strange = ["a red ball", "", "Zebra? ~ 7"]
    assert torch.equal(text.tokens_of(again, strange), text.tokens_of(pieces, strange))


def test_an_unknown_name_says_what_there_is(tmp_path: Path):
    assert names(tmp_path) == []
    with pytest.raises(InputError, match=r"reference\('vase'\).*there: none.*training.build"):
        maskfx.reference("vase", folder=tmp_path)


def test_a_step_of_the_probe_changes_it():
    task = ProbeTask(batch=4)
    loss, numbers = task.loss(0)
    assert loss.item() > 0
    assert 0 <= numbers["right"] <= 1


def test_a_crop_at_the_border_has_its_full_size():
    thing = draw_scene("train", 0).things[0]
    pixels = np.zeros((256, 256, 3), np.uint8)
    assert crop_around(pixels, 2.0, 250.0, thing.radius).shape == (CROP, CROP, 3)


@pytest.mark.parametrize("seed", range(8))
def test_a_crop_holds_the_mask_that_it_is_around(seed: int) -> None:
    mask = torch.from_numpy(latents.at_grid(masks_of(draw_scene("train", seed), seed)[0].mask))
    window = crops.window_around(mask, np.random.default_rng(seed))
    side = crops.WINDOW
    assert mask[window].shape == (side, side)
    rows, columns = (int(mask.any(axis).sum()) for axis in (1, 0))
    if max(rows, columns) <= side:
        assert mask[window].sum() == mask.sum()
    else:  # it is filled from one end to the other where there is more than it holds
        assert int(mask[window].any(1).sum()) == min(rows, side)
        assert int(mask[window].any(0).sum()) == min(columns, side)
