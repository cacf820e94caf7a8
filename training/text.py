"""The words: tokenizers learned from captions, and small text encoders of CLIP's kind and T5's."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from training.captions import caption, caption_of, caption_of_nothing
from training.scenes import draw_scene

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


def learn_pieces(folder: Path, scenes: int = 4000) -> T5Tokenizer:
    """Pieces as T5 has them, likely ones first; every word of the captions is one. Learned once."""
    if not (folder / "tokenizer.json").exists():
        texts = " ".join(some_captions(scenes))
        counts = Counter("▁" + word for word in re.findall(r"\w+", texts))
        most = math.log(sum(counts.values()))
        words = [(word, math.log(count) - most) for word, count in sorted(counts.items())]
        marks = [(chr(code), -20.0) for code in range(33, 127)]
        special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -10.0)]
        made = T5Tokenizer(vocab=special + words + marks, extra_ids=0, model_max_length=512)
        made.save_pretrained(folder)
    return T5Tokenizer.from_pretrained(folder)


def tokens_of(tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int = LENGTH) -> Tensor:
    """As the pipelines do it: every text padded to the full length."""
    made = tokenizer(
        texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )
    ids: Tensor = made.input_ids
    return ids


def make_encoder(tokenizer: CLIPTokenizer, layers: int = 3) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
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
    )


def make_t5(tokenizer: T5Tokenizer, layers: int = 2) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=HIDDEN,
            d_kv=HIDDEN // 4,
            d_ff=2 * HIDDEN,
            num_layers=layers,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
