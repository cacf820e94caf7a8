"""Choices of configurations: measured once per bucket, kept in a file, and read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from maskfx.ops.kernels import tuning
from maskfx.ops.kernels.tuning import Config, Tuner, bucket, configured

CONFIGS: tuple[Config, ...] = ({"BLOCK": 16}, {"BLOCK": 32}, {"BLOCK": 64})
SECONDS = {16: 3.0, 32: 1.0, 64: 2.0}


class Device:
    """Measures by a table, and counts."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.failing: set[int] = set()

    def run(self, config: Config) -> None:
        if config["BLOCK"] in self.failing:
            raise RuntimeError("out of resources")
        self.ran.append(config["BLOCK"])

    def measure(self, run: Callable[[], object]) -> float:
        run()
        return SECONDS[self.ran[-1]]

    def choose(self, tuner: Tuner, *shape: object, kernel: str = "attend") -> int:
        return tuner.choose("GPU", kernel, shape, CONFIGS, self.run)["BLOCK"]


def test_the_fastest_is_measured_once_and_kept(tmp_path: Path) -> None:
    device, path = Device(), tmp_path / "deep" / "kernels.json"
    tuner = Tuner(path, device.measure)
    assert device.choose(tuner, 128) == 32
    assert device.choose(tuner, 128) == 32
    assert device.ran == [16, 32, 64]
    assert device.choose(Tuner(path, device.measure), 128) == 32
    assert len(device.ran) == 3
    assert device.choose(tuner, 256) == 32
    assert device.choose(tuner, 128, kernel="other") == 32
    assert len(device.ran) == 9
    assert len(json.loads(path.read_text())) == 3
    assert list(path.parent.iterdir()) == [path]  # no temporary files


def test_what_fails_is_passed_over() -> None:
    device = Device()
    device.failing = {32}
    assert device.choose(Tuner(None, device.measure)) == 64
    device.failing = {16, 32, 64}
    with pytest.raises(RuntimeError, match="out of resources"):
        device.choose(Tuner(None, device.measure))


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 3}', '{"a": {"BLOCK": "x"}}', "{"])
def test_a_damaged_file_is_made_again(tmp_path: Path, text: str) -> None:
    device, path = Device(), tmp_path / "kernels.json"
    path.write_text(text)
    assert device.choose(Tuner(path, device.measure)) == 32
    assert device.choose(Tuner(path, device.measure)) == 32
    assert len(device.ran) == 3


def test_choices_of_other_versions_and_lists_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, path = Device(), tmp_path / "kernels.json"
    device.choose(Tuner(path, device.measure))
    monkeypatch.setattr(tuning, "VERSION", tuning.VERSION + 1)
    device.choose(Tuner(path, device.measure))
    assert len(device.ran) == 6
    known = json.loads(path.read_text())
    path.write_text(json.dumps({key: {"BLOCK": 8} for key in known}))
    assert device.choose(Tuner(path, device.measure)) == 32


def test_two_processes_keep_each_others_choices(tmp_path: Path) -> None:
    device, path = Device(), tmp_path / "kernels.json"
    one, two = Tuner(path, device.measure), Tuner(path, device.measure)
    device.choose(one, 1)
    device.choose(two, 2)
    device.choose(one, 3)
    device.choose(Tuner(path, device.measure), 2)
    assert len(device.ran) == 9


def test_a_folder_that_cant_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    device = Device()
    assert device.choose(Tuner(tmp_path / "file" / "kernels.json", device.measure)) == 32


def test_nothing_is_measured_without_a_gpu() -> None:
    device = Device()
    assert configured(torch.device("cpu"), "attend", (), CONFIGS, device.run) == CONFIGS[0]
    assert device.ran == []


def test_buckets() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


@pytest.mark.parametrize(
    ("raised", "seconds"), [(None, 0.002), (RuntimeError("no capture"), 0.005)]
)
def test_what_cannot_be_captured_is_timed_with_its_launches(
    raised: Exception | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    testing = pytest.importorskip("triton.testing")

    def captured(run: Callable[[], object], rep: int) -> float:
        if raised is not None:
            raise raised
        return 2.0

    monkeypatch.setattr(testing, "do_bench_cudagraph", captured)
    monkeypatch.setattr(testing, "do_bench", lambda run, warmup, rep: 5.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ran: list[int] = []
    assert tuning.measure_on_gpu(lambda: ran.append(1)) == seconds
    assert ran == [1], "compiled before the capture"


def test_a_full_device_is_reported_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("triton.testing")

    def full(run: Callable[[], object], rep: int) -> float:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(testing, "do_bench_cudagraph", full)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        tuning.measure_on_gpu(lambda: None)
