"""The twin against what is known without it: dense runs at the extremes, and loops in between."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.factories.twin import edit, record
from tests.factories.zoo import ZOO, Case, Size

NAMES = [  # every way the zoo has of laying sites out; the rest are variations of these
    "UNet2DConditionModel-sd15",
    "UNet2DConditionModel-sdxlresiduals",
    "ControlNetModel",
    "UNet2DModel",
    "FluxTransformer2DModel",
    "ChromaTransformer2DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel-sd35",
    "PixArtTransformer2DModel",
    "HunyuanDiT2DModel-control",
    "AuraFlowTransformer2DModel",
    "SanaTransformer2DModel",
]
STEPPED = [  # with step inputs at later places than the first layer, or patches made by a view
    "AuraFlowTransformer2DModel",
    "UNet2DConditionModel-residuals",
    "FluxTransformer2DModel-control",
    "SD3Transformer2DModel-control",
]


def leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def part_of(case: Case, size: Size) -> Tensor:
    """A mask that covers some patches whole and some in part."""
    mask = torch.zeros(case.mask_shape(size), dtype=torch.bool)
    if mask.ndim == 2:
        mask[1:4, 2:5] = True
    else:
        mask[3:9] = True
    return mask


def at_sites(mask: Tensor, value: Tensor) -> Tensor:
    """The mask, pooled to the size of a map or as one of tokens, against all of `value`."""
    if mask.ndim == 1:
        return mask[None, :, None].expand_as(value)
    if value.shape[-2:] != mask.shape:
        scale = math.ceil(mask.shape[0] / value.shape[-2])
        pooled = F.max_pool2d(mask[None].float(), scale, ceil_mode=True)
        mask = pooled[0, : value.shape[-2], : value.shape[-1]].bool()
    return mask.expand_as(value)


def close(one: Any, two: Any) -> bool:
    pairs = zip(leaves(one), leaves(two), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in pairs)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_extremes_and_between(name: str) -> None:
    case = ZOO[name]
    module = case.build()
    for size in (case.sizes[0], case.sizes[-1]):
        part = part_of(case, size)
        old, recording = record(module, case.inputs(size, 0))
        new = module(**case.inputs(size, 1))

        def run(
            seed: int, mask: Tensor, size: Size = size, recording: Any = recording
        ) -> list[Tensor]:
            inputs = case.inputs(size, seed)
            return leaves(edit(module, inputs, mask, recording, text_first=case.text_first))

        assert close(old, module(**case.inputs(size, 0)))  # recording is a plain dense run
        assert close(run(0, part), old)
        assert close(run(1, torch.ones_like(part)), new)
        assert close(run(1, torch.zeros_like(part)), old)
        for mixed, before, after in zip(run(1, part), leaves(old), leaves(new), strict=True):
            active = at_sites(part, mixed)
            assert torch.equal(mixed[~active], before[~active])
            assert not torch.allclose(mixed[active], before[active], atol=1e-3)
            assert not torch.allclose(mixed[active], after[active], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", STEPPED)
def test_current_values_at_inactive_sites_do_not_matter(name: str) -> None:
    """No mixing operator lets one through: noise goes in where only they could carry it out."""
    case = ZOO[name]
    module, size = case.build(), case.sizes[0]
    mask = part_of(case, size)
    recording = record(module, case.inputs(size, 0))[1]
    inputs = case.inputs(size, 1)
    expected = edit(module, inputs, mask, recording, text_first=case.text_first)

    def spoil(value: Tensor) -> Tensor:
        sites = at_sites(mask, value) if mask.ndim == 1 or value.ndim == 4 else None
        if sites is None:  # tokens of patches of 2 x 2
            sites = at_sites(mask, value.new_zeros(1, 1, *(n // 2 for n in mask.shape)))
            sites = sites.reshape(1, -1, 1)
        return torch.where(sites, value, 5 * value.sin())

    for key, value in inputs.items():
        if key in ("sample", "hidden_states", "mid_block_additional_residual"):
            inputs[key] = spoil(value)
        elif "residuals" in key or "controlnet" in key:
            inputs[key] = [spoil(one) for one in value]
    assert not close(module(**inputs), module(**case.inputs(size, 1)))
    assert close(edit(module, inputs, mask, recording, text_first=case.text_first), expected)


# ---------------------------------------------------------------------------------------------
# Modules small enough to compute by hand. The guidance, added to every site, makes the inputs of
# their operators differ from the recorded ones where the sample, which the twin restores, does not.
# ---------------------------------------------------------------------------------------------

HEIGHT, WIDTH, CHANNELS = 4, 3, 2
SITES = [(y, x) for y in range(HEIGHT) for x in range(WIDTH)]


class ConvAttention(nn.Module):
    """A 3 x 3 convolution, then attention over its sites, with text before or after them."""

    def __init__(self, text_first: bool | None) -> None:
        super().__init__()
        self.text_first = text_first
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.q, self.k, self.v = (nn.Linear(CHANNELS, CHANNELS) for _ in range(3))

    def forward(
        self, sample: Tensor, guidance: Tensor, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        image = self.conv(sample + guidance).flatten(2).transpose(1, 2)
        seen = [image]
        if encoder_hidden_states is not None:
            seen.insert(0 if self.text_first else 1, encoder_hidden_states)
        joint = torch.cat(seen, 1)
        q, k, v = (f(t)[:, None] for f, t in ((self.q, image), (self.k, joint), (self.v, joint)))
        out = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return out.transpose(1, 2).reshape(-1, CHANNELS, HEIGHT, WIDTH)


def affine(layer: nn.Linear, vector: list[float]) -> list[float]:
    weight, bias = layer.weight.tolist(), layer.bias.tolist()
    return [
        bias[o] + sum(weight[o][i] * vector[i] for i in range(CHANNELS)) for o in range(CHANNELS)
    ]


def conv_loops(conv: nn.Conv2d, sample: Tensor) -> list[list[float]]:
    assert conv.bias is not None
    out = []
    for y, x in SITES:
        site = conv.bias.tolist()
        for o in range(CHANNELS):
            for i in range(CHANNELS):
                for dy in range(3):
                    for dx in range(3):
                        row, col = y + dy - 1, x + dx - 1
                        if 0 <= row < HEIGHT and 0 <= col < WIDTH:
                            site[o] += float(conv.weight[o, i, dy, dx] * sample[0, i, row, col])
        out.append(site)
    return out


@torch.no_grad()
@pytest.mark.parametrize("text_first", [None, True, False])
def test_conv_and_attention_by_loops(text_first: bool | None) -> None:
    torch.manual_seed(0)
    module = ConvAttention(text_first)
    old, new = torch.randn(2, 1, CHANNELS, HEIGHT, WIDTH)
    texts = torch.randn(2, 1, 5, CHANNELS) if text_first is not None else None
    mask = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    mask[1, 1] = mask[2, 1] = mask[2, 2] = True
    guidance = torch.tensor([0.3, 1.7])
    inputs: list[tuple[Tensor, ...]] = [(old, guidance[0]), (new, guidance[1])]
    if texts is not None:
        inputs = [(*inputs[i], texts[i]) for i in range(2)]
    before, recording = record(module, inputs[0])
    got = edit(module, inputs[1], mask, recording, text_first=text_first)

    past = old + guidance[0]
    mixed = past.clone()
    for y, x in SITES:
        if mask[y, x]:
            mixed[0, :, y, x] = new[0, :, y, x] + guidance[1]
    then, now = conv_loops(module.conv, past), conv_loops(module.conv, mixed)
    chosen = [now[i] if mask[site] else then[i] for i, site in enumerate(SITES)]
    chosen += texts[1, 0].tolist() if texts is not None else []  # the current text, all of it
    keys, values = ([affine(f, one) for one in chosen] for f in (module.k, module.v))
    for i, (y, x) in enumerate(SITES):
        expected = before[0, :, y, x].tolist()
        if mask[y, x]:
            query = affine(module.q, now[i])
            scores = [
                math.exp(sum(a * b for a, b in zip(query, key, strict=True)) / CHANNELS**0.5)
                for key in keys
            ]
            expected = [
                sum(s * value[c] for s, value in zip(scores, values, strict=True)) / sum(scores)
                for c in range(CHANNELS)
            ]
        assert got[0, :, y, x].tolist() == pytest.approx(expected, abs=1e-5)


def identity(value: Tensor) -> Tensor:
    return value


class Stages(nn.Module):
    """Norm, one-sided padding and stride 2 twice, mean, resampling: 9, 5 and 3 sites a side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, 2) for _ in range(2))
        self.gate = nn.Conv2d(4, 4, 1)  # runs on a map of one site, which is no level

    def forward(self, sample: Tensor, guidance: Tensor, bank: list[Any] | None = None) -> Tensor:
        """With a bank, each mixing input goes through it: the meaning, written into the module."""
        put = bank.pop(0) if bank else identity
        x = self.norm(put(sample + guidance))
        for conv in self.down:
            put = bank.pop(0) if bank else identity
            x = conv(F.pad(put(x), (0, 2, 0, 2)))
        put = bank.pop(0) if bank else identity
        x = x + self.gate(put(x).mean((2, 3), keepdim=True))
        put = bank.pop(0) if bank else identity
        return sample + F.interpolate(put(x), size=sample.shape[-2:])


@torch.no_grad()
def test_levels_of_an_odd_size() -> None:
    torch.manual_seed(0)
    module = Stages()
    old, new = torch.randn(2, 1, 4, 9, 9)
    past, now = torch.tensor([0.3, 1.7])
    mask = torch.zeros(9, 9, dtype=torch.bool)
    mask[4, 0] = mask[8, 7] = True
    half = torch.zeros(5, 5, dtype=torch.bool)
    half[2, 0] = half[4, 3] = True
    quarter = torch.zeros(3, 3, dtype=torch.bool)  # sites of 4, 4 and 1 rows
    quarter[1, 0] = quarter[2, 1] = True

    levels = (mask, mask, half, quarter, quarter)
    seen: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        seen.append(value)
        return value

    before = module(old, past, [keep for _ in levels])
    swaps = [
        lambda value, i=i, level=level: torch.where(level, value, seen[i])
        for i, level in enumerate(levels)
    ]
    expected = torch.where(mask, module(new, now, swaps), before)
    got = edit(module, (new, now), mask, record(module, (old, past))[1])
    assert torch.allclose(got, expected, atol=1e-6)
    assert not torch.allclose(expected[..., mask], module(new, now)[..., mask], atol=1e-3)


class LinearAttention(nn.Module):
    """Sums over tokens written as matmuls, with as many channels as tokens."""

    def forward(self, hidden_states: Tensor, guidance: Tensor) -> Tensor:
        x = (hidden_states + guidance).transpose(1, 2)
        value = F.pad(x, (0, 0, 0, 1), value=1.0)
        out = torch.matmul(torch.matmul(value, x.relu().transpose(1, 2)), x.relu())
        return out[:, :-1].transpose(1, 2)


@torch.no_grad()
def test_linear_attention_with_as_many_channels_as_tokens() -> None:
    old, new = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([0, 1, 0, 0, 1, 1]).bool()
    module = LinearAttention()
    past, now = torch.tensor([0.3, 1.7])
    before, recording = record(module, (old, past))
    got = edit(module, (new, now), mask, recording)
    expected = before.clone()
    old, new = old + past, new + now
    for i in mask.nonzero().flatten().tolist():
        expected[0, i] = 0
        for j in range(6):
            key = (new if mask[j] else old)[0, j]
            expected[0, i] += key * (key.relu() @ new[0, i].relu())
    assert torch.allclose(got, expected, atol=1e-5)


class Conditioned(nn.Module):
    """Mixes a constant image, a residual, and a buffer that the sample is written into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(1, 1, 3, padding=1) for _ in range(3))

    def forward(self, sample: Tensor, controlnet_cond: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = sample + self.first(controlnet_cond)
        copied, assigned = (torch.zeros(sample.shape) for _ in range(2))
        copied[:, :1].copy_(residual)  # only the view is an output of this
        assigned[:, :1] = residual * 2  # and nothing is of this
        out = out + self.second(copied) + self.third(assigned)
        copied.add_(100)  # too late to matter to what was recorded
        return out


@torch.no_grad()
def test_constants_are_current_and_inactive_step_values_recorded() -> None:
    torch.manual_seed(0)
    module = Conditioned()
    sample, cond, residual, other, spoilt = torch.randn(5, 1, 1, 5, 5)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2, 2] = True
    before, recording = record(module, (sample, cond, residual))
    assert len(recording.saved) == 2
    expected = torch.where(mask, module(sample, other, residual), before)
    for now in (residual, torch.where(mask, residual, spoilt)):
        assert torch.allclose(edit(module, (sample, other, now), mask, recording), expected)


class Registers(ConvAttention):
    """Attention at a coarser level than the mask, over text that is longer than its input."""

    def forward(
        self, sample: Tensor, guidance: Tensor, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        assert encoder_hidden_states is not None
        text = F.pad(encoder_hidden_states, (0, 0, 2, 0), value=0.5)
        out = super().forward(F.avg_pool2d(sample, 2), guidance, text)
        return out.repeat_interleave(2, 2).repeat_interleave(2, 3)


@torch.no_grad()
def test_text_is_what_the_image_leaves_of_a_joint_length() -> None:
    torch.manual_seed(0)
    module = Registers(True)
    old, new = torch.randn(2, 1, CHANNELS, 2 * HEIGHT, 2 * WIDTH)
    texts = torch.randn(2, 1, 5, CHANNELS)
    mask = torch.zeros(2 * HEIGHT, 2 * WIDTH, dtype=torch.bool)
    mask[2:4, 2:4] = mask[5, 0] = True
    past, now = torch.tensor([0.3, 1.7])
    before, recording = record(module, (old, past, texts[0]))
    got = edit(module, (new, now, texts[1]), mask, recording, text_first=True)

    coarse = F.max_pool2d(mask[None].float(), 2)[0].bool()
    inner, pool = ConvAttention(True), torch.where(mask, new, old)
    inner.load_state_dict(module.state_dict())
    longer = [F.pad(text, (0, 0, 2, 0), value=0.5) for text in texts]
    old, new = F.avg_pool2d(old, 2), F.avg_pool2d(pool, 2)
    recording = record(inner, (old, past, longer[0]))[1]
    expected = edit(inner, (new, now, longer[1]), coarse, recording, text_first=True)
    expected = expected.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.allclose(got, torch.where(mask, expected, before), atol=1e-6)


@torch.no_grad()
def test_what_it_cannot_place_raises() -> None:
    module, sample = ConvAttention(True), torch.randn(1, CHANNELS, HEIGHT, WIDTH)
    mask = torch.ones(HEIGHT, WIDTH, dtype=torch.bool)
    inputs = (sample, torch.ones(()), torch.randn(1, 5, CHANNELS))
    with pytest.raises(ValueError, match="neither image, text nor both"):
        edit(module, inputs, mask, record(module, inputs)[1])  # joint, yet no order was given

    recording = record(module, inputs[:2])[1]
    with pytest.raises(RuntimeError, match="does not follow the recording"):
        edit(module, inputs, mask, recording, text_first=True)

    class Spelled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.transpose(1, 2)).softmax(-1) @ x

    tokens = (torch.randn(1, 6, 4),)
    with pytest.raises(NotImplementedError, match="spelled out"):
        edit(Spelled(), tokens, torch.ones(6).bool(), record(Spelled(), tokens)[1])

    class Same(nn.Module):
        def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            x = (hidden_states + encoder_hidden_states)[:, None]
            return F.scaled_dot_product_attention(x, x, x)[:, 0]

    both = (torch.randn(1, 6, 4), torch.randn(1, 6, 4))
    with pytest.raises(ValueError, match="distinct sizes"):
        edit(Same(), both, torch.ones(6).bool(), record(Same(), both)[1])
