"""Tiny denoisers with blocks of image classifiers: class tokens, lines with a bias, windows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import WIDTH, Block, Picture, conv, own
from tests.factories.own_transformers import DEPTH, HEADS, AdaLnZero, Mixing, Tokens, tokens
from tests.factories.own_windows import FOURS, Swin


class ClassToken(Tokens):
    """A class token and registers beside the patches; what they hold in the end moves all sites."""

    def __init__(self) -> None:
        super().__init__(AdaLnZero(), AdaLnZero())
        self.own = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.film, self.pooled = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        h, w = sample.shape[-2:]
        x, emb = self.to_tokens(sample), self.time(timestep[:, None].cos().expand(-1, WIDTH))
        own = self.own.expand(x.shape[0], -1, -1)
        x = torch.cat((own[:, :1] + emb[:, None], x, own[:, 1:]), dim=1)
        for block in self.blocks:
            x = block(x, emb, (h, w))
        scale, shift = self.film(x[:, 0]).chunk(2, dim=-1)
        registers = x[:, -3:-1].mean(1, keepdim=True) * x[:, -1:]
        x = x[:, 1:-3] * (1 + scale[:, None]) + shift[:, None] + self.pooled(registers)
        return self.to_picture(x, h, w)


class Relative(Mixing):
    """Attention along rows and columns with a bias for each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, HEADS, 31))

    def bias(self, axis: int, length: int) -> Tensor:
        place = torch.arange(length)
        return self.table[axis][:, place[:, None] - place[None] + 15]

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = (y.unflatten(2, size).transpose(1, 2) for y in self.heads(x))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(0, size[1]))
        q, k, v = (y.transpose(1, 3) for y in (q, k, mixed))
        scores = q @ k.mT / DEPTH**0.5 + self.bias(1, size[0])[None, None]
        mixed = (scores.softmax(-1) @ v).transpose(1, 3)
        return self.joined(mixed.transpose(1, 2).flatten(2, 3))


class Parts(Block):
    """Means of parts of the picture, resized and joined to it, as networks that segment do."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Conv2d(WIDTH, 4, 1) for _ in range(3))
        self.fuse = nn.Conv2d(WIDTH + 12, WIDTH, 3, padding=1)
        self.conv = conv(3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        x, parts = self.conv(x), []
        for side, each in zip((1, 2, 3), self.each, strict=True):
            pooled = F.relu(each(F.adaptive_avg_pool2d(x, side)))
            parts.append(F.interpolate(pooled, x.shape[-2:], mode="bilinear"))
        return self.fuse(torch.cat([x, *parts], dim=1))


class Kernel(Swin):
    """Attention in shifted windows by torch's kernel; the masks are repeated for all samples."""

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        many, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(many, n, 3, HEADS, DEPTH).permute(2, 0, 3, 1, 4)
        if mask is not None:
            mask = mask[:, None].repeat(many // len(mask), 1, 1, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(many, n, WIDTH))
        return out


class Parities(Block):
    """Every other row and column is a sample of its own for a convolution, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        places = [(slice(y, None, 2), slice(z, None, 2)) for y in (0, 1) for z in (0, 1)]
        parts = F.silu(self.conv(torch.cat([x[..., y, z] for y, z in places]))).chunk(4)
        out = torch.zeros_like(x)
        for (y, z), part in zip(places, parts, strict=True):
            out[..., y, z] = part
        return out


class Styled(Block):
    """A convolution whose weights the shift of each sample scales, with samples as groups."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 3, 3))

    def mix(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        weight = self.weight * x.mean((2, 3)).view(b, 1, c, 1, 1)
        weight = weight * weight.square().sum((2, 3, 4), keepdim=True).add(1e-6).rsqrt()
        return F.conv2d(x.reshape(1, -1, h, w), weight.flatten(0, 1), padding=1, groups=b).view_as(
            x
        )


class Routed(Mixing):
    """Two of four experts, all of which are computed, weigh the result of capped attention."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 4)
        self.first, self.second = (nn.Parameter(torch.randn(4, WIDTH, WIDTH)) for _ in range(2))

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = self.heads(x)
        x = self.joined((5 * torch.tanh(q @ k.mT / 5)).softmax(-1) @ v)
        best, places = self.route(x).softmax(-1).topk(2, dim=-1)
        share = torch.zeros_like(x[..., :4]).scatter(-1, places, best)
        each = F.gelu(torch.einsum("bnc,ecd->bned", x, self.first))
        return (torch.einsum("bned,edc->bnec", each, self.second) * share[..., None]).sum(2)


own("class-token", ClassToken)
own("relative-lines", tokens(Relative))
own("swin-kernel", lambda: Picture(Kernel(shift=2)), sizes=FOURS)
own("parity-samples", lambda: Picture(Parities()))
own("styled", lambda: Picture(Styled()))
own("capped-experts", tokens(Routed))
own("parts", lambda: Picture(Parts()))
