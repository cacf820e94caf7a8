"""bench.quality at its smallest: metrics of known value, three edits by a tiny random pipeline."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import masks
from bench.quality import run as quality
from bench.quality.bed import Bed
from bench.quality.caches import CACHES
from bench.quality.edits import cover_of, draw_edit, ratio_of
from bench.quality.figures import frontier
from bench.quality.folder import Folder
from bench.quality.metrics import ALIKE, frechet, psnr, ssim
from bench.quality.report import crossing, meeting
from bench.quality.sides import CUT_EDGES, chosen, cut_box, sides_of
from maskfx.pipelines.call_defaults import call_of
from tests.factories.shipped import ship_dit, ship_unet
from training.probe import make_probe

STEPS = 3


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (40, 48, 3)).astype(np.uint8)


# Metrics.


def test_equal_pictures_are_alike():
    assert ssim(picture(0), picture(0)) == 1.0
    assert psnr(picture(0), picture(0)) == ALIKE


def test_psnr_of_a_known_error_and_of_the_masked_pixels_alone():
    one = np.full((40, 48, 3), 100, np.uint8)
    other = one.copy()
    other[:10, :12] = 110
    mask = np.zeros((40, 48), bool)
    mask[:10, :12] = True
    inside = 20 * np.log10(255 / 10)
    assert psnr(one, other, mask) == pytest.approx(inside)
    assert psnr(one, other, ~mask) == ALIKE
    assert psnr(one, other) == pytest.approx(inside + 10 * np.log10(16))


def test_ssim_of_flat_pictures_is_the_formula():
    """Without spread only the means count."""
    one, other = np.full((20, 20, 3), 100, np.uint8), np.full((20, 20, 3), 150, np.uint8)
    c1 = (0.01 * 255) ** 2
    assert ssim(one, other) == pytest.approx((2 * 100 * 150 + c1) / (100**2 + 150**2 + c1))


def test_ssim_is_that_of_a_plain_loop():
    one, other = picture(1), (picture(1) // 2 + picture(2) // 2).astype(np.uint8)
    offsets = np.arange(11) - 5
    window = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    window = (window / window.sum())[..., None]
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    found = []
    for row in range(30):
        for column in range(38):
            x = one[row : row + 11, column : column + 11].astype(float)
            y = other[row : row + 11, column : column + 11].astype(float)
            mx, my = (x * window).sum((0, 1)), (y * window).sum((0, 1))
            vx = (window * (x - mx) ** 2).sum((0, 1))
            vy = (window * (y - my) ** 2).sum((0, 1))
            both = (window * (x - mx) * (y - my)).sum((0, 1))
            found.append(
                (2 * mx * my + c1) * (2 * both + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
            )
    assert ssim(one, other) == pytest.approx(float(np.mean(found)), abs=1e-9)


def test_frechet_of_shifted_and_of_wider_gaussians():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 6))
    assert frechet(x, x) == pytest.approx(0, abs=1e-6)
    assert frechet(x, x + 2) == pytest.approx(6 * 4, rel=1e-6)
    # of one covariance the spreads differ by a factor: (3 - 1)² of each variance
    assert frechet(x, 3 * x - 2 * x.mean(0)) == pytest.approx(
        4 * np.trace(np.cov(x, rowvar=False)), rel=1e-6
    )


# Edits and sides.


def test_masks_are_irregular_hold_the_thing_and_have_the_wanted_share():
    for index in range(6):
        edit = draw_edit(index)
        cover = cover_of(edit.thing)
        assert edit.mask[cover].all()
        wanted = max(ratio_of(index), cover.mean())
        assert edit.mask.mean() == pytest.approx(wanted, abs=1e-4)
        rows = edit.mask.any(1).sum() * edit.mask.any(0).sum()
        assert edit.mask.sum() < 0.95 * rows  # no box
        again = draw_edit(index)
        assert (again.mask == edit.mask).all()
        assert again.prompt == edit.prompt


def test_fitted_ratios_are_like_the_measured_ones():
    draw = random.Random(0)
    found = np.array([masks.fitted_ratio(draw) for _ in range(4000)])
    assert found.mean() == pytest.approx(0.112, abs=0.005)
    assert np.quantile(found, 0.95) == pytest.approx(0.245, abs=0.02)
    real = masks.production_ratios()
    if real is not None:
        for part in (0.05, 0.25, 0.5, 0.75, 0.95):
            assert np.quantile(found, part) == pytest.approx(np.quantile(real, part), rel=0.1)


@pytest.mark.parametrize("edge", [16, 32])
def test_cut_boxes_hold_the_mask_and_fit_the_denoiser(edge: int):
    draw = random.Random(edge)
    for _ in range(300):
        mask = np.zeros((256, 256), bool)
        (x, across), (y, down) = (sorted(draw.sample(range(257), 2)) for _ in range(2))
        mask[y:down, x:across] = True
        left, top, right, bottom = cut_box(mask, draw.choice((0, 5, 32)), edge)
        assert 0 <= left < right <= 256
        assert 0 <= top < bottom <= 256
        assert (right - left) % edge == (bottom - top) % edge == left % 8 == top % 8 == 0
        assert mask[top:bottom, left:right].sum() == mask.sum()


def test_sides_are_chosen_by_name_and_family():
    known = sides_of(25)
    assert len({side.name for side in known}) == len(known)
    names = [side.name for side in chosen(known, ["crop", "ours, every=3, margin=?"])]
    assert names[0] == "dense"
    assert "ours, every=3, margin=4" in names
    assert len(names) == 1 + 3 + 4
    with pytest.raises(ValueError, match="'cropp'.*families are .*crop"):
        chosen(known, ["cropp"])


def side(family: str, speed: float, psnr_inside: float, **more: float) -> dict[str, Any]:
    spread = {"mean": psnr_inside}
    return {"family": family, "times_faster_in_sum": speed, "psnr_inside": spread,
            "ssim": {"mean": 0.995}, "shape": 0.9, "colour": 0.9, **more}  # fmt: skip


def row(one: dict[str, Any]) -> dict[str, float]:
    seconds = 1 / one["times_faster_in_sum"]
    return {"seconds": seconds, "dense_seconds": 1.0, "psnr_inside": one["psnr_inside"]["mean"]}


def test_claims_are_judged_by_speed_and_nearness():
    sides = {
        "dense": side("dense", 1.0, ALIKE),
        "fast": side("ours", 5.0, 33.0),
        "slow": side("ours", 3.0, 40.0),
        "wrong": side("ours", 5.0, 33.0, colour=0.85),
        "beaten": side("crop", 4.0, 32.0),
        "near": side("fewer steps", 2.0, 41.0),
        "faster": side("fewer steps", 6.0, 20.0),
    }
    assert meeting(sides) == ["fast"]
    edit = {"sides": {name: row(one) for name, one in sides.items()}}
    assert crossing([edit], sides, "psnr_inside") == ["near", "faster"]
    # a baseline that has easier edits to do isn't any better for it
    lucky = {"sides": {"beaten": row(side("crop", 9.0, 50.0))}}
    assert crossing([edit, lucky], sides, "psnr_inside") == ["near", "faster"]
    line = frontier(sides, lambda one: one["psnr_inside"]["mean"])
    assert line == [(1.0, ALIKE), (2.0, 41.0), (3.0, 40.0), (5.0, 33.0), (6.0, 20.0)]


# Whole runs.


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pipelines of the shipped classes, tiny and random, and a probe that never learned."""
    folder = tmp_path_factory.mktemp("shipped")
    ship_unet(folder)
    ship_dit(folder)
    (folder / "probe").mkdir()
    torch.save({"average": dict(make_probe().named_parameters())}, folder / "probe/checkpoint.pt")
    return folder


def run(
    shipped: Path, out: Path, model: str, edits: int, *sides: str, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A run of the command; the result it wrote."""
    threads = torch.get_num_threads()
    command = ["--model", model, "--edits", str(edits), "--steps", str(STEPS), "--folder",
               str(out / model), "--pipelines", str(shipped), "--runs", str(shipped), "--threads",
               "1", "--out", str(out), *more, "--sides", *sides]  # fmt: skip
    assert quality.main(command) == 0
    torch.set_num_threads(threads)
    result: dict[str, Any] = json.loads((out / f"quality-{model}.json").read_text())
    return result


@pytest.mark.slow
def test_three_edits_end_to_end_and_again(shipped: Path, tmp_path: Path, capsys: Any):
    sides = ("ours, balanced", "dense, other background")
    result = run(shipped, tmp_path, "unet", 3, *sides)
    assert {"command", "commit", "hardware", "versions", "settings"} <= set(result)
    assert result["edits"] == 3
    assert set(result["sides"]) == {"dense", *sides}
    assert result["sides"]["dense"]["ssim"]["mean"] == 1.0
    assert result["sides"]["dense"]["psnr"]["mean"] == ALIKE
    ours = result["sides"]["ours, balanced"]
    assert 0 < ours["ssim"]["mean"] <= 1
    assert ours["psnr"]["mean"] > ours["psnr_inside"]["mean"]  # nothing changed outside
    assert ours["times_faster"]["median"] > 0
    assert ours["calls"] == STEPS
    assert ours["template_bytes"] > 0
    assert ours["frechet_to_dense"] >= 0
    assert result["outside_kept"] is True
    for name in ("frontier", "pictures"):
        assert (tmp_path / f"quality-unet-{name}.png").stat().st_size > 5_000
    assert "ours, balanced" in capsys.readouterr().out

    # pixels outside the mask are the input's
    kept = Folder(tmp_path / "unet", result["settings"])
    for name in ("dense", *sides):
        for index in range(3):
            made, edit = kept.picture(index, name), draw_edit(index)
            assert made is not None
            assert (made[~edit.mask] == edit.pixels[~edit.mask]).all()
            assert (made != edit.pixels).any()
    assert {i: kept.edit(i)["masked"] for i in range(3)} == {
        i: draw_edit(i).mask.mean() for i in range(3)
    }

    # more edits and another side: what is there isn't made again
    before = {i: kept.edit(i)["sides"] for i in range(3)}
    longer = run(shipped, tmp_path, "unet", 4, *sides, "2 steps")
    assert longer["edits"] == 4
    assert longer["sides"]["2 steps"]["edits"] == 4
    assert longer["sides"]["2 steps"]["calls"] == 2
    assert len(longer["earlier_sessions"]) == 1
    for index, rows in before.items():
        now = kept.edit(index)["sides"]
        assert {name: now[name] for name in rows} == rows


def test_a_folder_of_other_settings_is_refused(tmp_path: Path):
    Folder(tmp_path, {"steps": 3}).begin({})
    with pytest.raises(ValueError, match="steps: 3 before, 4 now"):
        Folder(tmp_path, {"steps": 4})


def test_a_stopped_run_goes_on(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The edit that was under way is lost, those before it are not."""
    whole = quality.Contest.run

    def stops(self: quality.Contest, indices: range, sides: Any) -> None:
        if 1 in indices:
            raise KeyboardInterrupt
        whole(self, indices, sides)

    with monkeypatch.context() as patch:
        patch.setattr(quality.Contest, "run", stops)
        with pytest.raises(KeyboardInterrupt):
            run(shipped, tmp_path, "unet", 2, "2 steps")
    place = tmp_path / "unet" / "edits"
    assert [path.name for path in place.iterdir()] == ["00000.json"]
    first = (place / "00000.json").read_text()
    assert run(shipped, tmp_path, "unet", 2, "2 steps")["edits"] == 2
    assert (place / "00000.json").read_text() == first


@pytest.mark.slow
def test_edits_made_together_are_those_made_alone(shipped: Path, tmp_path: Path):
    sides = ("ours, balanced", "2 steps", "crop, 0 pixels around", "dense, other background")
    alone = run(shipped, tmp_path / "alone", "unet", 3, *sides)
    # two processes share three edits: the first makes two in one step, the other the last
    for part in ("1/2", "2/2"):
        more = ("--together", "2", "--part", part)
        together = run(shipped, tmp_path / "together", "unet", 3, *sides, more=more)
    assert alone["edits"] == together["edits"] == 3
    folders = [Folder(tmp_path / n / "unet", r["settings"]) for n, r in
               (("alone", alone), ("together", together))]  # fmt: skip
    for index in range(3):
        for name in ("dense", *sides):
            one, other = (folder.picture(index, name) for folder in folders)
            assert one is not None
            assert other is not None
            assert psnr(one, other) > 45, (index, name)  # pixels are whole numbers
    # one may begin a step earlier, while the other is still encoded
    assert STEPS <= together["sides"]["ours, balanced"]["calls"] < 2 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("model", ["unet", "dit"])
def test_every_side_runs_or_says_why_not(shipped: Path, tmp_path: Path, model: str):
    result = run(shipped, tmp_path, model, 1, "*")
    known = {one.name for one in sides_of(STEPS)}
    assert set(result["sides"]) | set(result["absent"]) == known
    assert result["outside_kept"] is True
    dit_only = ("FirstBlockCache", "MagCache", "FasterCache", "TeaCache")
    for name in result["absent"]:
        assert name.startswith((*dit_only, "DBCache") if model == "unet" else "DBCache")


def test_caches_leave_no_trace(shipped: Path):
    from maskfx.shipped import reference

    bed = Bed("dit", reference("dit", folder=shipped), STEPS, call_of(shipped / "dit"))
    cases = [bed.case(0), bed.case(1)]
    before = [made.pixels for made in bed.dense(cases)]
    changed = 0
    for name in ("MagCache 1.0 10", "TaylorSeer 8", "TeaCache rule 0.6", "FirstBlockCache 0.4"):
        with CACHES[name].put_on(bed):
            made = bed.dense(cases)
        assert {one.calls for one in made} == {STEPS}
        changed += not np.array_equal([one.pixels for one in made], before)
        assert np.array_equal([one.pixels for one in bed.dense(cases)], before)
    assert changed >= 1
    assert CUT_EDGES.keys() == {"unet", "dit"}
