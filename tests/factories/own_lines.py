"""Tiny denoisers that convolve along lines of sites, and in groups between levels."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from tests.factories.own_denoisers import SIZES, WIDTH, conv, layers, own
from tests.factories.own_transformers import Mixing, tokens


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
