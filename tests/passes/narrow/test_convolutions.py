"""narrow_convolutions: gather the window, multiply once."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskfx.ir.programs.sources import Halo, Neighbours, Subsites
from maskfx.passes.narrow.convolutions import narrow_convolutions
from tests.passes.tools import Make, check_values, picture, run_pass, shared


class One(nn.Module):
    """A layer between two pointwise functions."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, sample: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(sample)))


LAYERS = {
    "3x3": nn.Conv2d(4, 6, 3, padding=1),
    "5x3": nn.Conv2d(4, 6, (5, 3), padding=(2, 1), bias=False),
    "strided": nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "patches": nn.Conv2d(4, 6, 2, stride=2),
    "dilated": nn.Conv2d(4, 6, 3, padding=2, dilation=2),
    "depthwise": nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "grouped": nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "to one": nn.Conv2d(4, 1, 3, padding=1),
    "strided 1x1": nn.Conv2d(4, 6, 1, stride=2),
    "asymmetric": nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(4, 6, 3, stride=2)),
    "pool": nn.AvgPool2d(2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_narrows_a_window(name: str) -> None:
    module = One(LAYERS[name])
    run = run_pass(narrow_convolutions, module, picture)
    kind = "avg_pool2d" if name == "pool" else "conv2d"
    assert run.rewrites == run.gained("gather") == run.before[kind] == 1
    assert run.after[kind] == 0
    sources = [type(s) for s in run.ctx.interface.inputs.values()]
    assert sources.count(Halo) == sources.count(Neighbours) == 1
    check_values(module, picture)


class OneFrame(nn.Module):
    """A video's layer on a single frame."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, sample: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(sample)[:, :, None])).squeeze(2)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv3d(4, 6, (1, 2, 2), stride=(1, 2, 2)),
        nn.Conv3d(4, 6, (1, 3, 3), padding=(0, 1, 1), bias=False),
        nn.Conv3d(4, 4, (1, 3, 3), padding=(0, 1, 1), groups=4),
    ],
    ids=["patches", "3x3", "depthwise"],
)
def test_narrows_one_frame(layer: nn.Module) -> None:
    module = OneFrame(layer)
    run = run_pass(narrow_convolutions, module, picture)
    assert run.rewrites == run.gained("gather") == run.before["conv3d"] == 1
    assert run.after["conv3d"] == 0
    check_values(module, picture)


def test_a_site_of_one_frame_is_a_linear_layer() -> None:
    module = OneFrame(nn.Conv3d(4, 6, 1))
    assert run_pass(narrow_convolutions, module, picture).before["linear"] == 1
    check_values(module, picture)


class Spreads(nn.Module):
    """Down, and up again by patches; or up first."""

    def __init__(self, layer: nn.Module, down: bool = True) -> None:
        super().__init__()
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1) if down else nn.Identity()
        self.layer = layer

    def forward(self, sample: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.down(sample))))


@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize(
    "layer",
    [nn.ConvTranspose2d(4, 6, 2, stride=2), nn.ConvTranspose2d(4, 1, 2, stride=2, bias=False)],
    ids=["many", "to one"],
)
def test_spreads_patches(layer: nn.Module, down: bool) -> None:
    module = Spreads(layer, down)
    run = run_pass(narrow_convolutions, module, picture)
    assert run.rewrites == run.before["conv_transpose2d"] + down == 1 + down
    assert run.after["conv_transpose2d"] == 0
    assert sum(isinstance(s, Subsites) for s in run.ctx.interface.inputs.values()) == 1
    check_values(module, picture)


class Twice(nn.Module):
    """Two windows of the same shape on the same rows, and one more: one tap, shared tables."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.c = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, sample: Tensor) -> Tensor:
        return self.c(self.a(sample) + self.b(sample))


def test_shares_tables_and_taps() -> None:
    module = shared(Twice)
    run = run_pass(narrow_convolutions, module, picture)
    assert run.rewrites == 3
    sources = [type(s) for s in run.ctx.interface.inputs.values()]
    assert sources.count(Neighbours) == 1
    assert len(run.ctx.interface.taps) == sources.count(Halo) == 2
    check_values(module, picture)


def odd(seed: int = 0, wide: bool = False) -> dict[str, Tensor]:
    value = picture(seed, wide)["sample"]
    return {"sample": value[:, :, :7, : 13 if wide else 9].contiguous()}


class Pyramid(nn.Module):
    """Down, up and joined, at sizes that no stride divides."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(10, 4, 3, padding=1)

    def forward(self, sample: Tensor) -> Tensor:
        low = F.interpolate(self.down(sample), size=sample.shape[2:], mode="nearest")
        return self.up(torch.cat([sample, low], 1))


@pytest.mark.parametrize("make", [picture, odd])
def test_narrows_a_pyramid(make: Make) -> None:
    module = shared(Pyramid)
    assert run_pass(narrow_convolutions, module, make).rewrites == 2
    check_values(module, make)


def test_keeps_convolutions_of_one_site() -> None:
    module = One(nn.Conv2d(4, 6, 1))
    run = run_pass(narrow_convolutions, module, picture)  # narrow_linear took it
    assert run.before["linear"] == 1
    assert run.unchanged


class Unfolded(nn.Module):
    """A convolution of 3 x 3 by an unfold and a convolution along tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(36, 4, 1)

    def forward(self, sample: Tensor) -> Tensor:
        windows = F.unfold(F.pad(sample, (1, 1, 1, 1), mode="replicate"), 3)
        return self.mix(windows).reshape(sample.shape)


class Lines(nn.Module):
    """Along rows, with a padding before it; down columns, every other site; all sites in order."""

    def __init__(self) -> None:
        super().__init__()
        line = partial(nn.Conv1d, 4, 4)
        self.row, self.column = line(3, groups=4), line(3, stride=2, padding=1)
        self.around = line(5, padding=2, groups=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        rows = self.row(F.pad(x.permute(0, 2, 1, 3).flatten(0, 1), (2, 0), mode="reflect"))
        x = rows.view(b, h, c, w).permute(0, 2, 1, 3)
        x = self.around(x.flatten(2)).unflatten(2, (h, w))
        columns = self.column(x.permute(0, 3, 1, 2).flatten(0, 1))
        return columns.view(b, w, c, -1).permute(0, 2, 3, 1)


class Apart(nn.Module):
    """A layer over groups of channels, one after another, that lie along the batch."""

    def __init__(self, layer: nn.Module, groups: int = 4) -> None:
        super().__init__()
        self.layer, self.groups = layer, groups

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x.reshape(-1, x.shape[1] // self.groups, *x.shape[2:]))
        return made.reshape(x.shape[0], -1, *made.shape[2:])


class Beside(nn.Module):
    """What a layer makes of a picture, at the picture's size, beside the picture."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, sample: Tensor) -> Tensor:
        return sample + F.interpolate(self.layer(sample), size=sample.shape[2:]).mean(1, True)


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
        nn.AvgPool2d(3, padding=1),
        nn.AvgPool2d(3, padding=1, count_include_pad=False),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", stride=2),
        nn.Conv2d(4, 4, (4, 3), padding="same", padding_mode="replicate"),
        nn.Conv2d(4, 4, 3, padding="same", dilation=2),
        nn.Sequential(nn.ZeroPad2d((1, 0, 0, 1)), nn.Conv2d(4, 4, 2)),
        nn.Sequential(nn.ReflectionPad2d(2), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)),
        nn.ConvTranspose2d(4, 4, 3, stride=2),
        nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1, bias=False),
        nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=4),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.ConvTranspose2d(4, 8, 2, stride=2, groups=4),
        Unfolded(),
        Lines(),
        Apart(nn.Conv2d(1, 1, 3, padding=1)),
        Apart(nn.Conv2d(1, 2, (3, 5), padding=(1, 2), stride=2, bias=False)),
        Apart(nn.Conv2d(2, 4, 3, padding=1, groups=2), 2),
        Apart(nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1), 2),
        Apart(nn.MaxPool2d(2), 2),
        Apart(nn.AvgPool2d(3, padding=1)),
    ],
    ids=str,
)
def test_reads_windows_of_many_kinds(layer: nn.Module) -> None:
    module = Beside(layer)
    run = run_pass(narrow_convolutions, module, picture)
    assert run.rewrites == run.gained("gather") >= 1
    check_values(module, picture, oracle=False)  # the twin has zeros beyond the border


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(3, padding=1, dilation=2),
        nn.AvgPool2d(2, divisor_override=3),
    ],
    ids=["dilated", "divisor"],
)
def test_keeps_windows_without_a_rule(layer: nn.Module) -> None:
    run = run_pass(narrow_convolutions, Beside(layer), picture)
    assert run.unchanged
    assert run.ctx.dense


def test_second_run_rewrites_nothing() -> None:
    run = run_pass(narrow_convolutions, shared(Pyramid), picture)
    taps = dict(run.ctx.interface.taps)
    assert run.second_run_is_idle()
    assert run.ctx.interface.taps == taps
