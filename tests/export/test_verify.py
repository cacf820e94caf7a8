"""The arguments with which written graphs are compared: valid for any denoiser."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.export.exporter import export
from maskfx.export.graph_set import GraphSet
from maskfx.export.verify import is_index
from tests.export.tiny import arguments, tiny


class Chosen(nn.Module):
    """Reads a row of a table by one argument, and multiplies by another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1, 4)

    def forward(self, x: Tensor, style: Tensor, count: Tensor) -> Tensor:
        return x * count + self.table(style[0].reshape(-1))


def test_numbers_that_choose_rows_are_known_from_those_that_count() -> None:
    given = torch.ones(2, 4), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    program = torch.export.export(Chosen(), given)
    places = {str(node.target): node for node in program.graph.find_nodes(op="placeholder")}
    assert {name: is_index(places[name]) for name in ("x", "style", "count")} == {
        "x": False,
        "style": True,
        "count": False,
    }


def test_a_graph_that_its_runtime_cant_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> list[Tensor]:
        raise RuntimeError("a reshape of 16 to 48")

    monkeypatch.setattr(GraphSet, "run", failing)
    text = "a graph of Tiny can't be run: RuntimeError: a reshape of 16 to 48; nothing was written"
    with pytest.raises(maskfx.CompileError, match=text):
        export(tiny(), tmp_path / "x", format="pt2", part="dense", example_inputs=arguments())
    assert not list(tmp_path.iterdir())
