"""Programs on disk: another process captures nothing, and nothing stale or damaged is used."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn

import maskfx
from maskfx.compiler.artifact import artifact, graphs, key
from maskfx.compiler.artifact.plain import Unsavable
from maskfx.compiler.capture.capture import capture
from maskfx.runtime.programs import program_cache
from tests.factories.saved_programs import first_edit
from tests.factories.zoo import QUICK, ZOO

ROOT = Path(__file__).resolve().parents[3]
TINY = "AuraFlowTransformer2DModel"
EXPERTS = "HiDreamImageTransformer2DModel-experts"  # modules that stay whole
OTHERS = [name for name in ZOO if name not in (*QUICK, TINY, EXPERTS)]


def elsewhere(directory: Path, names: list[str]) -> list[dict[str, Any]]:
    """What a process that may not capture finds, a result for each case."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.factories.saved_programs", str(directory), *names],
        cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_other_process(directory: Path, names: list[str]) -> None:
    here = [first_edit(name, ZOO[name].sizes[0], str(directory / name)) for name in names]
    there = elsewhere(directory, names)
    for one, other in zip(here, there, strict=True):
        assert other["codes"] == one["codes"], one["name"]
        assert max(other["recording"], other["edit"]) < 1e-4, other
        assert other["compilations"] == one["compilations"], one["name"]


def test_constants_of_every_dtype_are_written() -> None:
    """Rotary tables may be complex numbers of twice the precision."""
    phases = torch.polar(torch.ones(3, dtype=torch.float64), torch.arange(3.0).double())
    constants = {"0": phases.conj(), "1": torch.arange(2), "2": phases.to(torch.complex64)}
    stored = safetensors.torch.load(safetensors.torch.save(artifact.as_real(constants)))
    found = artifact.as_complex(stored)
    assert found.keys() == constants.keys()
    for name, wanted in constants.items():
        assert found[name].dtype == wanted.dtype
        assert torch.equal(found[name], wanted)


def test_constants_of_unknown_dtypes_are_named(tmp_path: Path) -> None:
    packed = artifact.PackedCompilation("{}", "{}", {"0": torch.zeros(2, dtype=torch.complex32)})
    with (
        mock.patch.object(artifact, "pack", return_value=packed),
        pytest.raises(Unsavable, match="complex32"),
    ):
        artifact.save(mock.Mock(), {}, tmp_path / "x", nn.Identity())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["builtins eval", "os system", "_operator methodcaller"])
def test_a_file_cant_name_other_functions(target: str) -> None:
    with pytest.raises(Unsavable, match="doesn't know"):
        graphs.function_of(f"function {target}")


@pytest.mark.slow
def test_another_process_edits_with_saved_programs(tmp_path: Path) -> None:
    check_other_process(tmp_path, [TINY, "FluxTransformer2DModel", EXPERTS])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(OTHERS), 8))
def test_every_family_edits_with_saved_programs(tmp_path: Path, start: int) -> None:
    check_other_process(tmp_path, OTHERS[start : start + 8])


class Mixer(nn.Module):
    """A denoiser of four channels that is captured within a second."""

    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        self.power = power
        self.order = torch.randperm(8)  # no buffer: a constant of the graph
        self.enter = nn.Conv2d(4, 8, 3, padding=1)
        self.leave = nn.Conv2d(8, 4, 1)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(self.enter(sample))[:, self.order] * self.power
        return self.leave(hidden * torch.cos(timestep)[:, None, None, None])


def inputs(height: int = 8, width: int = 12, seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "sample": torch.randn(1, 4, height, width, generator=draw),
        "timestep": torch.tensor([3.0]),
    }


def mixer(power: float = 1.0) -> Mixer:
    torch.manual_seed(1)
    return Mixer(power).eval()


def edit(
    module: nn.Module, directory: Path, **how: Any
) -> tuple[int, int, maskfx.CompiledDenoiser]:
    """Record and edit; return how often the module was captured and programs were verified."""
    prove, own = program_cache.ProgramCache._prove, capture
    with (
        mock.patch.object(program_cache, "capture", side_effect=own) as captured,
        mock.patch.object(program_cache.ProgramCache, "_prove", autospec=True) as proved,
    ):
        proved.side_effect = prove
        denoiser = maskfx.compile(module, programs=directory, **how)
        wanted = module(**inputs())
        _, cache = denoiser.record(**inputs())
        mask = torch.zeros(8, 12, dtype=torch.bool)
        mask[2:5, 3:7] = True
        got = denoiser.edit([maskfx.EditStep(inputs(), mask, cache)])[0]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    return captured.call_count, proved.call_count, denoiser


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.program"))


def test_a_second_start_captures_and_verifies_nothing(tmp_path: Path) -> None:
    assert edit(mixer(), tmp_path)[:2] == (1, 1)
    captured, proved, denoiser = edit(mixer(), tmp_path)
    assert (captured, proved) == (0, 0)
    assert len(files(tmp_path)) == 1
    assert "module" not in vars(denoiser.compilations[0].capture), "the captured graph was read"


def test_a_captured_graph_that_cant_be_read_serves_no_other_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(mixer(), tmp_path)
    denoiser = edit(mixer(), tmp_path)[2]
    with (
        mock.patch.object(artifact, "read_graph", side_effect=KeyError("an operator")),
        mock.patch.object(program_cache, "capture", side_effect=capture) as captured,
        caplog.at_level(logging.WARNING),
    ):
        found, _ = denoiser.record(**inputs(20, 16))
    torch.testing.assert_close(found, mixer()(**inputs(20, 16)))
    assert captured.call_count == 1
    assert "captured graph" in caplog.text


def test_other_weights_are_verified_again_and_captured_once(tmp_path: Path) -> None:
    edit(mixer(), tmp_path)
    other = mixer()
    other.leave.weight.data.mul_(2)
    assert edit(other, tmp_path)[:2] == (0, 1)
    assert edit(mixer(), tmp_path)[:2] == (0, 0), "the first weights' verdicts were lost"


@pytest.mark.parametrize("changed", ["settings", "power", "shape", "version"])
def test_what_changes_the_program_is_captured_anew(tmp_path: Path, changed: str) -> None:
    edit(mixer(), tmp_path)
    module, how = mixer(), {}
    if changed == "settings":
        how = {"stretches": True}
    if changed == "power":
        module = mixer(power=2.0)
    if changed == "shape":
        module.enter = nn.Conv2d(4, 8, 1)
    seen = {"torch": "0.1"} if changed == "version" else {}
    with mock.patch("maskfx.compiler.artifact.key.versions", return_value=seen):
        if changed == "version":
            assert edit(module, tmp_path, **how)[0] == 1
    if changed != "version":
        assert edit(module, tmp_path, **how)[0] == 1


def test_a_model_whose_code_changed_is_captured_anew(tmp_path: Path) -> None:
    """The factor stands in a helper's file, which neither class nor version names."""
    programs = tmp_path / "programs"

    def start(factor: float) -> tuple[int, nn.Module]:
        for name, text in {
            "own_scale": f"def scaled(x):\n    return x * {factor}\n",
            "own_model": """
                import torch, own_scale
                class Own(torch.nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.leave = torch.nn.Conv2d(4, 4, 1)
                    def forward(self, sample, timestep):
                        return own_scale.scaled(self.leave(sample)) + timestep[:, None, None, None]
                """,
        }.items():
            path = tmp_path / f"{name}.py"
            path.write_text(textwrap.dedent(text))
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            found = importlib.util.module_from_spec(spec)
            monkey.setitem(sys.modules, name, found)
            spec.loader.exec_module(found)
        key.hash_of_file.cache_clear()
        torch.manual_seed(1)
        module = sys.modules["own_model"].Own().eval()
        return edit(module, programs)[0], module

    with pytest.MonkeyPatch.context() as monkey:
        assert [start(2.0)[0], start(2.0)[0], start(3.0)[0]] == [1, 0, 1]


@pytest.mark.parametrize(
    "damage", ["cut", "document", "captured", "constants", "empty", "verdicts"]
)
def test_damaged_files_are_logged_and_replaced(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit(mixer(), tmp_path)
    (path,) = files(tmp_path)
    data = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "document":
            path.write_bytes(data.replace(b"silu", b"relu"))
        case "captured":
            before, name, after = data.partition(b'"maskfx.capture":')
            path.write_bytes(before + name + after.replace(b"silu", b"relu", 1))
        case "constants":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "empty":
            path.write_bytes(b"")
        case "verdicts":
            (path.parent / "verdicts.json").write_text("[")
    with caplog.at_level(logging.WARNING):
        captured = edit(mixer(), tmp_path)[0]
    if damage == "verdicts":
        assert captured == 0
        return
    assert captured == 1
    assert "saved program" in caplog.text
    assert edit(mixer(), tmp_path)[:2] == (0, 0), "the damaged file was not replaced"


def test_a_program_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    """Even where the document's own hash is right."""
    edit(mixer(), tmp_path)
    (path,) = files(tmp_path)
    module = mixer()
    weights = dict(module.named_parameters())
    kept = artifact.load(path, weights, module)
    assert kept.program is not None
    kept.program.code = "0" * 64
    artifact.save(kept, weights, path, module)
    with pytest.raises(artifact.UnreadableArtifact, match="something else"):
        artifact.load(path, weights, module)


def test_a_folder_that_cant_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        for power in (1.0, 2.0):  # two programs
            assert edit(mixer(power), blocked)[0] == 1
    assert caplog.text.count("can't be saved") == 1


def test_a_folder_that_cant_be_changed_is_read(tmp_path: Path) -> None:
    edit(mixer(), tmp_path)
    refused = mock.Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted"))
    with mock.patch.object(os, "utime", refused):
        assert edit(mixer(), tmp_path)[:2] == (0, 0)
    refused.assert_called()


def test_a_folder_that_cant_be_listed_holds_nothing(tmp_path: Path) -> None:
    """Neither a reading start nor the removal of old keys ends a call."""
    with mock.patch.object(Path, "glob", side_effect=PermissionError(errno.EACCES, "denied")):
        assert edit(mixer(), tmp_path)[0] == 1
    with mock.patch.object(Path, "iterdir", side_effect=FileNotFoundError(errno.ENOENT, "gone")):
        assert edit(mixer(power=2.0), tmp_path)[0] == 1
    assert len(files(tmp_path)) == 2


def test_what_the_system_prevented_is_tried_again(tmp_path: Path) -> None:
    lacking = OSError(errno.EMFILE, "Too many open files")
    with mock.patch("maskfx.compiler.capture.capture.export_as_answered", side_effect=lacking):
        denoiser = edit(mixer(), tmp_path)[2]
    assert [one.program for one in denoiser.compilations] == [None]
    assert not files(tmp_path)
    captured, _, denoiser = edit(mixer(), tmp_path)
    assert captured == 1
    assert denoiser.programs


class Sorted(Mixer):
    """No export: Python reads the numbers."""

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        order = sorted(range(4), key=lambda i: float(self.leave.weight[i].sum()))
        return super().forward(sample, timestep)[:, order]


def test_a_module_without_a_program_is_not_tried_again(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = Sorted().eval()
    captured, _, denoiser = edit(module, tmp_path)
    # as a batch, as a batch of one, and as a sample of a call that is split; for the first and the
    # last of them a look for values to hold, which exports nothing
    assert captured == 5
    assert [one.program for one in denoiser.compilations] == [None]
    captured, _, again = edit(module, tmp_path)
    assert captured == 0
    assert again.compilations[0].reasons == denoiser.compilations[0].reasons


def test_a_saved_program_serves_other_sizes(tmp_path: Path) -> None:
    """One more comparison with the module, but no capture; the verdict is kept."""
    edit(mixer(), tmp_path)
    for compared in (1, 0):
        captured, _, denoiser = edit(mixer(), tmp_path)
        assert captured == 0
        with mock.patch.object(program_cache, "capture", side_effect=AssertionError):
            found, _ = denoiser.record(**inputs(20, 16))
        torch.testing.assert_close(found, mixer()(**inputs(20, 16)))
        sizes = json.loads(next(tmp_path.glob("*/verdicts.json")).read_text())
        ((captures, *_),) = [list(one["captures"].values()) for one in sizes.values()]
        assert len(captures["sizes"]) == 2, compared


def test_weights_of_zero_leave_no_verdict(tmp_path: Path) -> None:
    """Zeros hide errors of the layers before them, so the next start verifies again."""
    zero = mixer()
    zero.leave.weight.data.zero_()
    assert edit(zero, tmp_path)[:2] == (1, 1)
    assert edit(zero, tmp_path)[:2] == (0, 1)
