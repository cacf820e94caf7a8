"""Files in ONNX: their names, and weights behind 2 GB."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from maskfx.export.formats import onnx as formats
from tests.passes.tools import error


class Repeating(nn.Module):
    """Returns a value twice, and an input as it is."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made = x @ y
        return made, x, made, y.to(torch.float16)


def test_results_that_are_inputs_leave_these_their_names(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    x, y = torch.randn(3, 5), torch.randn(5, 4)
    shapes = {"x": {0: Dim.AUTO}, "y": {}}
    program = torch.export.export(Repeating(), (x, y), dynamic_shapes=shapes)
    whole, part = tmp_path / "whole.onnx", tmp_path / "part.onnx"
    names = ["first", "x_again", "third", "half"]
    formats.OnnxWriter(tmp_path).write(program, {whole: names, part: names[:2]})
    for path, count in ((whole, 4), (part, 2)):
        session = runtime.InferenceSession(str(path))
        assert [value.name for value in session.get_inputs()] == ["x", "y"]
        assert [value.name for value in session.get_outputs()] == names[:count]
        x = torch.randn(7, 5)
        found = session.run(None, {"x": x.numpy(), "y": y.numpy()})
        for a, b in zip(found, Repeating()(x, y), strict=False):
            assert a.dtype == b.numpy().dtype
            assert error(torch.from_numpy(a), b) < 1e-5


def test_weights_behind_2_gigabytes_are_found(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    with (tmp_path / formats.WEIGHTS).open("wb") as file:
        file.truncate(2**31 + 5)  # takes no room: the file has a hole
    module, x = nn.Linear(32, 32), torch.randn(3, 32)
    program = torch.export.export(module, (x,))
    path = tmp_path / "x.onnx"
    formats.OnnxWriter(tmp_path).write(program, {path: ["out"]})
    assert (tmp_path / formats.WEIGHTS).stat().st_size > 2**31 + module.weight.nbytes
    [found] = runtime.InferenceSession(str(path)).run(None, {"input": x.numpy()})
    assert error(torch.from_numpy(found), module(x)) < 1e-5


class Splitting(nn.Module):
    """Splits into parts whose sizes are known or not."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second, last = x.split([2, x.shape[1] - 5, 3], 1)
        return first, second * 2.0, last, *x.split([1, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_splits_are_slices(tmp_path: Path, dtype: torch.dtype) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    x = torch.randn(4, 9)
    program = torch.export.export(Splitting(), (x.to(dtype),), dynamic_shapes=({1: Dim.AUTO},))
    path = tmp_path / "x.onnx"
    formats.OnnxWriter(tmp_path).write(program, {path: list("abcde")})
    assert not {"SplitToSequence", "SequenceAt"} & {n.op_type for n in onnx.load(path).graph.node}
    if dtype is torch.float32:
        x = torch.randn(4, 13)
        found = runtime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
        for a, b in zip(found, Splitting()(x), strict=True):
            assert torch.equal(torch.from_numpy(a), b)


class Moving(nn.Module):
    """Rolls by halves of a size, and splits into chunks of an unknown one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        half = x.shape[1] // 2
        rolled = x.roll((half, 1), (1, 0)).roll(-half, 1) * self.weight[:, None]
        return rolled, *x.cos().chunk(2, 1), *x.sin().split(half, 1)


def test_rolls_and_chunks_of_unknown_sizes_are_slices(tmp_path: Path) -> None:
    """A result may have the name of a weight."""
    runtime = pytest.importorskip("onnxruntime")
    shapes = ({1: 2 * Dim("half", min=2)},)
    program = torch.export.export(Moving(), (torch.randn(4, 8),), dynamic_shapes=shapes)
    path = tmp_path / "x.onnx"
    names = ["weight", *"abcd"]
    formats.OnnxWriter(tmp_path).write(program, {path: names})
    for width in (8, 12):
        x = torch.randn(4, width)
        found = runtime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
        for a, b in zip(found, Moving()(x), strict=True):
            assert error(torch.from_numpy(a), b) < 1e-5


class Pooling(nn.Module):
    """Pools a picture of any size to a few parts, and a fixed one."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        pools = nn.functional.adaptive_avg_pool2d, nn.functional.adaptive_max_pool2d
        found = [pool(x, size) for pool in pools for size in ((2, 3), (1, 1), (4, 1))]
        lines = (
            nn.functional.adaptive_avg_pool1d(x[0], 3),
            nn.functional.adaptive_max_pool1d(x[0], 2),
        )
        return *found, *lines, nn.functional.adaptive_avg_pool2d(x[:, :, :5, :7], (2, 3))


def test_pools_have_the_parts_of_pytorch(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    shapes = ({2: Dim.AUTO, 3: Dim.AUTO},)
    program = torch.export.export(Pooling(), (torch.randn(2, 3, 9, 14),), dynamic_shapes=shapes)
    path = tmp_path / "x.onnx"
    formats.OnnxWriter(tmp_path).write(program, {path: list("abcdefghi")})
    for height, width in ((8, 12), (7, 10), (11, 9)):
        x = torch.randn(2, 3, height, width)
        found = runtime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
        for a, b in zip(found, Pooling()(x), strict=True):
            assert error(torch.from_numpy(a), b) < 1e-5


class Grouping(nn.Module):
    """Convolutions with weights of each sample."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        b, c, h, w = x.shape
        pixels, each = x.reshape(1, b * c, h, w), weight.flatten(0, 1)
        conv = nn.functional.conv2d
        lines = nn.functional.conv1d(pixels.flatten(2), each[:, :, 0], padding=1, groups=b)
        return (
            conv(pixels, each, bias, padding=1, groups=b),
            conv(pixels, each, None, (2, 1), (0, 2), (1, 2), b),
            lines,
        )


def test_groups_that_are_samples_are_products(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")

    def given(b: int, h: int, w: int) -> dict[str, Tensor]:
        weight = torch.randn(b, 5, 4, 3, 3)
        return {"x": torch.randn(b, 4, h, w), "weight": weight, "bias": torch.randn(b * 5)}

    batch = Dim("batch", min=2)
    program = torch.export.export(
        Grouping(),
        (),
        given(3, 8, 10),
        dynamic_shapes={
            "x": {0: batch, 2: Dim.AUTO, 3: Dim.AUTO},
            "weight": {0: batch},
            "bias": {0: 5 * batch},
        },
    )
    path = tmp_path / "x.onnx"
    formats.OnnxWriter(tmp_path).write(program, {path: list("abc")})
    for sizes in ((2, 7, 9), (1, 12, 8)):
        inputs = given(*sizes)
        arrays = {name: value.numpy() for name, value in inputs.items()}
        found = runtime.InferenceSession(str(path)).run(None, arrays)
        for a, b in zip(found, Grouping()(**inputs), strict=True):
            assert error(torch.from_numpy(a), b) < 1e-5


class Mixing(nn.Module):
    """Computes with numbers of several types, which ONNX wants to be cast."""

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return x + n, x * 2 + 1, n / 2, x > n, x.double() * n - x, torch.outer(x[0], n[0] + 0.5)


def test_casts_between_types_are_written(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    x, n = torch.randn(3, 5), torch.arange(15).view(3, 5)
    program = torch.export.export(Mixing(), (x, n), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    path = tmp_path / "x.onnx"
    formats.OnnxWriter(tmp_path).write(program, {path: list("abcdef")})
    found = runtime.InferenceSession(str(path)).run(None, {"x": x.numpy(), "n": n.numpy()})
    for a, b in zip(found, Mixing()(x, n), strict=True):
        assert a.dtype == b.numpy().dtype
        assert error(torch.from_numpy(a).double(), b.double()) < 1e-6


class Joining(nn.Module):
    """Joins values of several types, and copies a value into the rows of several samples."""

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        rows = x.new_zeros(2, 3 + x.shape[0], 5)
        rows[:, 3:].copy_(n)
        return torch.cat([x.half(), x]), torch.concat([x, n], -1), torch.stack([x.half(), n]), rows


def test_values_of_several_types_are_joined_and_copied(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    x, n = torch.randn(3, 5), torch.arange(15).view(3, 5)
    program = torch.export.export(Joining(), (x, n), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}))
    program = program.run_decompositions({})
    path = tmp_path / "x.onnx"
    formats.OnnxWriter(tmp_path).write(program, {path: list("abcd")})
    found = runtime.InferenceSession(str(path)).run(None, {"x": x.numpy(), "n": n.numpy()})
    for a, b in zip(found, Joining()(x, n), strict=True):
        assert a.dtype == b.numpy().dtype
        assert a.shape == b.shape
        assert error(torch.from_numpy(a).double(), b.double()) < 1e-6


class Turned(nn.Module):
    """An einsum of bfloat16, which ONNX has for wider types only."""

    def forward(self, x: Tensor) -> Tensor:
        narrow = x.bfloat16()
        return torch.einsum("ab,cb->ac", narrow, narrow)


def test_einsums_of_bfloat16_are_computed_in_float32(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    x, path = torch.randn(3, 5), tmp_path / "x.onnx"
    program = torch.export.export(Turned(), (x,), dynamic_shapes=({0: Dim.AUTO},))
    formats.OnnxWriter(tmp_path).write(program, {path: ["out"]})
    onnx = pytest.importorskip("onnx")
    model = onnx.load(path)
    [result] = model.graph.output
    assert result.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
    [einsum] = [node for node in model.graph.node if node.op_type == "Einsum"]
    del model.graph.output[:]
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(einsum.output[0], onnx.TensorProto.FLOAT, None)
    )
    session = runtime.InferenceSession(model.SerializeToString())
    [found] = session.run(None, {"x": x.numpy()})
    wide = x.bfloat16().float()
    assert error(torch.from_numpy(found), wide @ wide.T) < 1e-6


class OneHead(nn.Module):
    """Attention of several heads over keys of one."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, k)


def test_one_head_of_keys_serves_all(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 6, 8)
    program = torch.export.export(OneHead(), (q, k), dynamic_shapes=({2: Dim.AUTO}, {}))
    path = tmp_path / "x.onnx"
    formats.OnnxWriter(tmp_path).write(program, {path: ["out"]})
    [found] = runtime.InferenceSession(str(path)).run(None, {"q": q.numpy(), "k": k.numpy()})
    assert error(torch.from_numpy(found), OneHead()(q, k)) < 1e-5


def test_no_operator_runs_again_and_none_is_decomposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the graph was traced or run again")

    class Outer(Splitting):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return super().forward(torch.outer(x[:, 0], x[0]))[:2]

    program = torch.export.export(Outer(), (torch.randn(4, 9),))
    monkeypatch.setattr(ExportedProgram, "run_decompositions", never)
    monkeypatch.setattr(torch.fx.Interpreter, "call_function", never)
    path = tmp_path / "x.onnx"
    formats.OnnxWriter(tmp_path).write(program, {path: list("ab")})
    assert path.exists()
