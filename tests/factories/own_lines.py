"""Tiny denoisers that mix sites along lines or in parts, and in groups between levels."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.factories.own_denoisers import SIZES, WIDTH, conv, layers, own
from tests.factories.own_transformers import HEADS, Mixing, tokens
from tests.factories.zoo import Size


class Along(Mixing):
    """Convolutions along each row and each column of the picture, and along all sites in order."""

    def __init__(self) -> None:
        super().__init__()
        line = partial(nn.Conv1d, WIDTH, WIDTH)
        self.row, self.column = line(3, padding=1), line(5, padding=2, groups=WIDTH)
        self.around = line(3, padding=2, dilation=2, groups=4, padding_mode="circular")
        self.next, self.point = line(4, padding="same"), line(1, groups=4)

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        b, n, c = x.shape
        grid = x.unflatten(1, size)
        rows = self.row(grid.flatten(0, 1).mT).mT.reshape(b, n, c)
        columns = self.column(grid.permute(0, 2, 3, 1).flatten(0, 1))
        columns = columns.view(b, size[1], c, size[0]).permute(0, 3, 1, 2).reshape(b, n, c)
        return rows + columns + (self.around(x.mT) + self.next(self.point(x.mT))).mT


class Depthwise(Mixing):
    """Tokens as a picture, for a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(3, padding=1, groups=WIDTH)

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return self.conv(x.mT.unflatten(2, size)).flatten(2).mT


LOCAL = ("along-lines", "grouped-transposed")  # each site reads few others

up = partial(nn.ConvTranspose2d, WIDTH, WIDTH)

own("along-lines", tokens(Along), quick=True)
own("depthwise-tokens", tokens(Depthwise))
own(
    "grouped-transposed",
    layers(
        partial(conv, 2, stride=2),
        partial(up, 4, 2, padding=1, groups=4),
        partial(conv, 2, stride=2),
        partial(nn.ConvTranspose2d, WIDTH, 2 * WIDTH, 2, 2, groups=WIDTH),
        partial(nn.Conv2d, 2 * WIDTH, WIDTH, 1),
    ),
    sizes=SIZES,
)


class Dilated(Mixing):
    """Attention among sites a part of the picture apart, and within these parts.

    The first is of places that are equal in 4 x 4 parts, as MaxViT's grids are, with a bias; the
    second within each quarter; the third along the columns, of places half of the height apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, 16, 16))

    def attend(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        return self.joined(F.scaled_dot_product_attention(q, k, v, bias))

    def mix(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        b, n, c = x.shape
        (h, w), out = size, x
        for p, order, bias in (
            (4, (0, 2, 4, 1, 3, 5), self.bias),
            (2, (0, 1, 3, 2, 4, 5), None),
            (2, (0, 2, 3, 4, 1, 5), None),
        ):
            grid = out.view(b, p, h // p, p, w // p, c).permute(*order)
            count = {4: 16, 2: 2 if order[4] == 1 else n // 4}[p]
            mixed = self.attend(grid.reshape(-1, count, c), bias).view(grid.shape)
            back = [order.index(i) for i in range(6)]
            out = out + mixed.permute(*back).reshape(b, n, c)
        return out


own(
    "dilated-attention",
    tokens(Dilated),
    sizes=(Size(1, 16, 16), Size(2, 16, 24), Size(1, 24, 16)),
)
