"""Complex numbers become pairs of real ones, with the same results, in ONNX too."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from maskfx.errors import CompileError
from maskfx.export.formats.complex_numbers import spell_complex
from maskfx.export.formats.onnx import OnnxWriter
from tests.passes.tools import error


class Rotated(nn.Module):
    """Turns the features of each token by an angle from a table, as position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(32)[:, None] * torch.arange(1, 5) / 9
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        count = x.shape[1]
        high, low = self.table.to(x.device, torch.complex64).split([3, 1], dim=-1)  # type: ignore[operator]
        turns = torch.cat([low[:count], high[:count]], -1)
        turns = turns * torch.polar(scale, -scale)
        turns = turns.unsqueeze(-2).expand(-1, 2, -1).reshape(count, 1, 2, 4)
        turns = turns.squeeze((-3, -4)).transpose(-2, -3).permute(1, 0, -1).flatten(-2)
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        rows = turns.index_select(-1, torch.arange(8)).unflatten(-1, (2, 4))[:, 0]
        rows = self.chosen(rows, count)
        turned = torch.view_as_real(-(pairs * rows) + pairs * 2 + pairs * scale)
        return turned.flatten(-2) + x

    def chosen(self, rows: Tensor, count: int) -> Tensor:
        """Rows by their numbers, the last ones padded and replaced."""
        numbers = torch.arange(count).flip(0)
        rows = rows[numbers.int()].gather(-1, numbers[:, None].expand(-1, 4) % 4)
        short = nn.functional.pad(rows[:, :1], (1, 2, 0, 1))
        both = nn.utils.rnn.pad_sequence([rows[1:], short], batch_first=True).repeat(1, 1, 1)
        return torch.where(numbers[:, None] > 2, both[1, 1:], both[0, 1:] + rows)


def program_of(module: nn.Module) -> tuple[ExportedProgram, Callable[[int], tuple[Tensor, Tensor]]]:
    def values(count: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(count)
        return torch.randn(2, count, 8, generator=draw), torch.rand(4, generator=draw)

    shapes = {"x": {1: Dim.AUTO}, "scale": None}
    return torch.export.export(module, values(7), dynamic_shapes=shapes), values


def test_results_are_the_same_in_onnx(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    module = Rotated()
    program, values = program_of(module)
    OnnxWriter(tmp_path).write(program, {tmp_path / "x.onnx": ["out"]})
    complex_left = [n for n in program.graph.nodes if "complex" in str(n.meta.get("val"))]
    assert not complex_left
    session = runtime.InferenceSession(str(tmp_path / "x.onnx"))
    for count in (7, 12):
        x, scale = values(count)
        [found] = session.run(None, {"x": x.numpy(), "scale": scale.numpy()})
        assert error(torch.from_numpy(np.array(found)), module(x, scale)) < 1e-6


class Written(nn.Module):
    """Angles of a sequence are written over zeros, as those of joint sequences are."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        count = x.shape[1]
        turns = torch.polar(scale.expand(count, 4), x[0, :, :4])
        rows = torch.zeros(2, count + 1, 4, dtype=torch.complex64)
        rows[0, 1:] = turns
        rows[1, :count] = turns * scale
        rows[:, :, -1] = rows[1, :, 0]
        return torch.view_as_real(rows)


def test_writes_to_complex_numbers_are_the_same_in_onnx(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    program, values = program_of(Written())
    OnnxWriter(tmp_path).write(program.run_decompositions({}), {tmp_path / "x.onnx": ["out"]})
    session = runtime.InferenceSession(str(tmp_path / "x.onnx"))
    for count in (7, 12):
        x, scale = values(count)
        [found] = session.run(None, {"x": x.numpy(), "scale": scale.numpy()})
        assert error(torch.from_numpy(np.array(found)), Written()(x, scale)) < 1e-6


def test_a_graph_without_them_is_left_alone() -> None:
    program, _ = program_of(Plain())
    before = program.graph_module.code
    spell_complex(program)
    assert program.graph_module.code == before


def test_an_operator_without_a_rule_is_named() -> None:
    program, _ = program_of(Turned())
    with pytest.raises(CompileError, match=r"complex numbers in aten.*(angle|fft).*aoti or pt2"):
        spell_complex(program)


class Plain(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale.sum()


class Turned(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.view_as_complex(x.unflatten(-1, (-1, 2))).angle() + scale
