"""A denoiser on the meta device is exported from its files: never run, never loaded as a whole."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maskfx
from maskfx.compiler.capture.captured import Capture
from maskfx.export.exporter import export
from maskfx.export.formats import weight_data
from maskfx.export.manifest import read_manifest
from maskfx.export.verify import verify
from maskfx.export.weight_files import WeightFiles
from maskfx.export.write_only import UncomparedDenoiser
from maskfx.runtime.programs import program_cache
from maskfx.runtime.programs.proof import run_module
from tests.export.tiny import Tiny, arguments, tiny
from tests.factories.zoo import ZOO

FLUX, XL = "FluxTransformer2DModel", "UNet2DConditionModel-sdxl"
REAL = [FLUX, pytest.param(XL, marks=pytest.mark.slow)]


def on_meta(module: nn.Module) -> nn.Module:
    """A module of the same config without weights, as a large one is built."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped,unused-ignore]

    with init_empty_weights():
        made: nn.Module = type(module).from_config(module.config)  # type: ignore[attr-defined]
    return made.eval().requires_grad_(False)


def saved(module: Any, folder: Path) -> Path:
    """Its weights in several files."""
    module.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the denoiser was run")

    monkeypatch.setattr(Capture, "_agrees", never)
    monkeypatch.setattr(program_cache.ProgramCache, "_prove", never)
    monkeypatch.setattr(program_cache, "run_module", never)


@pytest.mark.parametrize("name", REAL)
def test_onnxruntime_computes_what_the_denoiser_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    case = ZOO[name]
    module, sizes = case.build(), (case.sizes[0], case.sizes[2])
    weights, empty = saved(module, tmp_path / "weights"), on_meta(module)
    with monkeypatch.context() as patched:
        runs_nothing(patched)
        given = case.inputs(sizes[0], 0)
        found = export(empty, tmp_path / "x", example_inputs=given, weights=weights, compare=False)
    assert all(weight.is_meta for weight in empty.parameters()), "it has its own weights again"
    assert not found.verdicts
    why = {"capture": "compare=False", "graphs": "compare=False: the denoiser isn't run"}
    assert read_manifest(tmp_path / "x")["not_compared"] == found.not_compared["denoiser"] == why
    verdicts = verify(module, tmp_path / "x", [case.inputs(size, 1) for size in sizes])
    assert {verdict.graph for verdict in verdicts} == {"edit", "record", "dense"}
    assert len({str(verdict.sizes) for verdict in verdicts}) == 2
    assert max(verdict.error for verdict in verdicts) < 1e-4


@pytest.mark.slow
def test_weights_in_16_bits_are_the_files_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    case = ZOO[FLUX]
    module = case.build().to(torch.bfloat16)
    weights, given = saved(module, tmp_path / "weights"), case.inputs(case.sizes[0], 0)
    given = {n: half(value) for n, value in given.items()}
    monkeypatch.setattr(weight_data, "BLOCK", 1000)  # no weight in one piece
    monkeypatch.setattr(weight_data, "bytes_of", not_of(WeightFiles(weights).tensors))
    export(on_meta(module), tmp_path / "x", example_inputs=given, weights=weights, compare=False)
    data = (tmp_path / "x" / "weights.data").read_bytes()
    held: dict[str, set[Any]] = {}
    for path in (tmp_path / "x").glob("*.onnx"):
        held[path.stem] = set()
        for one in onnx.load(path, load_external_data=False).graph.initializer:
            place = {entry.key: entry.value for entry in one.external_data}
            first = int(place.get("offset", 0))
            found = data[first : first + int(place["length"])] if place else one.raw_data
            held[path.stem].add((tuple(one.dims), found))
    large = [w for w in module.parameters() if w.nbytes >= 1024]
    side = set().union(*(held[name] for name in held if name.startswith("side")))
    for graph in ("edit", "record", "dense"):
        own = held[graph] if graph == "dense" else held[graph] | side
        assert all((tuple(w.shape), bytes(memory_of(w))) in own for w in large)
    assert len(data) < 1.2 * sum(w.nbytes for w in module.parameters()) + 4096 * len(large)


def half(value: object) -> object:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16)
    return value


def memory_of(value: Tensor) -> memoryview:
    return value.reshape(-1).view(torch.uint8).numpy().data


def not_of(files: Mapping[str, Tensor]) -> Any:
    """What gives a tensor's memory, but not the memory of one that lies in the files."""
    shapes = {tuple(value.shape) for value in files.values() if value.nbytes >= 1024}

    def memory(value: Tensor) -> memoryview:
        assert tuple(value.shape) not in shapes, "a weight of the files was read in one piece"
        return memory_of(value)

    return memory


def test_without_a_comparison_other_formats_hold_weights_in_their_layout(tmp_path: Path) -> None:
    found = export(tiny(), tmp_path / "x", format="pt2", example_inputs=arguments(), compare=False)
    assert set(found.not_compared["denoiser"]) == {"capture", "graphs"}
    verdicts = verify(tiny(), tmp_path / "x", [arguments(), arguments(2, 6, 10, 9)])
    assert max(verdict.error for verdict in verdicts) < 1e-4


def test_graphs_are_compared_where_that_is_asked_for(tmp_path: Path) -> None:
    found = export(
        tiny(), tmp_path / "x", format="pt2", example_inputs=arguments(), compare=False, verify=True
    )
    assert {verdict.graph for verdict in found.verdicts["denoiser"]} == {"edit", "record", "dense"}
    assert found.not_compared["denoiser"] == {"capture": "compare=False"}


def test_weights_of_a_program_that_is_only_written_take_no_memory() -> None:
    for layouts in (False, True):
        one = UncomparedDenoiser(tiny(), arguments(), layouts)
        [program] = one.programs.values()
        derived = [getattr(program.module, item.name) for item in program.interface.derived]
        assert derived
        assert all(weight.is_meta is not layouts for weight in derived)


class Filling(Tiny):
    """Fills a table at its first call, from sizes alone."""

    table: Tensor | None = None

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 4)[:, None, None]
        return super().forward(sample + self.table, timestep, encoder_hidden_states)


def test_a_module_that_fills_tables_is_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def dense(module: nn.Module, inputs: dict[str, Any]) -> Any:
        runs.append(inputs)
        return run_module(module, inputs)

    monkeypatch.setattr(program_cache, "run_module", dense)
    module = Filling().eval().requires_grad_(False)
    export(module, tmp_path / "x", format="pt2", example_inputs=arguments(), compare=False)
    assert len(runs) == 1
    assert type(module.table) is Tensor
    assert max(v.error for v in verify(module, tmp_path / "x", [arguments()])) < 1e-4


def test_onnx_in_bfloat16_states_why_its_graphs_are_not_compared(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" in runtime.get_available_providers():
        pytest.skip("onnxruntime has a GPU here")
    given = {name: half(value) for name, value in arguments().items()}
    found = export(tiny(torch.bfloat16), tmp_path / "x", example_inputs=given)
    why = {"graphs": "onnxruntime's CPU has no operators for much of bfloat16"}
    assert read_manifest(tmp_path / "x")["not_compared"] == found.not_compared["denoiser"] == why
    assert not found.verdicts


def written(folder: Path, **tensors: Tensor) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file(
        {name.replace("__", "."): value for name, value in tensors.items()},
        folder / "a.safetensors",
    )
    return folder


def refused(module: nn.Module, folder: Path, text: str) -> None:
    with pytest.raises(maskfx.InputError, match=text):
        export(
            module,
            folder.parent / "x",
            example_inputs=arguments(),
            weights=folder,
            compare=False,
        )
    assert not (folder.parent / "x").exists()


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Tiny()
    state = {name: value.clone() for name, value in tiny().state_dict().items()}
    folder = written(tmp_path / "w", **{k: v for k, v in state.items() if k != "norm.bias"})
    refused(module, folder, "lacks norm.bias; give the weights of this Tiny")
    written(folder, **state, other=torch.zeros(1))
    refused(module, folder, "has, beside those of the module, other")
    written(folder, **{**state, "norm.bias": torch.zeros(3)})
    refused(module, folder, r"norm.bias of Tiny has shape \[8\], in .* it has \[3\]")
    (folder / "b.safetensors").write_bytes(b"no such file")
    refused(module, folder, "it holds a.safetensors, b.safetensors; name the file or the index")
    refused(module, folder / "b.safetensors", "b.safetensors can't be read as safetensors")
    refused(module, folder / "c", "c doesn't exist")
    (folder / "d.json").write_text(json.dumps({"weights": 3}))
    refused(module, folder / "d.json", "neither a safetensors file nor an index")
    assert all(weight.is_meta for weight in module.parameters())


def test_a_table_that_no_file_holds_needs_data(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Tiny()
        module.register_buffer("table", torch.zeros(3), persistent=False)
    refused(module, written(tmp_path / "w", **tiny().state_dict()), "table of Tiny is a table that")


def test_weights_that_are_nowhere_or_do_not_apply_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Tiny()
    with pytest.raises(maskfx.InputError, match="on the meta device; give weights="):
        export(module, tmp_path / "x", example_inputs=arguments())
    compiled = maskfx.compile(tiny(), example_inputs=arguments())
    with pytest.raises(maskfx.InputError, match="weights= applies to a denoiser that isn't"):
        export(compiled, tmp_path / "x", weights=written(tmp_path / "w", **tiny().state_dict()))
    with pytest.raises(maskfx.InputError, match="compare=False applies to a denoiser that isn't"):
        export(compiled, tmp_path / "x", compare=False)
    assert not (tmp_path / "x").exists()
