"""The denoiser benchmark at its smallest: results are written, FLOPs agree with a hand count."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench import (
    budget,
    cpu_attention,
    few_rows,
    masks,
    reuse,
    rolling,
    storage,
    stretches,
    transport,
)
from bench.denoisers import memory
from bench.denoisers.run import main
from bench.denoisers.sides import OURS, read_sides, relative_error
from bench.harness import alternate, count_flops, figure, ratio
from bench.shapes import SMALL_CONFIG

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """The folder that a quick run fills; one thread, since other tests may run beside it."""
    out: Path = tmp_path_factory.mktemp("results")
    threads = torch.get_num_threads()
    try:
        status = main(["--quick", "--shape", "a", "--threads", "1", "--rounds", "2",
                       "--extras", "tables", "--out", str(out)])  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    assert status == 0
    return out


def test_quick_run_writes_figures_and_plot(results: Path):
    result = json.loads((results / "denoisers-a.json").read_text())
    assert (results / "denoisers-a.png").stat().st_size > 5_000
    assert result["failures"] == {}
    assert {"command", "commit", "hardware", "versions", "settings"} <= set(result)
    assert [m["kind"] for m in result["masks"]] == ["square", "strokes"]
    for mask in result["masks"]:
        assert set(mask["seconds"]) == {"dense", "dense-channels-last", "ours-eager"}
        own = mask["ours"]["ours-eager"]
        assert own["correct"]
        assert own["error"] < 1e-4
        assert own["of_limit"]["median"] == pytest.approx(own["to_best"]["median"] / mask["limit"])
        assert mask["limit"] == pytest.approx(
            result["flops"]["dense"]["total"] / mask["flops"]["total"]
        )
        for seconds in mask["seconds"].values():
            assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
    assert result["extras"]["tables"]["square 0.2"]["new_size_seconds"]["median"] > 0


def test_memory_is_measured(capsys):
    """In this process, which saves the seconds that another one takes to start."""
    threads = str(torch.get_num_threads())
    assert memory.main(["--shape", "c", "--small", "--ratio", "0.2", "--threads", threads]) == 0
    figures = json.loads(capsys.readouterr().out)
    keys_and_values = 2 * 2 * 64 * 2 * 64 * 4  # of two blocks: sites, two heads of 64, fp32
    assert figures["cache_bytes"] == keys_and_values + 64 * 64 * 4  # and the output
    peaks = {"dense_peak_bytes", "record_peak_bytes", "edit_peak_bytes"}
    assert all(figures[name] >= 0 for name in peaks)


def test_attention_of_a_cpu_is_measured(tmp_path: Path, capsys):
    asked = ["--quick", "--threads", "1", "--rounds", "2", "--out", str(tmp_path)]
    assert cpu_attention.main(asked) == 0
    assert "times faster" in capsys.readouterr().out
    [row] = json.loads((tmp_path / "cpu-attention.json").read_text())["rows"]
    assert max(row["errors"].values()) < 1e-5
    assert row["times_faster"]["min"] > 0


def test_products_of_few_rows_are_measured(tmp_path: Path, capsys):
    assert (
        few_rows.main(["--quick", "--threads", "1", "--rounds", "1", "--out", str(tmp_path)]) == 0
    )
    assert "16 x 640 x 640" in capsys.readouterr().out
    [row] = json.loads((tmp_path / "few-rows.json").read_text())["rows"]
    assert max(row["errors"].values()) < 1e-5
    assert min(row["times_faster"].values()) > 0


def test_budgets_are_measured(tmp_path: Path, capsys):
    """Fewer bits, narrower masks and shared steps are fewer bytes; rounding errors grow."""
    assert budget.main(["--quick", "--shapes", "c", "--rounds", "1", "--out", str(tmp_path)]) == 0
    assert "masks anywhere, allowed no sharing" in capsys.readouterr().out
    result = json.loads((tmp_path / "budget.json").read_text())
    ends = []
    for own in result["template"]["masks"].values():
        sizes = [own["gib"][how] for how in ("lossless", "16bit", "8bit", "4bit")]
        for by_share in sizes:
            assert list(by_share.values()) == sorted(by_share.values(), reverse=True)
        ends.append([by_share["1"] for by_share in sizes])
        assert ends[-1] == sorted(ends[-1], reverse=True)
        assert all(one["gib"] <= 2.6 for one in own["chosen"].values())
    assert ends == sorted(ends, reverse=True)
    [shape] = result["shapes"]
    assert list(shape["bytes_per_step"].values()) == sorted(
        shape["bytes_per_step"].values(), reverse=True
    )
    for rows in shape["errors"].values():
        alone = rows[0]["errors"]
        assert alone["lossless"] < alone["16bit"] < alone["8bit"] < alone["4bit"] < 0.1
    smooth = shape["errors"]["smooth in time"]
    assert all(row["errors"]["lossless"] < row["held"] for row in smooth[1:])
    assert shape["seconds"]["8bit, share 2"]["over_all_kept"]["median"] > 0


def test_storage_is_measured(tmp_path: Path, capsys):
    """Bytes by kind add up, fewer bits are fewer bytes and more error."""
    assert (
        storage.main(["--quick", "--shapes", "a,c", "--rounds", "1", "--out", str(tmp_path)]) == 0
    )
    assert "8 against 16" in capsys.readouterr().out
    result = json.loads((tmp_path / "storage.json").read_text())
    assert "meaningless" in result["note"]
    for shape in result["shapes"]:
        sizes = []
        for held in shape["bytes_per_step"].values():
            assert sum(n for kind, n in held.items() if kind != "together") == held["together"]
            sizes.append(held["together"])
        assert sizes == sorted(sizes, reverse=True)
        assert 0.5 < shape["eight_to_sixteen"]["attention keys and values"] < 0.57
        for mask in shape["masks"]:
            for edit in mask["edits"]:
                errors = edit["errors"]
                assert errors["lossless"] < 1e-5
                assert errors["lossless"] < errors["16 bit"] < errors["8 bit"] < 0.05
                assert edit["met"] == (edit["eight_against_sixteen"] < 0.01)
        two, four = shape["sharing"]["by_steps"]
        assert four["bytes_per_step"]["8 bit"] < two["bytes_per_step"]["8 bit"] < sizes[2]
        assert len(four["errors_by_distance"]["changed"]["lossless"]) == 3


def test_reuse_is_timed_and_compared(tmp_path: Path):
    threads = str(torch.get_num_threads())
    assert reuse.main(["--quick", "--threads", threads, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "reuse.json").read_text())
    for mask in result["masks"]:
        rows = {row["side"]: row for row in mask["rows"]}
        assert rows["dense free"]["error_outside"] == 0
        assert rows["r=4 hold blended"]["error_outside"] == 0
        assert rows["r=2 hold free"]["error_outside"] < rows["r=8 hold free"]["error_outside"]
        assert rows["template of all calls free"]["error_inside"] < 1e-4
        assert rows["r=4 extrapolate free"]["full_calls"] == 3
        assert set(mask["seconds_per_call"]) >= {"module", "record", "earlier", "template"}
    assert len(result["not_smooth_in_time"]["errors"]) == 8


def test_stretches_are_timed_and_compared(tmp_path: Path, capsys):
    threads = str(torch.get_num_threads())
    assert stretches.main(["--quick", "--threads", threads, "--out", str(tmp_path)]) == 0
    assert "wide blocks" in capsys.readouterr().out
    result = json.loads((tmp_path / "stretches-quick.json").read_text())
    assert result["recorded_bytes"]["stretches"] > result["recorded_bytes"]["plain"]
    for mask in result["masks"]:
        rows = mask["rows"]
        assert [row["wide_blocks"] for row in rows] == [0, 1, 2]
        for less, more in zip(rows, rows[1:], strict=False):
            assert less["error"] > more["error"]
            assert less["flops"] < more["flops"]
            assert less["loaded_bytes"] > more["loaded_bytes"]
        assert rows[0]["error"] == pytest.approx(mask["without_stretches"]["error"], rel=1e-3)
        assert rows[-1]["error"] < 1e-4
        assert rows[-1]["loaded_bytes"] == 0


def test_attention_of_an_edit_is_counted(results: Path):
    """Every attention of the small UNet by hand, that over text included."""
    result = json.loads((results / "denoisers-a.json").read_text())
    for mask in result["masks"]:
        grid = masks.make(mask["kind"], 16, 16, mask["asked_ratio"])
        coarse = F.max_pool2d(grid[None].float(), 2)[0]
        fine_sites, coarse_sites = int(grid.sum()), int(coarse.sum())
        narrow, wide = SMALL_CONFIG["a"]["block_out_channels"]
        by_hand = 3 * attention_flops(fine_sites, 256 + 11, narrow)  # one down, two up
        by_hand += attention_flops(coarse_sites, 64 + 11, wide)  # the middle
        assert mask["flops"]["maskfx.attend"] == by_hand


def test_request_part_is_counted_apart(results: Path):
    """Keys and values of the text, for each of the four cross attentions."""
    result = json.loads((results / "denoisers-a.json").read_text())
    narrow, wide = SMALL_CONFIG["a"]["block_out_channels"]
    width = SMALL_CONFIG["a"]["cross_attention_dim"]
    assert result["flops"]["request"] == 2 * 2 * 11 * width * (3 * narrow + wide)


def attention_flops(queries: int, keys: int, channels: int) -> int:
    return 2 * 2 * queries * keys * channels


def test_dense_block_is_counted():
    from diffusers.models.attention import BasicTransformerBlock

    sites, text, width, cross = 20, 7, 64, 48
    block = BasicTransformerBlock(width, 2, 32, cross_attention_dim=cross).eval()
    with torch.no_grad():
        counted = count_flops(
            lambda: block(
                torch.randn(1, sites, width), encoder_hidden_states=torch.randn(1, text, cross)
            )
        )
    projections = (4 + 2) * 2 * sites * width**2 + 2 * 2 * text * cross * width
    feed_forward = 2 * sites * width * 8 * width + 2 * sites * 4 * width * width
    mixing = attention_flops(sites, sites + text, width)
    assert counted["total"] == projections + feed_forward + mixing


@pytest.mark.parametrize("asked", [0.05, 0.11, 0.35])
def test_strokes_cover_the_wanted_share(asked: float):
    mask = masks.make("strokes", 32, 48, asked, seed=3)
    assert int(mask.sum()) == round(asked * 32 * 48)
    assert torch.equal(mask, masks.make("strokes", 32, 48, asked, seed=3))
    assert not torch.equal(mask, masks.make("strokes", 32, 48, asked, seed=4))


def test_masks_of_ratio_one_are_full():
    assert all(bool(masks.make(kind, 8, 8, 1.0).all()) for kind in masks.KINDS)
    assert int(masks.make("square", 64, 64, 0.2).sum()) == 29**2


def test_sides_are_chosen_and_dropped():
    assert read_sides("ours") == OURS
    assert read_sides("dense,ours-eager") == ("dense", "ours-eager")
    assert "ours-prepack" not in read_sides("-ours-prepack")
    assert "dense" in read_sides("-ours-prepack")
    with pytest.raises(ValueError, match="--sides: 'fast' is none of dense"):
        read_sides("fast")


def test_sides_alternate():
    order: list[str] = []
    noted = {name: lambda _, n=name: order.append(n) for name in "xyz"}
    times = alternate(noted, 4)
    assert order == [*"xyz", *"zyx", *"yzx", *"xzy"]
    assert all(len(samples) == 4 for samples in times.values())


def test_ratio_is_taken_round_by_round():
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == figure([2.0, 3.0, 1.0])


def test_nan_is_an_error():
    wanted = torch.ones(3)
    assert relative_error(wanted * 1.5, wanted) == pytest.approx(0.5)
    assert relative_error(torch.tensor([1.0, torch.nan, 1.0]), wanted) == float("inf")


def test_rolling_updates_are_measured(tmp_path: Path, capsys):
    """Both sides write the same rows; the file has each part of both."""
    assert rolling.main(["--quick", "--out", str(tmp_path)]) == 0
    assert "one by one" in capsys.readouterr().out
    result = json.loads((tmp_path / "rolling-quick.json").read_text())
    wanted = [(width, sets) for width in rolling.WIDTHS for sets in rolling.SETS]
    assert [(row["width"], row["sets"]) for row in result["rows"]] == wanted
    for row in result["rows"]:
        assert row["written_bytes"] == 3 * 2 * 3 * 32 * 4 * row["width"]
        for parts in row["parts"].values():
            assert min(figure["min"] for figure in parts.values()) > 0


def test_transports_are_measured(tmp_path: Path, capsys):
    """Every side carries every size, and nothing stays in /dev/shm."""
    before = set(Path("/dev/shm").iterdir())
    assert transport.main(["--quick", "--rounds", "1", "--out", str(tmp_path)]) == 0
    assert "sending thread" in capsys.readouterr().out
    for row in json.loads((tmp_path / "transport.json").read_text())["rows"]:
        assert set(row["sides"]) == set(transport.KINDS)
        assert all(found["seconds"]["min"] > 0 for found in row["sides"].values())
    assert not [p for p in set(Path("/dev/shm").iterdir()) - before if p.name.startswith("mapped")]
