"""The words: a tokenizer learned from captions, and small CLIP text encoders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from bench.reference.captions import caption, caption_of, caption_of_nothing
from bench.reference.scenes import draw_scene

LENGTH = 32
HIDDEN = 128
START, END = "<|startoftext|>", "<|endoftext|>"


def some_captions(count: int) -> list[str]:
    texts = []
    for seed in range(count):
        rng = np.random.default_rng((4, seed))
        scene = draw_scene("train", seed)
        texts += [caption(scene, rng), caption_of_nothing(scene, rng)]
        texts += [caption_of(thing, scene, rng) for thing in scene.things]
    return texts


def learn_tokenizer(folder: Path, scenes: int = 4000) -> CLIPTokenizer:
    """Byte pairs as CLIP has them; every word of the captions becomes one token.

    Learned once: a folder that has the tokenizer is read, so that a checkpoint keeps its words.
    """
    if not (folder / "vocab.json").exists():
        learner = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token=END))
        learner.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        learner.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=1200,
            min_frequency=2,
            initial_alphabet=alphabet,
            end_of_word_suffix="</w>",
            show_progress=False,
        )
        learner.train_from_iterator(some_captions(scenes), trainer)
        state = json.loads(learner.to_str())["model"]
        # every byte may end a word, learned or not
        tokens = dict(state["vocab"])
        for byte in alphabet:
            tokens.setdefault(byte + "</w>", len(tokens))
        for special in (START, END):
            tokens[special] = len(tokens)
        folder.mkdir(parents=True, exist_ok=True)
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["merges"]]
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
        (folder / "vocab.json").write_text(json.dumps(tokens, ensure_ascii=False))
    return CLIPTokenizer(
        vocab=str(folder / "vocab.json"),
        merges=str(folder / "merges.txt"),
        model_max_length=LENGTH,
        pad_token=END,
    )


def tokens_of(tokenizer: CLIPTokenizer, texts: list[str]) -> Tensor:
    """As the pipelines do it: every text padded to the full length."""
    made = tokenizer(
        texts, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt"
    )
    ids: Tensor = made.input_ids
    return ids


def text_config(tokenizer: CLIPTokenizer, layers: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        projection_dim=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        hidden_act="quick_gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_encoder(tokenizer: CLIPTokenizer, layers: int) -> CLIPTextModel:
    return CLIPTextModel(text_config(tokenizer, layers))


def make_projecting_encoder(tokenizer: CLIPTokenizer, layers: int) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(text_config(tokenizer, layers))
