"""Tiny, randomly initialised pipelines of diffusers: real classes, made-up small configs.

For every :class:`Kind` how to build the pipeline and what a call of it takes. The denoisers are
those of the zoo; pictures are 32 x 32, latents 16 x 16, packed tokens 8 x 8. Nothing is downloaded,
and no weight is zero.
"""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import maskfx
from maskfx.pipelines.templates.template_library import TemplateLibrary
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.denoiser import CompiledDenoiser
from tests.factories.zoo import (
    CHROMA,
    CROSS,
    FLUX,
    FLUX2,
    POOLED,
    QWEN,
    SD3,
    Z_IMAGE,
    Draw,
    only,
    tiny,
)
from tests.factories.zoo import SD15 as DEEP_SD15
from tests.factories.zoo import SDXL as DEEP_SDXL

SIDE = 32
TEXT = 5
STEPS = 3

Arguments = dict[str, Any]

# all levels and kinds of blocks of the zoo's UNets, in half as many layers: captures and steps of
# these take much of the time of tests
SD15 = only(DEEP_SD15, layers_per_block=1)
SDXL = only(DEEP_SDXL, layers_per_block=1, transformer_layers_per_block=(1, 1, 2))


@dataclass(frozen=True)
class Kind:
    """One pipeline class, built in one way."""

    name: str  # the class, and after a dash what is special
    build: Callable[[], Any]
    inputs: Callable[[int], Arguments]  # seed -> what a call takes besides picture and mask
    edits: str  # how a mask gets in: "blend", "channels", "control", "reference", "image", "text"
    side: int = SIDE  # of the picture
    output: str = "latent"  # the output type that is compared

    @property
    def modular(self) -> bool:
        return "ModularPipeline" in self.name

    @property
    def compared(self) -> Arguments:
        """Arguments of a call whose `result` is compared."""
        if self.modular:
            return {"output_type": "pil", "output": "latents"}
        return {"output_type": self.output, "return_dict": False}

    def result(self, returned: Any) -> Any:
        """What is compared, of what such a call returns."""
        return returned if self.modular else returned[0]


PIPES: dict[str, Kind] = {}


# Pictures and masks.


def picture(seed: int = 0, size: int = SIDE) -> Image.Image:
    """A picture of smooth blobs."""
    draw = Draw(1000 + seed)
    small = draw.uniform(1, 3, 5, 5)
    large = nn.functional.interpolate(small, size=(size, size), mode="bilinear")
    return Image.fromarray((large[0].movedim(0, -1) * 255).round().to(torch.uint8).numpy())


def square(first: int = 8, last: int = 20, size: int = SIDE) -> Image.Image:
    """A mask: white is edited."""
    mask = np.zeros((size, size), np.uint8)
    mask[first:last, first:last] = 255
    return Image.fromarray(mask)


def white(size: int = SIDE) -> Image.Image:
    return square(0, size, size)


def strokes(size: int = SIDE) -> Image.Image:
    """Lines of one pixel."""
    mask = np.zeros((size, size), np.uint8)
    mask[5, 3 : min(29, size - 3)] = 255
    mask[3 : min(29, size - 3), min(17, size // 2)] = 255
    return Image.fromarray(mask)


# Components.


def vae(latent: int = 4) -> nn.Module:
    return tiny(
        "AutoencoderKL",
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent,
        norm_num_groups=4,
        sample_size=SIDE,
        shift_factor=0.1,
        scaling_factor=0.5,
    )


def still(coder: Any) -> Any:
    """The same VAE without variance, for pipelines that draw it from torch's own generator."""
    count = coder.quant_conv.weight.shape[0] // 2
    coder.quant_conv.weight.data[count:] = 0
    coder.quant_conv.bias.data[count:] = -30
    return coder


def qwen_vae(halvings: int = 1) -> nn.Module:
    return tiny(
        "AutoencoderKLQwenImage",
        base_dim=4,
        z_dim=4,
        dim_mult=[1] * halvings + [2],
        num_res_blocks=1,
        temperal_downsample=[False] * halvings,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )


def flux2_vae() -> nn.Module:
    return tiny(
        "AutoencoderKLFlux2",
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=SIDE,
    )


def ddim(**config: Any) -> Any:
    """For v-prediction, which stays bounded with weights that were never trained."""
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        prediction_type="v_prediction",
        beta_schedule="scaled_linear",
        clip_sample=False,
        steps_offset=1,
        set_alpha_to_one=False,
        **config,
    )


def flow(**config: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**config)


CONTROL = {"conditioning_embedding_out_channels": (8, 16)}


def unet(**changed: Any) -> nn.Module:
    return tiny("UNet2DConditionModel", **only(SD15, **changed))


def unet_xl(**changed: Any) -> nn.Module:
    return tiny("UNet2DConditionModel", **only(SDXL, **changed))


def control_net(config: Arguments, seed: int = 0) -> nn.Module:
    net = tiny("ControlNetModel", **only(config, "sample_size", "up_block_types", **CONTROL))
    if seed:
        draw = Draw(seed)
        for parameter in net.parameters():
            parameter.data.add_(0.05 * draw.normal(*parameter.shape))
    return net


def seeded(seed: int, kind: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """A module with weights drawn from a seed, for inference."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(*given, **named).eval().requires_grad_(False)


def clip(width: int = CROSS) -> Any:
    """A tiny CLIP text encoder."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(words()),
        hidden_size=width,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    made = seeded(2, CLIPTextModel, config)
    for parameter in made.parameters():
        if not bool(parameter.any()):
            parameter.data.add_(0.1)
    return made


def words() -> dict[str, int]:
    """A vocabulary of letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{x}</w>" for x in letters)]
    return {name: i for i, name in enumerate(names)}


def clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    made = CLIPTokenizer(vocab=words(), merges=[])
    made.model_max_length = 16
    return made


def t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(pieces()), d_model=CROSS, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    return seeded(3, T5EncoderModel, config)


def pieces() -> list[tuple[str, float]]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)] + [
        (x, -2.0) for x in letters
    ]


def t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    return T5Tokenizer(vocab=pieces(), extra_ids=0)


def qwen3() -> Any:
    """A text encoder of enough layers that three of them are read, as Flux2's Klein does."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(byte_names()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=27,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return seeded(5, Qwen3ForCausalLM, config)


def byte_names() -> dict[str, int]:
    """A vocabulary of bytes, as byte-level tokenizers write them."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values()]
    return {name: i for i, name in enumerate(names)}


def qwen_tokenizer() -> Any:
    from transformers import Qwen2Tokenizer

    made = Qwen2Tokenizer(vocab=byte_names(), merges=[])
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


# What calls take.


def text_of(seed: int, *, negative: bool = True, pooled: bool = False, mask: bool = False) -> Any:
    draw = Draw(seed)
    found: Arguments = {"prompt_embeds": draw.normal(1, TEXT, CROSS)}
    if negative:
        found["negative_prompt_embeds"] = draw.normal(1, TEXT, CROSS)
    if pooled:
        found["pooled_prompt_embeds"] = draw.normal(1, POOLED)
    if pooled and negative:
        found["negative_pooled_prompt_embeds"] = draw.normal(1, POOLED)
    if mask:
        found["prompt_embeds_mask"] = torch.ones(1, TEXT, dtype=torch.long)
    if mask and negative:
        found["negative_prompt_embeds_mask"] = torch.ones(1, TEXT, dtype=torch.long)
    return found


def usual(seed: int, text: Callable[[int], Arguments], **more: Any) -> Arguments:
    return {**text(seed), "num_inference_steps": STEPS, **sized(more)}


def sized(more: Arguments) -> Arguments:
    return {"height": SIDE, "width": SIDE, **more}


def with_control(seed: int, text: Callable[[int], Arguments], nets: int = 1, **more: Any) -> Any:
    pictures = [picture(50 + i) for i in range(nets)]
    control = {"control_image": pictures if nets > 1 else pictures[0]}
    return {**usual(seed, text), **control, **more}


def z_image_text(seed: int) -> Arguments:
    draw = Draw(seed)
    return {
        "prompt_embeds": [draw.normal(TEXT, CROSS)],
        "negative_prompt_embeds": [draw.normal(TEXT - 1, CROSS)],
    }


def chroma_text(seed: int) -> Arguments:
    return {
        **text_of(seed),
        "prompt_attention_mask": torch.ones(1, TEXT, dtype=torch.bool),
        "negative_prompt_attention_mask": torch.ones(1, TEXT, dtype=torch.bool),
        "true_cfg_scale": 3.0,
    }


# Pipelines.


def pipe_of(name: str, components: Callable[[], Arguments]) -> Any:
    """A pipeline; what it needs and isn't given is None."""
    import inspect

    factory = getattr(importlib.import_module("diffusers"), name)
    given = components()
    for parameter in list(inspect.signature(factory.__init__).parameters.values())[1:]:
        if parameter.default is inspect.Parameter.empty:
            given.setdefault(parameter.name, None)
    if "requires_safety_checker" in inspect.signature(factory.__init__).parameters:
        given["requires_safety_checker"] = False
    made = factory(**given)
    made.set_progress_bar_config(disable=True)
    return made


def add(
    name: str,
    edits: str,
    components: Callable[[], Arguments],
    inputs: Callable[[int], Arguments],
    side: int = SIDE,
    output: str = "latent",
) -> None:
    builder = partial(pipe_of, name.partition("-")[0], components)
    register(Kind(name, builder, inputs, edits, side, output))


def register(kind: Kind) -> None:
    if kind.name in PIPES:
        raise ValueError(f"two pipelines are called {kind.name}")
    PIPES[kind.name] = kind


def sd(**changed: Any) -> Arguments:
    return {"vae": vae(), "unet": unet(**changed), "scheduler": ddim()}


def sdxl(**changed: Any) -> Arguments:
    return {"vae": vae(), "unet": unet_xl(**changed), "scheduler": ddim()}


def sd3(**changed: Any) -> Arguments:
    config = {"in_channels": 16, "out_channels": 16, **changed}
    net = tiny("SD3Transformer2DModel", **only(SD3, **config))
    return {"vae": vae(16), "transformer": net, "scheduler": flow()}


def flux(**changed: Any) -> Arguments:
    net = tiny("FluxTransformer2DModel", **only(FLUX, **changed))
    return {"vae": vae(), "transformer": net, "scheduler": flow()}


def chroma() -> Arguments:
    net: Any = tiny("ChromaTransformer2DModel", **CHROMA)
    net.register_to_config(guidance_embeds=False)  # the inpainting pipeline asks for it
    return {"vae": vae(), "transformer": net, "scheduler": flow()}


def qwen(halvings: int = 1) -> Arguments:
    net = tiny("QwenImageTransformer2DModel", **QWEN)
    return {"vae": qwen_vae(halvings), "transformer": net, "scheduler": flow()}


def z_image() -> Arguments:
    net = tiny("ZImageTransformer2DModel", **Z_IMAGE)
    return {"vae": vae(), "transformer": net, "scheduler": flow()}


def flux2(**changed: Any) -> Arguments:
    net = tiny("Flux2Transformer2DModel", **only(FLUX2, **changed))
    return {"vae": flux2_vae(), "transformer": net, "scheduler": flow()}


def sd_control(nets: int = 1) -> Arguments:
    found = [control_net(SD15, i) for i in range(nets)]
    return {**sd(), "controlnet": found if nets > 1 else found[0]}


def flux_control() -> Arguments:
    """Each residual of the net is for two blocks of the denoiser."""
    small = {"num_layers": 1, "num_single_layers": 1}
    net = tiny("FluxControlNetModel", **only(FLUX, **small))
    return {**flux(**{**small, "num_layers": 2}), "controlnet": net}


def spoken() -> Arguments:
    """Stable Diffusion with a text encoder."""
    return {**sd(), "text_encoder": clip(), "tokenizer": clip_tokenizer()}


def flux_spoken() -> Arguments:
    return {
        **flux(),
        "text_encoder": clip(POOLED),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": t5_tokenizer(),
    }


def klein_spoken() -> Arguments:
    return {
        **flux2(guidance_embeds=False, joint_attention_dim=48),
        "text_encoder": qwen3(),
        "tokenizer": qwen_tokenizer(),
    }


def said(seed: int, **more: Any) -> Arguments:
    prompt = ("a cat", "two dogs", "the red house")[seed % 3]
    return {"prompt": prompt, "num_inference_steps": STEPS, **sized(more)}


two, pooled = text_of, partial(text_of, pooled=True)
single = partial(text_of, negative=False, pooled=True)  # no guidance by a second call
true_cfg = partial(usual, text=pooled, true_cfg_scale=3.0)
qwen_text = partial(text_of, mask=True)

# the mask is laid over the latents after each step
add("StableDiffusionInpaintPipeline", "blend", sd, partial(usual, text=two))
add("StableDiffusionInpaintPipeline-spoken", "blend", spoken, said)
add("StableDiffusionXLInpaintPipeline", "blend", sdxl, partial(usual, text=pooled))
add("StableDiffusion3InpaintPipeline", "blend", sd3, partial(usual, text=pooled, strength=1.0))
add("FluxInpaintPipeline", "blend", flux, partial(usual, text=single, strength=1.0))
add("FluxInpaintPipeline-truecfg", "blend", flux, partial(true_cfg, strength=1.0))
add(
    "FluxInpaintPipeline-spoken",
    "blend",
    flux_spoken,
    partial(said, strength=0.8, max_sequence_length=16),
)
add("ChromaInpaintPipeline", "blend", chroma, partial(usual, text=chroma_text, strength=1.0))
add("QwenImageInpaintPipeline", "blend", qwen, partial(usual, text=qwen_text, strength=1.0))
add("ZImageInpaintPipeline", "blend", z_image, partial(usual, text=z_image_text))
# the denoiser gets the mask
add(
    "StableDiffusionInpaintPipeline-9",
    "channels",
    partial(sd, in_channels=9),
    partial(usual, text=two),
)
add(
    "StableDiffusionXLInpaintPipeline-9",
    "channels",
    partial(sdxl, in_channels=9),
    partial(usual, text=pooled),
)
add(
    "StableDiffusion3InpaintPipeline-33",
    "channels",
    partial(sd3, in_channels=33),
    partial(usual, text=pooled, strength=1.0),
)
add(
    "FluxFillPipeline",
    "channels",
    partial(flux, in_channels=48, out_channels=16),
    partial(usual, text=single),
)
# a ControlNet beside the denoiser
add(
    "StableDiffusionControlNetInpaintPipeline",
    "control",
    sd_control,
    partial(with_control, text=two),
)
add(
    "StableDiffusionControlNetInpaintPipeline-multi",
    "control",
    partial(sd_control, 2),
    partial(with_control, text=two, nets=2, controlnet_conditioning_scale=[0.5, 0.8]),
)
add(
    "StableDiffusionControlNetInpaintPipeline-guess",
    "control",
    sd_control,
    partial(with_control, text=two, guess_mode=True),
)
add(
    "StableDiffusionXLControlNetInpaintPipeline",
    "control",
    lambda: {**sdxl(), "controlnet": control_net(SDXL)},
    partial(with_control, text=pooled),
)
add(
    "FluxControlNetInpaintPipeline",
    "control",
    flux_control,
    partial(with_control, text=single, strength=1.0),
)
# the picture is passed to the denoiser beside the latents; the pipeline knows no mask
add(
    "FluxKontextPipeline",
    "reference",
    flux,
    partial(usual, text=single, max_area=SIDE * SIDE, _auto_resize=False),
)
add(
    "FluxKontextPipeline-truecfg",
    "reference",
    flux,
    partial(true_cfg, max_area=SIDE * SIDE, _auto_resize=False),
)
add(
    "Flux2Pipeline",
    "reference",
    flux2,
    partial(usual, text=partial(text_of, negative=False), height=64, width=64),
    64,
)
add(
    "Flux2KleinPipeline",
    "reference",
    partial(flux2, guidance_embeds=False),
    partial(usual, text=two, height=64, width=64),
    64,
)
# this one enlarges its reference to a million pixels: 1024 tokens here
add(
    "QwenImageEditPipeline",
    "reference",
    partial(qwen, 4),
    partial(usual, text=qwen_text, height=256, width=256),
    256,
)
# the picture is where the latents begin
add(
    "StableDiffusionImg2ImgPipeline",
    "image",
    sd,
    lambda seed: {**text_of(seed), "num_inference_steps": 5, "strength": 0.6},
)
add("FluxImg2ImgPipeline", "image", flux, partial(usual, text=single, strength=0.7))
# pictures from nothing
add("StableDiffusionPipeline", "text", sd, partial(usual, text=two))
add("StableDiffusionXLPipeline", "text", sdxl, partial(usual, text=pooled))
add("StableDiffusion3Pipeline", "text", sd3, partial(usual, text=pooled))
add("FluxPipeline", "text", flux, partial(usual, text=single))
add("FluxPipeline-spoken", "text", flux_spoken, partial(said, max_sequence_length=16))
add("ZImagePipeline", "text", z_image, partial(usual, text=z_image_text))


def call_of(kind: Kind, seed: int = 0, mask: Image.Image | None = None, **more: Any) -> Arguments:
    """What a call takes: with a mask as an edit of the picture."""
    given = {**kind.inputs(seed), "generator": noise(seed), **more}
    if kind.edits != "text":
        given.setdefault("image", picture(size=kind.side))
    if mask is not None:
        given["mask_image"] = mask
    return given


def noise(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distance(a: Any, b: Any) -> float:
    """Relative to the size of b; both are tensors or arrays."""
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return float((a - b).norm() / b.norm())


# Compiled ones, for tests that leave them as they are.


def plain(name: str) -> Any:
    pipe, kind = built(name)
    assert type(pipe) is kind, f"a test before this one made the {name} that all share a {pipe}"
    return pipe


@cache
def built(name: str) -> tuple[Any, type]:
    pipe = PIPES[name].build()
    return pipe, type(pipe)


@cache
def compiled(name: str) -> Any:
    return maskfx.compile(PIPES[name].build(), quality="all-steps")


def anew(name: str, *, compiled_pipe: Any = None, **changed: Any) -> Any:
    """A compiled pipeline that has recorded nothing yet, over denoisers that are captured."""
    own = copy.copy(compiled_pipe or compiled(name))
    shared = own._maskfx
    library = TemplateLibrary(Tiers(host_bytes=1 << 30))
    fresh = {"library": library, "notes": Counter(), "probed": {}, "shapes": {}}
    own._maskfx = replace(shared, **{**fresh, **changed})
    return own


def latents(pipe: Any, **arguments: Any) -> Tensor:
    """What a call ends with."""
    if hasattr(pipe, "blocks"):
        ended: Tensor = pipe(**arguments, output_type="pil", output="latents")
        return ended
    found: Tensor = pipe(**arguments, output_type="latent", return_dict=False)[0]
    return found


class Steps:
    """What a denoiser's `step` was asked for, call by call: which members, of which kind."""

    def __init__(self, monkeypatch: Any) -> None:
        self.asked: list[list[str]] = []
        step, itself = CompiledDenoiser.step, CompiledDenoiser.plain_step
        together = CompiledDenoiser.plain_together

        def stepping(denoiser: CompiledDenoiser, steps: Any) -> Any:
            self.asked.append([type(one).__name__ for one in steps])
            return step(denoiser, steps)

        def computing(denoiser: CompiledDenoiser, one: Any) -> Any:
            self.asked.append(["itself"])
            return itself(denoiser, one)

        def at_once(denoiser: CompiledDenoiser, group: Any) -> Any:
            self.asked.append(["itself"] * len(group.numbers))
            return together(denoiser, group)

        monkeypatch.setattr(CompiledDenoiser, "step", stepping)
        monkeypatch.setattr(CompiledDenoiser, "plain_step", computing)
        monkeypatch.setattr(CompiledDenoiser, "plain_together", at_once)

    def taken(self) -> list[list[str]]:
        """What came since the last look."""
        asked, self.asked = self.asked, []
        return asked

    def kinds(self) -> set[str]:
        return {kind for members in self.taken() for kind in members}
