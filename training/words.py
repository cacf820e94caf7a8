"""A text encoder learns what captions say before a denoiser listens to it.

CLIP's encoders come trained; from weights all by chance a denoiser needs most of its training to
distinguish one colour's word from another's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CLIPTextModel,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    T5EncoderModel,
    T5Tokenizer,
)

from training.captions import caption, caption_of
from training.loop import Numbers, Task, averaged_weights, put_weights, weights_of
from training.residuals import quicken_text
from training.scenes import (
    COLOURS,
    FLOORS,
    GROUNDS,
    MATERIALS,
    SHAPES,
    SKIES,
    WALLS,
    Backdrop,
    Thing,
    draw_scene,
)
from training.text import HIDDEN, learn_pieces, learn_tokenizer, make_encoder, make_t5, tokens_of

ABOVE, BELOW = SKIES + WALLS, GROUNDS + FLOORS
# what a caption's summary is asked for; of several things any may be named
ASKED = {
    "coloured": len(SHAPES) * len(COLOURS),
    "made": len(SHAPES) * len(MATERIALS),
    "above": len(ABOVE),
    "below": len(BELOW),
}


class TextTask(Task):
    """Which things in which colours and materials a caption names, and what is around them."""

    name = "text"
    rate = 1e-3
    average = 0.99

    def __init__(self, runs: Path, batch: int = 128) -> None:
        self.batch = batch
        self.tokenizer, encoder = self.begun(runs)
        self.module: nn.Module = nn.ModuleDict(
            {
                "text_encoder": encoder,
                "heads": nn.ModuleDict({k: nn.Linear(HIDDEN, n) for k, n in ASKED.items()}),
            }
        )
        quicken_text(encoder)

    def begun(self, runs: Path) -> tuple[PreTrainedTokenizerBase, nn.Module]:
        tokenizer = learn_tokenizer(runs / "tokenizer")
        return tokenizer, make_encoder(tokenizer)

    def read(self, ids: Tensor) -> Tensor:
        """Which tokens have read all of a text: its end, which fills the rest."""
        return ids == self.tokenizer.eos_token_id

    def loss(self, step: int) -> tuple[Tensor, Numbers]:
        answers, wanted = self.answers(self.module, "train", np.random.default_rng((13, step)))
        parts = {k: F.cross_entropy(answers[k], wanted[k]) for k in ASKED}
        return torch.stack(list(parts.values())).sum(), {k: v.item() for k, v in parts.items()}

    def answers(
        self, module: nn.Module, split: str, rng: np.random.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Scores of what captions may say, and what they say, as chances."""
        texts, wanted = [], {k: torch.zeros(self.batch, n) for k, n in ASKED.items()}
        for row in range(self.batch):
            scene = draw_scene(split, int(rng.integers(2**40)))
            things = scene.things
            if rng.random() < 0.6:
                things = (things[int(rng.integers(len(things)))],)
                texts.append(caption_of(things[0], scene, rng))
            else:
                texts.append(caption(scene, rng))
            for key, at in said(things, scene.backdrop):
                wanted[key][row, at] += 1
        ids = tokens_of(self.tokenizer, texts)
        states = module.get_submodule("text_encoder")(ids)[0]
        after = self.read(ids)[..., None]
        summary = (states * after).sum(1) / after.sum(1)
        heads = module.get_submodule("heads")
        answers = {k: heads.get_submodule(k)(summary) for k in ASKED}
        return answers, {k: v / v.sum(1, keepdim=True) for k, v in wanted.items()}

    def judge(self, averaged: nn.Module) -> Numbers:
        answers, wanted = self.answers(averaged, "held-out", np.random.default_rng(14))
        hits = {k: wanted[k].gather(1, answers[k].argmax(1, keepdim=True)) > 0 for k in ASKED}
        return {k: hit.float().mean().item() for k, hit in hits.items()}


class PiecesTask(TextTask):
    """The same of an encoder of T5's kind, all of whose words read all of the text."""

    name = "t5"

    def begun(self, runs: Path) -> tuple[PreTrainedTokenizerBase, nn.Module]:
        tokenizer = learn_pieces(runs / "pieces")
        return tokenizer, make_t5(tokenizer)

    def read(self, ids: Tensor) -> Tensor:
        return ids != self.tokenizer.pad_token_id


def said(things: tuple[Thing, ...], backdrop: Backdrop) -> list[tuple[str, int]]:
    """The answers that are right."""
    right = [("above", ABOVE.index(backdrop.above)), ("below", BELOW.index(backdrop.below))]
    for thing in things:
        shape = SHAPES.index(thing.shape)
        right.append(("coloured", shape * len(COLOURS) + COLOURS.index(thing.colour)))
        right.append(("made", shape * len(MATERIALS) + MATERIALS.index(thing.material)))
    return right


def read_encoder(runs: Path, tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """The encoder that `TextTask` trained."""
    encoder = make_encoder(tokenizer)
    teach(runs / "text", encoder)
    return encoder


def read_t5(runs: Path, tokenizer: T5Tokenizer) -> T5EncoderModel:
    """The encoder that `PiecesTask` trained."""
    encoder = make_t5(tokenizer)
    teach(runs / "t5", encoder)
    return encoder


def teach(run: Path, encoder: nn.Module) -> None:
    """Give an encoder what a run has learned."""
    weights = averaged_weights(run / "checkpoint.pt")
    put_weights(encoder, {k: weights[f"text_encoder.{k}"] for k in weights_of(encoder)})
