"""Valid text tokens that are picked by their places: attention over them keeps its length."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maskfx
from maskfx.compiler.capture.tracing.packings import PackedTokens, Packings, TokenPlaces
from tests.compiler.test_selections import WIDTH, error, numbers

LENGTH = 7


class Unpadded(nn.Module):
    """Each sample's valid text tokens attend together with the picture; padding follows again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both = nn.Linear(WIDTH, WIDTH)

    def places(self, mask: Tensor) -> Any:
        if self.how == "tuple":
            return mask.nonzero(as_tuple=True)[0]
        if self.how == "column":
            return torch.nonzero(mask)[:, 0]
        return torch.nonzero(mask[None].flatten(), as_tuple=False).flatten()

    def attended(self, x: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        found = []
        for i in range(len(x)):
            places = self.places(mask[i])
            valid = text[i : i + 1, places] if self.how == "tuple" else text[i : i + 1, places, :]
            joint = torch.cat([x[i : i + 1], valid], dim=-2)
            if self.how == "scaled":
                joint = joint * places.sum().add(1).reciprocal()
            y = F.scaled_dot_product_attention(joint, joint, joint)
            found.append(F.pad(y, (0, 0, 0, x.shape[1] + text.shape[1] - y.size(1))))
        return self.both(torch.cat(found))

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
    ) -> Tensor:
        x, text = self.first(hidden_states), self.text(encoder_hidden_states)
        text = text * timestep[:, None, None]
        for _ in range(2):
            new = self.attended(x, text, encoder_attention_mask)
            x, text = x + new[:, : x.shape[1]], text + new[:, x.shape[1] :]
        return x


def make(seed: int, batch: int = 1, tokens: int = 12, kind: str = "end") -> dict[str, Any]:
    lengths = torch.arange(batch)[:, None]
    masks: dict[str, Callable[[], Tensor]] = {
        "end": lambda: torch.arange(LENGTH)[None] < 4 + lengths,
        "holes": lambda: torch.arange(LENGTH)[None] % 2 == lengths % 2,
        "all": lambda: torch.ones(batch, LENGTH, dtype=torch.bool),
        "none": lambda: torch.zeros(batch, LENGTH, dtype=torch.bool),
    }
    return {
        "hidden_states": numbers(batch, tokens, WIDTH, seed=seed),
        "timestep": numbers(batch, seed=seed + 1).abs() + 0.5,
        "encoder_hidden_states": numbers(batch, LENGTH, WIDTH, seed=90),
        "encoder_attention_mask": masks[kind](),
    }


def built(how: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Unpadded(how).eval().requires_grad_(False)


@pytest.mark.parametrize("how", ["flattened", "tuple", "column"])
def test_texts_without_padding_run_on_rows(how: str) -> None:
    module = built(how)
    denoiser = maskfx.compile(module)
    mask = torch.arange(12) % 5 == 1
    steps, wanted = [], []
    for seed, (batch, kind) in enumerate([(1, "end"), (3, "holes"), (2, "all"), (1, "none")]):
        inputs = make(seed, batch, kind=kind)
        output, kept = denoiser.record(**inputs)
        assert error(output, module(**inputs)) < 1e-5
        steps.append(maskfx.EditStep(inputs, mask, kept))
        wanted.append(module(**inputs))
    for found, expected in zip(denoiser.edit(steps), wanted, strict=True):
        assert error(found, expected) < 1e-5
    assert all(one.program is not None and not one.reasons for one in denoiser.compilations)
    longer = make(30, 1, tokens=14)
    assert error(denoiser.batch([longer])[0], module(**longer)) < 1e-5
    assert len(denoiser.compilations) == 1


def test_another_use_of_places_stays_right() -> None:
    module, inputs = built("scaled"), make(0, 2)
    assert error(maskfx.compile(module).batch([inputs])[0], module(**inputs)) < 1e-5


def test_picks_when_used_otherwise() -> None:
    x, mask = numbers(2, 5, 3, seed=0), torch.tensor([True, False, True, True, False])
    places = mask.nonzero()
    kept = x[:, places[:, 0]]
    padded = torch.cat([kept, torch.zeros(2, 2, 3)], 1)
    with Packings():
        own = torch.nonzero(mask)
        assert isinstance(own, TokenPlaces)
        assert torch.equal(own + 1, places + 1)
        assert own.shape == (3, 1)
        own = own.flatten()
        some = x[:, own]
        assert isinstance(some, PackedTokens)
        assert torch.equal(some * 2, kept * 2)
        assert torch.equal(torch.relu(some), torch.relu(kept))
        assert torch.equal(some[:, 0], kept[:, 0])
        assert len(x.transpose(0, 1)[own]) == 3
        assert torch.equal(x[0, own], kept[0])
        assert torch.equal(x[..., own, :], kept)
        assert torch.equal(torch.cat([some, x], 1), torch.cat([kept, x], 1))
        assert torch.equal(F.pad(some, (0, 0, 0, 5 - some.shape[1])), padded)
        assert torch.equal(F.pad(some, (0, 0, 0, 6 - some.size(1))), F.pad(kept, (0, 0, 0, 3)))
        assert torch.equal(F.pad(some, (1, 0, 0, 2)), F.pad(kept, (1, 0, 0, 2)))
        causal = F.scaled_dot_product_attention(some, some, some, is_causal=True)
        assert torch.equal(causal, F.scaled_dot_product_attention(kept, kept, kept, is_causal=True))
        mixed = F.scaled_dot_product_attention(x, some, some)
    assert torch.allclose(mixed, F.scaled_dot_product_attention(x, kept, kept), atol=1e-6)
    assert isinstance(mask.nonzero(), Tensor)
