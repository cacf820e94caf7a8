"""Encoders' answers, remembered: asked once for the same, again for anything else."""

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import maskfx
from maskfx.engine.own_pipeline import remember_encoders
from maskfx.errors import InputError
from maskfx.pipelines.encoder_cache import EncoderCache, is_function
from maskfx.pipelines.parts.stand_in import installed
from tests.engine.test_engine import call, pipeline
from tests.factories.pipelines import PIPES, call_of, square


class Encoder(nn.Module):
    """Counts its calls; answers in a class of its own, as VAEs do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.use_tiling = False
        self.calls = torch.zeros(())  # a tensor is no setting
        self.eval()

    def encode(self, picture: torch.Tensor) -> Any:
        self.calls += 1
        return SimpleNamespace(latent=[OrderedDict(mean=picture * self.weight)])

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return latent

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return text + self.weight


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def told(encoder: Encoder, most: int = 1 << 20) -> Any:
    """The encoder as a request's pipeline has it."""
    pipe = SimpleNamespace(vae=encoder)
    remember_encoders(pipe, {}, EncoderCache(most))
    return pipe.vae


def test_the_same_is_asked_once(encoder: Encoder) -> None:
    own, picture = told(encoder), torch.randn(4)
    answers = [own.encode(picture).latent[0]["mean"] for _ in range(3)]
    assert encoder.calls == 1
    assert all(torch.equal(answer, picture) for answer in answers)
    own.encode(picture + 1)
    own(picture)
    assert encoder.calls == 3, "another picture, another method"


def test_what_a_mask_hides_is_the_same_in_all_pictures(encoder: Encoder) -> None:
    own = told(encoder)
    for picture in (torch.ones(4), -torch.ones(4)):
        own.encode(picture * torch.zeros(4))
    assert encoder.calls == 1


def test_an_answer_may_be_written_into(encoder: Encoder) -> None:
    own, picture = told(encoder), torch.randn(4)
    for _ in range(3):
        answer = own.encode(picture).latent[0]["mean"]
        assert torch.equal(answer, picture)
        answer.zero_()


def change_weights(encoder: Encoder) -> None:
    encoder.weight.mul_(2)


def replace_weights(encoder: Encoder) -> None:
    encoder.weight = nn.Parameter(2 * torch.ones(4))


def switch(encoder: Encoder) -> None:
    encoder.use_tiling = True


@pytest.mark.parametrize("change", [change_weights, replace_weights, switch])
def test_a_changed_part_is_asked_again(encoder: Encoder, change: Callable[[Encoder], None]) -> None:
    own, picture = told(encoder), torch.ones(4)
    own.encode(picture)
    change(encoder)
    answer = own.encode(picture).latent[0]["mean"]
    assert encoder.calls == 2
    assert torch.equal(answer, encoder.weight)


def train(encoder: Encoder) -> None:
    encoder.train()


def hook(encoder: Encoder) -> None:
    encoder.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [train, hook])
def test_what_may_answer_otherwise_is_asked_each_time(
    encoder: Encoder, change: Callable[[Encoder], None]
) -> None:
    change(encoder)
    own = told(encoder)
    for _ in range(2):
        own.encode(torch.ones(4))
    assert encoder.calls == 2


def test_noise_and_gradients_make_answers_of_their_own(encoder: Encoder) -> None:
    assert is_function(encoder, ([torch.ones(4)], {}))
    assert not is_function(encoder, ([torch.ones(4)], {"generator": [torch.Generator()]}))
    with torch.enable_grad():
        assert not is_function(encoder, ([torch.ones(4)], {}))


def test_decoders_are_asked_each_time(encoder: Encoder) -> None:
    own = told(encoder)
    for _ in range(2):
        own.decode(torch.ones(4))
    assert encoder.calls == 2


def test_the_oldest_answer_goes(encoder: Encoder) -> None:
    remembered = EncoderCache(2 * 16)  # two pictures of four numbers
    pipe = SimpleNamespace(vae=encoder)
    remember_encoders(pipe, {}, remembered)
    a, b, c = torch.randn(3, 4)
    for picture in (a, b, a, c):  # b is the oldest
        pipe.vae.encode(picture)
        assert remembered.held <= remembered.most
    assert encoder.calls == 3
    pipe.vae.encode(a)
    assert encoder.calls == 3
    pipe.vae.encode(b)
    assert encoder.calls == 4
    pipe.vae.encode(torch.randn(9, 4))
    assert remembered.held <= remembered.most, "an answer that doesn't fit isn't kept"


def test_no_answers_no_part_is_held(encoder: Encoder) -> None:
    remembered = EncoderCache(16)
    for part in (encoder, Encoder()):
        pipe = SimpleNamespace(vae=part)
        remember_encoders(pipe, {}, remembered)
        pipe.vae.encode(torch.ones(4))
    assert len(remembered._watches) == 1


@pytest.mark.parametrize("most", [-1, True, 1.5, "64M"])
def test_bytes_that_are_no_number(most: Any) -> None:
    with pytest.raises(InputError, match="remember="):
        maskfx.Engine(remember=most)


@pytest.mark.parametrize("remember", [0, 1 << 20])
def test_an_engine_encodes_a_picture_once(remember: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline()
    alone = pipe(**call(1)).images
    seen: list[torch.Tensor] = []
    original = pipe.vae.encode

    def counted(picture: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(picture)
        return original(picture, *args, **kwargs)

    monkeypatch.setattr(pipe.vae, "encode", counted)
    with maskfx.Engine(remember=remember) as engine:
        found = [engine.submit(pipe, **call(1)).result(120).images for _ in range(3)]
    assert all(torch.equal(images, alone) for images in found)
    assert len(seen) == (2 if remember else 6), "the picture and what isn't masked of it"


class Cache:
    """An object that a call may write into."""


def test_an_object_among_the_arguments_is_never_kept(encoder: Encoder) -> None:
    assert is_function(encoder, ((), {"given": [{"a": 1}, None, "b", torch.float16]}))
    for given in (Cache(), [Cache()], {"a": Cache()}, OrderedDict(a=1)):
        assert not is_function(encoder, ((), {"past": given}))


def counted(part: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Note the calls that reach a method of a part."""
    seen: list[object] = []
    original = getattr(part, method)

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return original(*args, **kwargs)

    monkeypatch.setitem(vars(part), method, noted)
    return seen


def test_calls_encode_the_same_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = PIPES["StableDiffusionInpaintPipeline-spoken"]
    quality = maskfx.Quality(reuse="steps", refresh=1)
    made: dict[int, list[Any]] = {}
    for remember, asked in ((0, (6, 6)), (1 << 20, (2, 3))):
        plain = kind.build()
        pictures, texts = (
            counted(part, method, monkeypatch)
            for part, method in ((plain.vae, "encode"), (plain.text_encoder, "forward"))
        )
        pipe = maskfx.compile(plain, quality="all-steps", remember=remember)
        made[remember] = [
            np.asarray(pipe(**call_of(kind, seed, square()), quality=quality).images[0])
            for seed in (1, 1, 2)
        ]
        assert (len(pictures), len(texts)) == asked
    assert all(map(np.array_equal, made[0], made[1 << 20]))
    assert not np.array_equal(made[0][0], made[0][2])


def test_an_encoder_in_place_of_another_is_asked() -> None:
    pipe = maskfx.compile(PIPES["StableDiffusionInpaintPipeline-spoken"].build())
    before, other = pipe.text_encoder, copy.deepcopy(pipe.text_encoder)
    assert installed(before) is not None
    assert installed(other) is None, "a copy has no stand-in"
    pipe.text_encoder = other
    assert installed(before) is None
    assert installed(other) is not None
    vae = pipe.vae
    assert maskfx.decompile(pipe) is pipe
    assert not any(installed(part, name) for part in (other, vae) for name in list(vars(part)))


def test_an_encoder_that_is_taken_out_is_freed() -> None:
    kind = PIPES["StableDiffusionInpaintPipeline-spoken"]
    pipe = maskfx.compile(kind.build())
    for _ in range(2):
        pipe(**call_of(kind, 1, square()))
    alive = weakref.ref(pipe.text_encoder)
    pipe.text_encoder = None
    gc.collect()
    assert alive() is None


def test_a_part_that_the_user_compiled_has_no_stand_in() -> None:
    plain = PIPES["StableDiffusionInpaintPipeline-spoken"].build()
    plain.text_encoder.compile(backend="eager")
    pipe = maskfx.compile(plain)
    assert installed(pipe.text_encoder) is None
