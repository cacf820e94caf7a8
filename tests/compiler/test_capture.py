"""Capture: symbolic sizes from any example, roles, weights by reference, and when it is valid."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Event
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import PAGCFGIdentitySelfAttnProcessor2_0
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import maskfx
from maskfx.compiler.capture.arguments.infer_roles import infer
from maskfx.compiler.capture.arguments.roles import flatten, observed_sizes
from maskfx.compiler.capture.capture import capture
from maskfx.compiler.capture.captured import Capture
from maskfx.errors import CaptureError, InputError
from maskfx.ir.geometry.lanes import lane_of
from maskfx.passes.context import get_attribute
from tests.factories.zoo import ZOO, Draw, Size
from tests.passes.tools import numbers
from tests.runtime.test_samples import Samples, make

Inputs = dict[str, Any]


class Denoiser(nn.Module):
    """A picture, a timestep and a text, as UNets take them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.text = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(6, 4)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        text = self.text(encoder_hidden_states).mean(1)
        return self.layer(sample) * timestep[:, None, None, None] + text[:, :, None, None]


def inputs(batch: int = 2, h: int = 8, w: int = 12, text: int = 5, seed: int = 0) -> Inputs:
    return {
        "sample": numbers(batch, 4, h, w, seed=seed),
        "timestep": torch.arange(batch) + 1.0,
        "encoder_hidden_states": numbers(batch, text, 6, seed=seed + 1),
    }


def near(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).abs().max() < 1e-4)


def serves(found: Capture, module: nn.Module, arguments: Inputs) -> bool:
    _, values, spec = flatten(arguments)
    return found.serves(module, spec, values, observed_sizes(found.leaves, values))


# Sizes


@pytest.mark.parametrize(
    "example",
    [inputs(1), inputs(1, 8, 8, 8), inputs(2, 8, 8, 5), inputs(4, 4, 4, 4), inputs(3, 6, 5, 1)],
    ids=["one", "all eight", "square", "all four", "odd"],
)
def test_any_example_gives_symbolic_sizes(example: Inputs) -> None:
    module = Denoiser()
    found = capture(module, example)
    assert found.module is not None
    assert found.frozen is None
    assert found.fixed_batch is None
    symbols = [found.symbols[role] for role in ("batch", "y", "x")]
    assert not any(isinstance(s, int) for s in symbols)
    assert len({str(s) for s in symbols}) == 3
    other = inputs(5, 10, 6, 5, seed=3)
    if example["encoder_hidden_states"].shape[1] > 1:
        assert near(found.module(**other), module(**other))
        assert serves(found, module, other)


def test_the_lanes_of_the_arguments() -> None:
    found = capture(Denoiser(), inputs())
    assert found.module is not None
    nodes = [n for n in found.module.graph.nodes if n.op == "placeholder"]
    lanes = [str(lane_of(n)) for n in nodes]
    assert lanes == ["[batch, 4, y0, x0]", "[batch]", "[batch, text:0, 6]"]


class Apart(nn.Module):
    """Two packed pictures of one size, which it never compares."""

    def forward(self, hidden_states: Tensor, timestep: Tensor, reference: Tensor) -> Tensor:
        mine = hidden_states * timestep[:, None, None]
        return torch.cat([mine, reference * 2], dim=1)[:, : hidden_states.shape[1]]


def test_dimensions_of_one_role_have_one_symbol() -> None:
    draw = Draw(0)
    picture, other = draw.normal(2, 12, 4), draw.normal(2, 12, 4)
    found = capture(
        Apart(), {"hidden_states": picture, "timestep": torch.ones(2), "reference": other}
    )
    assert found.module is not None
    nodes = [n for n in found.module.graph.nodes if n.op == "placeholder"]
    assert str(nodes[2].meta["val"].shape[1]) == str(nodes[0].meta["val"].shape[1])
    assert str(nodes[0].meta["val"].shape[1]) == str(found.symbols["tokens"])


def test_weights_are_the_modules_own() -> None:
    module = Denoiser()
    found = capture(module, inputs())
    weights = [n for n in found.module.graph.nodes if n.op == "get_attr"]  # type: ignore[union-attr]
    pointers = {get_attribute(found.module, n.target).data_ptr() for n in weights}
    assert pointers == {p.data_ptr() for p in module.parameters()}
    module.layer.bias.add_(1)  # type: ignore[union-attr]
    assert near(found.module(**inputs()), module(**inputs()))  # type: ignore[misc]


# Roles


def roles_of(
    arguments: Inputs, override: dict[str, tuple[str, ...]] | None = None, *names: str
) -> dict[str, tuple[str, ...]]:
    class Signature(nn.Module):
        def forward(self, **kwargs: Any) -> None: ...

    leaves = infer(Signature(), arguments, override)
    return {leaf.path: leaf.roles for leaf in leaves if leaf.tensor}


def test_roles_of_a_unet() -> None:
    found = roles_of({**inputs(), "class_labels": torch.zeros(2).long()})
    assert found == {
        "sample": ("batch", "", "y", "x"),
        "timestep": ("batch",),
        "encoder_hidden_states": ("batch", "text:0", ""),
        "class_labels": ("batch",),
    }


def test_roles_of_packed_tokens() -> None:
    found = roles_of(
        {
            "hidden_states": numbers(2, 24, 8, seed=0),
            "encoder_hidden_states": numbers(2, 7, 6, seed=1),
            "pooled_projections": numbers(2, 6, seed=2),
            "timestep": torch.ones(2),
            "img_ids": torch.zeros(24, 3),
            "txt_ids": torch.zeros(7, 3),
            "encoder_attention_mask": torch.ones(2, 7),
        }
    )
    assert found == {
        "hidden_states": ("batch", "tokens", ""),
        "encoder_hidden_states": ("batch", "text:0", ""),
        "pooled_projections": ("batch", ""),
        "timestep": ("batch",),
        "img_ids": ("tokens", ""),
        "txt_ids": ("text:0", ""),
        "encoder_attention_mask": ("batch", "text:0"),
    }


def test_roles_of_residuals_and_a_larger_picture() -> None:
    found = roles_of(
        {
            "sample": numbers(2, 4, 8, 12, seed=0),
            "residuals": (numbers(2, 6, 8, 12, seed=1), numbers(2, 6, 4, 6, seed=2)),
            "controlnet_cond": numbers(2, 3, 64, 96, seed=3),
        }
    )
    assert found["residuals.0"] == ("batch", "", "y", "x")
    assert found["residuals.1"] == ("batch", "", "y/2", "x/2")
    assert found["controlnet_cond"] == ("batch", "", "y*8", "x*8")


def test_a_map_without_channels_lies_on_the_picture() -> None:
    found = roles_of(
        {
            "sample": numbers(2, 4, 8, 12, seed=0),
            "mask": numbers(2, 8, 12, seed=0),
            "context": numbers(2, 8, 12, seed=0),
            "other": numbers(2, 16, 24, seed=0),
            "sigma": numbers(2, 1, 1, 1, seed=0),
            "region": numbers(2, 96, 16, seed=0),
            "channels": numbers(2, 96, 24, seed=0),
        }
    )
    assert found["sigma"] == ("batch", "", "", "")
    assert found["region"] == ("batch", "tokens/1", "text:1")
    assert found["channels"] == ("batch", "tokens/1", "")
    assert found["mask"] == ("batch", "y", "x")
    assert found["context"] == ("batch", "text:0", "")
    assert found["other"] == ("batch", "text:1", "")


def test_roles_of_frames_and_ids() -> None:
    video = numbers(2, 4, 3, 8, 12, seed=0)
    assert roles_of({"x": video})["x"] == ("batch", "", "frames", "y", "x")
    assert roles_of({"x": video[:, :, :1]})["x"] == ("batch", "", "", "y", "x")
    found = roles_of({"x": video, "condition": video[:, :2], "timestep": numbers(2, 3, seed=1)})
    assert found["condition"] == ("batch", "", "frames", "y", "x")
    assert found["timestep"] == ("batch", "frames")
    assert roles_of({"x": video, "control": numbers(2, 72, 5, seed=1)})["control"] == (
        *("batch", "tokens/4", ""),
    )
    assert roles_of({"ids": torch.zeros(2, 8, 12).long()})["ids"] == ("batch", "y", "x")


def test_channels_of_a_video_are_found_by_number_or_by_positions() -> None:
    class Taking(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.config = {"in_channels": channels}

        def forward(self, x: Tensor, places: Any = None) -> Tensor:
            return x

    def found(*shape: int, channels: int = 0, places: Any = ()) -> Any:
        inputs = {"x": numbers(*shape, seed=0), "places": [torch.arange(n) for n in places]}
        leaves = infer(Taking(channels), inputs, None)
        return next(leaf.roles for leaf in leaves if leaf.path == "x")

    assert found(1, 5, 3, 8, 8, channels=3) == ("batch", "frames", "", "y", "x")
    assert found(1, 5, 3, 8, 8, channels=5) == ("batch", "", "frames", "y", "x")
    assert found(1, 5, 8, 8, 3, channels=3) == ("batch", "frames", "y", "x", "")
    assert found(1, 5, 8, 12, 33, places=(5, 4, 6)) == ("batch", "frames", "y", "x", "")
    assert found(1, 1, 8, 12, 33) == ("batch", "", "y", "x", "")
    assert found(1, 3, 4, 1, 8, 8) == ("batch", "frames", "", "", "y", "x")  # several pictures
    assert found(1, 20, 4, 1, 2, 2) == ("batch", "tokens", "", "", "", "")  # patches


def test_one_frame_is_a_picture_whatever_roles_say() -> None:
    said = ("batch", "", "frames", "y", "x")
    for frames, wanted in ((1, ""), (2, "frames")):
        inputs = {"sample": numbers(1, 4, frames, 8, 8, seed=0)}
        [leaf] = infer(nn.Identity(), inputs, {"sample": said})
        assert leaf.roles == ("batch", "", wanted, "y", "x")


def test_roles_of_positions_and_numbers() -> None:
    inputs = {
        "hidden_states": numbers(2, 1, 8, 12, 4, seed=0),
        "encoder_hidden_states": numbers(2, 7, 8, seed=0),
        "rope_pos": [torch.arange(1), torch.arange(4), torch.arange(6)],
        "text_pos": torch.arange(7),
        "prior_token_id": torch.zeros(2, 24, dtype=torch.long),
        "size": torch.zeros(2, 24),
    }
    found = roles_of(inputs)
    assert found["hidden_states"] == ("batch", "", "y", "x", "")
    assert [found[f"rope_pos.{i}"] for i in range(3)] == [("",), ("y/2",), ("x/2",)]
    assert found["text_pos"] == ("text:0",)
    assert found["prior_token_id"] == ("batch", "tokens/4")
    assert found["size"] == ("batch", "")


def test_roles_of_several_texts_or_vectors() -> None:
    picture, text = numbers(2, 4, 8, 12, seed=0), numbers(2, 3, 5, 8, seed=1)

    def found(**more: Any) -> dict[str, Any]:
        return roles_of({"sample": picture, **more})

    assert found(encoder_states=text)["encoder_states"] == ("batch", "", "text:0", "")
    turned = found(encoder_states=text.transpose(1, 2))
    assert turned["encoder_states"] == ("batch", "text:0", "", "")
    masked = found(encoder_states=text, encoder_mask=torch.ones(2, 3))
    assert masked["encoder_states"] == ("batch", "text:0", "", "")
    assert masked["encoder_mask"] == ("batch", "text:0")


def test_roles_can_be_given() -> None:
    given: dict[str, tuple[str, ...]] = {"sample": ("batch", "y", "x", "")}
    found = roles_of({"sample": numbers(2, 8, 12, 4, seed=0)}, given)
    assert found == given

    class Last(nn.Module):
        """Channels last, which no example shows."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, sample: Tensor) -> Tensor:
            return self.linear(sample).tanh()

    module, example = Last(), {"sample": numbers(2, 8, 12, 4, seed=0)}
    denoiser = maskfx.compile(module, roles=given)
    assert near(denoiser.record(**example)[0], module(**example))
    found_lane = denoiser.programs[next(iter(denoiser.programs))].interface.outputs[0]
    assert str(found_lane) == "[batch, y0, x0, 4]"


@pytest.mark.parametrize(
    ("arguments", "override", "error", "words"),
    [
        (inputs(), {"other": ("batch",)}, InputError, "'other'"),
        (
            inputs(),
            {"timestep": ("batch", "")},
            InputError,
            "timestep.*: 2 roles.*one role per dim",
        ),
        ({"timestep": torch.ones(2)}, None, CaptureError, r"3 dimensions or more.*pass compile"),
        ({"n": 3}, None, InputError, "no tensor"),
        ({"x": torch.zeros(1, 1, 1, 1, 1, 1, 1)}, None, CaptureError, "7 dimensions"),
    ],
)
def test_roles_that_make_no_sense(
    arguments: Inputs, override: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        roles_of(arguments, override)


# Validity


class Frozen(nn.Module):
    """A table that Python computes from the size, and keeps."""

    def forward(self, sample: Tensor) -> Tensor:
        return sample + table(int(sample.shape[2]))[:, None]


@lru_cache
def table(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32) * 0.1


class FrozenWithoutATrace(nn.Module):
    """A number that Python read off the first size it saw: the graph alone looks fine."""

    def forward(self, sample: Tensor) -> Tensor:
        return sample * scale_of(int(sample.shape[2]))


def scale_of(length: int) -> float:
    return 1.0 / length


@pytest.mark.parametrize("kind", [Frozen, FrozenWithoutATrace])
def test_a_frozen_size_is_captured_per_size_and_right_at_each(kind: type[nn.Module]) -> None:
    table.cache_clear()
    module = kind()
    denoiser = maskfx.compile(module)
    for h, w in ((8, 12), (6, 12), (8, 16), (6, 10), (8, 12)):
        example = {"sample": numbers(2, 4, h, w, seed=h)}
        wanted = module(**example)
        assert near(denoiser.batch([example])[0], wanted), (h, w)
        output, kept = denoiser.record(**example)
        assert near(output, wanted), (h, w)
        mask = torch.zeros(h, w, dtype=torch.bool)
        mask[2:4, 3:7] = True
        assert near(denoiser.edit([maskfx.EditStep(example, mask, kept)])[0], wanted), (h, w)
    assert len(denoiser.compilations) <= 4


def test_a_capture_refuses_what_it_was_not_made_for() -> None:
    module = Denoiser()
    found = capture(module, inputs())
    assert serves(found, module, inputs(3, 6, 6, 9))
    missing = inputs()
    del missing["timestep"]
    _, values, spec = flatten(missing)
    assert not found.serves(module, spec, values, {})


def test_numbers_and_flags_belong_to_a_capture() -> None:
    class Scaled(nn.Module):
        def forward(self, sample: Tensor, scale: float = 1.0, flip: bool = False) -> Tensor:
            return -sample * scale if flip else sample * scale

    module = Scaled()
    denoiser = maskfx.compile(module)
    x = numbers(1, 4, 8, 12, seed=0)
    for scale, flip in ((1.5, False), (2.0, False), (2.0, True), (1.5, False)):
        arguments = {"sample": x, "scale": scale, "flip": flip}
        assert near(denoiser.batch([arguments])[0], module(**arguments))
    assert len(denoiser.compilations) == 3


class Chooses(nn.Module):
    """Python looks at the numbers: no export follows it."""

    def forward(self, sample: Tensor) -> Tensor:
        return sample * 2 if sample.sum().item() > 0 else sample * 3


def test_a_module_that_cannot_be_exported_runs_dense() -> None:
    module = Chooses()
    denoiser = maskfx.compile(module)
    example = {"sample": numbers(2, 4, 8, 12, seed=0)}
    assert near(denoiser.batch([example])[0], module(**example))
    (compilation,) = denoiser.compilations
    assert compilation.program is None
    assert "export with" in compilation.reasons["capture"]
    output, kept = denoiser.record(**example)
    mask = torch.zeros(8, 12, dtype=torch.bool)
    mask[2:4, 3:7] = True
    changed = {"sample": -example["sample"]}
    found = denoiser.edit([maskfx.EditStep(changed, mask, kept)])[0]
    assert torch.equal(found, torch.where(mask, module(**changed), output))
    assert len(denoiser.compilations) == 1


class FrozenBatch(nn.Module):
    """The batch as a Python number in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        batch = int(sample.shape[0])
        scale = timestep.reshape([batch, 1, 1, 1]) * torch.ones(batch, 1, 1, 1)
        return self.mix(sample) * scale


def scaled(batch: int) -> Inputs:
    return {
        "sample": numbers(batch, 4, 8, 12, seed=batch),
        "timestep": torch.arange(batch) + 1.0,
    }


@pytest.mark.parametrize("batches", [(2,), (2, 1, 3, 2)])
def test_a_frozen_batch(batches: tuple[int, ...]) -> None:
    check_batches(FrozenBatch(), batches, scaled)


def test_parts_of_the_batch_that_know_of_one_another() -> None:
    """Perturbed attention takes the batch as three: two that attend, and one that doesn't."""
    case = ZOO["UNet2DConditionModel-sd15"]
    module: Any = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8,),
        layers_per_block=1,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=32,
    )
    attention = module.mid_block.attentions[0].transformer_blocks[0].attn1
    attention.set_processor(PAGCFGIdentitySelfAttnProcessor2_0())
    check_batches(module, (3, 6, 3), lambda batch: case.inputs(Size(batch, 8, 12), batch))


def check_batches(
    module: nn.Module, batches: Sequence[int], inputs_of: Callable[[int], Inputs]
) -> None:
    denoiser = maskfx.compile(module)
    for batch in batches:
        example = inputs_of(batch)
        wanted = module(**example)
        output, kept = denoiser.record(**example)
        mask = torch.zeros(8, 12, dtype=torch.bool)
        mask[0:3, 5:9] = True
        edited = denoiser.edit([maskfx.EditStep(example, mask, kept)])[0]
        for found in (output, edited):
            pairs = zip(tree_leaves(found), tree_leaves(wanted), strict=True)
            assert all(near(a, b) for a, b in pairs), batch


def test_capture_leaves_the_module_and_its_inputs() -> None:
    module, example = Denoiser(), inputs(1, 8, 8)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    before = {k: v.clone() for k, v in example.items()}
    capture(module, example)
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert all(torch.equal(v, before[k]) for k, v in example.items())


class Named(nn.Module):
    """Submodules whose names are keywords, torch's own attention, and places from linspace."""

    def __init__(self) -> None:
        super().__init__()
        layers = {"in": nn.Conv2d(5, 8, 1), "class": nn.Conv2d(8, 4, 1)}
        self.layers = nn.ModuleDict(layers)
        self.mix = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

    def forward(self, sample: Tensor) -> Tensor:
        b, _, h, w = sample.shape
        places = torch.linspace(-1, 1, h)[:, None] * torch.linspace(0, 1, w, dtype=torch.float32)
        x = self.layers["in"](torch.cat([sample, places.expand(b, 1, h, w)], 1))
        y = self.mix(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return self.layers["class"](x + y)


def test_names_places_and_layers_of_torch_leave_sizes_free() -> None:
    module = Named().eval().requires_grad_(False)
    found = capture(module, {"sample": numbers(2, 4, 8, 12, seed=0)})
    assert found.module is not None, found.notes
    assert not any(isinstance(size, int) for size in found.symbols.values())
    names = {str(node.target) for node in found.module.graph.nodes}
    assert any("scaled_dot_product_attention" in name for name in names)
    other = numbers(1, 4, 6, 10, seed=1)
    assert near(found.module(sample=other), module(other))


class Placed(nn.Module):
    """Positions on a scale that depends on the sizes, written through `Tensor.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(5, 4, 1)

    def forward(self, sample: Tensor) -> Tensor:
        b, _, h, w = sample.shape
        scale = (100 / (h * w)) ** 0.5
        y, x = torch.linspace(-h * scale, h * scale, h + 1), torch.linspace(0, w * scale, w)
        places = sample.new_zeros(1, 1, h, w, requires_grad=False)
        places.data[:, 0].copy_(y[1:, None] * x)
        return self.layer(torch.cat([sample, places.expand(b, 1, h, w)], 1))


def test_tables_of_scaled_positions_leave_sizes_free() -> None:
    module = Placed().eval().requires_grad_(False)
    found = capture(module, {"sample": numbers(2, 4, 8, 12, seed=0)})
    assert found.module is not None, found.notes
    assert found.notes == []
    assert not any(isinstance(size, int) for size in found.symbols.values())
    other = numbers(1, 4, 6, 10, seed=1)
    assert near(found.module(sample=other), module(other))


# Several threads


class Meanwhile(Denoiser):
    """Calls a function while it is exported."""

    def __init__(self, called: Callable[[], object]) -> None:
        super().__init__()
        self.called = called

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            self.called()
        return super().forward(sample, timestep, encoder_hidden_states)


def test_another_thread_runs_the_module_while_it_is_captured() -> None:
    picture, found = numbers(1, 4, 8, 8, seed=0), list[Tensor]()

    def run() -> None:
        found.append(module.layer(picture))

    with ThreadPoolExecutor(1) as other:
        module = Meanwhile(lambda: other.submit(run).result(timeout=10))
        captured = capture(module, inputs())
    assert captured.module is not None, captured.notes
    assert found
    assert all(torch.equal(one, module.layer(picture)) for one in found)


def test_captures_in_two_threads_leave_torch_and_logging_as_they_were() -> None:
    began, ended = Event(), Event()

    def outlast_first() -> None:
        began.set()
        ended.wait(1)

    before = torch.tensor, torch.as_tensor, torch.linspace, logging.root.manager.disable
    second, given = Meanwhile(outlast_first), inputs()

    def start_second() -> None:
        if not pending:
            pending.append(other.submit(capture, second, given))
            began.wait(1)

    pending: list[Any] = []
    with ThreadPoolExecutor(1) as other:
        first = capture(Meanwhile(start_second), inputs())
        ended.set()
        captures = [first, pending[0].result(timeout=60)]
    assert all(one.module is not None for one in captures)
    assert before == (
        torch.tensor,
        torch.as_tensor,
        torch.linspace,
        logging.root.manager.disable,
    )


class Records(logging.Handler):
    """Keeps the messages that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_a_failing_export_is_quiet_and_other_threads_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def log_beside() -> None:
        logging.getLogger("torch.other").error("torch in another thread")
        logging.getLogger("app").error("another thread")

    def fail() -> None:
        logging.getLogger("torch.export.new").error("torch fails")
        logging.getLogger("app").error("the model's own")
        other.submit(log_beside).result(timeout=10)
        error: Any = ValueError("not this one")
        error.partial_fx_graph = "its whole graph"
        raise error

    handler, loggers = Records(), [logging.getLogger(name) for name in ("torch", "app")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with ThreadPoolExecutor(1) as other:
            captured = capture(Meanwhile(fail), inputs())
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert captured.module is None
    assert "not this one" in " ".join(captured.notes)
    assert "its whole graph" not in "".join(capsys.readouterr())
    assert set(handler.messages) == {
        "the model's own",
        "torch in another thread",
        "another thread",
    }
    assert handler.filters == []


class Codes(nn.Module):
    """Has a weight of a name that every graph has an attribute of."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, sample: Tensor) -> Tensor:
        return sample * self.code


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Codes()

    def forward(self, sample: Tensor) -> Tensor:
        found: Tensor = self.inner(sample)
        return found


def test_a_name_that_graphs_have_is_reported() -> None:
    found = capture(Codes(), {"sample": torch.randn(1, 4, 6, 5)})
    assert found.module is None
    assert found.notes[0].startswith("a graph can't have a weight or part named 'code': rename it")
    assert capture(Holder(), {"sample": torch.randn(1, 4, 6, 5)}).module is not None


class Inherited(Samples):
    """Samples in tuples; the code that counts tokens is that of a class in another file."""

    def forward(  # type: ignore[override]
        self, x: tuple[Tensor, ...], t: Tensor, cap_feats: tuple[Tensor, ...]
    ) -> tuple[list[Tensor]]:
        return super().forward(list(x), t, list(cap_feats))


def test_code_of_an_inherited_class_leaves_sizes_free() -> None:
    inputs = make(8, 12, 5)
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in inputs.items()}
    found = capture(Inherited().eval(), {n: v for n, v in given.items() if n != "return_dict"})
    assert found.module is not None, found.notes
    assert not isinstance(found.symbols["text:0"], int)
