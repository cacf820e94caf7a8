"""Pipelines around transformers whose further inputs, latents or encoders differ from Flux's."""

import json
from functools import partial
from typing import Any

import torch

from tests.factories.pipelines import (
    SIDE,
    STEPS,
    TEXT,
    Arguments,
    add,
    ddim,
    flow,
    flux2,
    flux2_vae,
    pipe_of,
    seeded,
    sized,
    still,
    t5,
    text_of,
    usual,
    vae,
    with_control,
    z_image,
    z_image_text,
)
from tests.factories.unet_pipelines import of_zoo
from tests.factories.zoo import CROSS, HUNYUAN_T5, HUNYUAN_TEXT, Z_IMAGE, Draw, only, tiny

LARGE = {"height": 64, "width": 64}
MIDDLE = {"height": 128, "width": 128}


def eighth(latent: int = 4) -> Any:
    """A VAE of an eighth of the picture's side."""
    return tiny(
        "AutoencoderKL",
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=latent,
        norm_num_groups=4,
        sample_size=128,
        shift_factor=0.1,
        scaling_factor=0.5,
    )


def wan_vae(halvings: int = 3, latent: int = 4) -> Any:
    return tiny(
        "AutoencoderKLWan",
        base_dim=4,
        z_dim=latent,
        dim_mult=[1] * halvings + [2],
        num_res_blocks=1,
        temperal_downsample=[False] * halvings,
        latents_mean=[0.0] * latent,
        latents_std=[1.0] * latent,
        scale_factor_spatial=2**halvings,
    )


def encoded(name: str, components: Any, **methods: Any) -> Any:
    """A pipeline some of whose encoding methods return embeddings drawn from the prompt."""

    def build() -> Any:
        made = pipe_of(name, components)
        for method, stand_in in methods.items():
            setattr(made, method, partial(stand_in, made))
        return made

    return build


def drawn(prompt: Any, *shape: int) -> torch.Tensor:
    """Values that depend on a prompt."""
    return Draw(sum(map(ord, str(prompt)))).normal(*shape)


# Z-Image with a ControlNet, and with pictures among its tokens.


def z_control(**changed: Any) -> Arguments:
    shared = {n: Z_IMAGE[n] for n in ("dim", "n_refiner_layers", "n_heads", "n_kv_heads")}
    config = {"control_layers_places": [0], "control_in_dim": 4, **changed}
    net = tiny("ZImageControlNetModel", **shared, **config)
    return {**z_image(), "controlnet": net}


def z_omni() -> Arguments:
    from transformers import Siglip2ImageProcessor, Siglip2VisionConfig, Siglip2VisionModel

    config = Siglip2VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_patches=16,
        patch_size=8,
    )
    encoder = seeded(8, Siglip2VisionModel, config)
    net = tiny("ZImageTransformer2DModel", **only(Z_IMAGE, siglip_feat_dim=16))
    processor = Siglip2ImageProcessor(patch_size=8, max_num_patches=16)
    parts = {"siglip": encoder, "siglip_processor": processor, "transformer": net}
    return {**z_image(), **parts, "vae": vae().bfloat16()}


def omni_text(seed: int) -> Arguments:
    """Texts around one picture, before it and after it."""
    draw = Draw(seed)
    own, other = ([draw.normal(n, CROSS) for n in (TEXT, 2, 1)] for _ in range(2))
    return {"prompt_embeds": [own], "negative_prompt_embeds": [other]}


# Hunyuan-DiT.


def hunyuan_control() -> Arguments:
    net = of_zoo("HunyuanDiT2DControlNetModel")
    transformer = of_zoo("HunyuanDiT2DModel-control")
    parts = {"vae": still(eighth()), "transformer": transformer, "controlnet": net}
    return {**parts, "scheduler": ddim()}


def hunyuan_text(seed: int) -> Arguments:
    draw = Draw(seed)
    found: Arguments = {}
    for end, length in (("", HUNYUAN_TEXT), ("_2", HUNYUAN_T5)):
        for start in ("", "negative_"):
            found[f"{start}prompt_embeds{end}"] = draw.normal(1, length, CROSS)
            found[f"{start}prompt_attention_mask{end}"] = torch.ones(1, length, dtype=torch.long)
    return {**found, "use_resolution_binning": False, "original_size": (128, 128)}


# Pictures as references.


def longcat() -> Arguments:
    class Processor:
        image_processor = None

    net = of_zoo("LongCatImageTransformer2DModel", in_channels=64)
    parts = {"vae": vae_of(5, 16), "transformer": net, "scheduler": flow()}
    return {**parts, "text_processor": Processor()}


def vae_of(levels: int, latent: int) -> Any:
    return tiny(
        "AutoencoderKL",
        block_out_channels=(8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        latent_channels=latent,
        norm_num_groups=4,
        sample_size=128,
        shift_factor=0.1,
        scaling_factor=0.5,
    )


def kandinsky_fifth() -> Any:
    net = of_zoo("Kandinsky5Transformer3DModel", in_visual_dim=4, visual_cond=True)
    made = pipe_of(
        "Kandinsky5I2IPipeline",
        lambda: {"transformer": net, "vae": eighth(), "scheduler": flow()},
    )
    made.resolutions = [(128, 128)]
    return made


def kandinsky_fifth_text(seed: int) -> Arguments:
    from tests.factories.zoo import POOLED

    draw, found = Draw(seed), {}
    for start in ("", "negative_"):
        found[f"{start}prompt_embeds_qwen"] = draw.normal(1, TEXT, CROSS)
        found[f"{start}prompt_embeds_clip"] = draw.normal(1, POOLED)
        found[f"{start}prompt_cu_seqlens"] = torch.tensor([0, TEXT], dtype=torch.int32)
    return {**found, "num_inference_steps": STEPS, **MIDDLE}


def joy() -> Any:
    net = of_zoo("JoyImageEditTransformer3DModel")
    parts = {"vae": still(wan_vae()), "transformer": net, "scheduler": flow()}
    made = pipe_of("JoyImageEditPipeline", lambda: parts)
    made.vae_image_processor.get_default_height_width = lambda *_: (64, 64)
    return made


def joy_text(seed: int) -> Arguments:
    return {**text_of(seed, mask=True), "num_inference_steps": STEPS, **LARGE}


def bria_second() -> Arguments:
    net = of_zoo("BriaFibo2Transformer2DModel-context", in_channels=4)
    return {"transformer": net, "vae": flux2_vae(), "scheduler": flow()}


def bria_second_text(seed: int) -> Arguments:
    draw = Draw(seed)
    found = {f"{n}prompt_embeds": draw.normal(1, 2, TEXT, CROSS) for n in ("", "negative_")}
    return {**found, "num_inference_steps": STEPS, **LARGE}


def bria_edit() -> Arguments:
    net = of_zoo("BriaFiboTransformer2DModel", in_channels=4)
    return {"transformer": net, "vae": wan_vae(4), "scheduler": flow()}


def bria_words(pipe: Any, prompt: Any, **_: Any) -> Any:
    own, other = (drawn(p, 1, TEXT, CROSS) for p in (prompt, "none"))
    layers = [[drawn((p, i), 1, TEXT, 24) for i in range(4)] for p in (prompt, "none")]
    kept = torch.ones(1, TEXT)
    return own, other, torch.zeros(1, TEXT, 3), kept, kept, *layers


def refiner() -> Arguments:
    net = of_zoo(
        "HunyuanImageTransformer2DModel-refiner",
        in_channels=8,
        use_meanflow=False,
        patch_size=(1, 1, 1),
        rope_axes_dim=(4, 6, 6),
    )
    coder = tiny(
        "AutoencoderKLHunyuanImageRefiner",
        latent_channels=2,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )
    return {"vae": coder, "transformer": net, "scheduler": flow()}


def dream() -> Arguments:
    coder = tiny(
        "AutoencoderTiny",
        latent_channels=4,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    net = of_zoo("DreamLiteUNetModel")
    return {"vae": coder, "unet": net, "scheduler": flow(), "text_encoder": t5()}


def dream_words(pipe: Any, mode: str, prompts: list[str], **_: Any) -> Any:
    found = torch.cat([drawn(p, 1, TEXT, CROSS) for p in prompts])
    return found, torch.ones(len(prompts), TEXT, dtype=torch.long)


def words(seed: int) -> str:
    return ("a cat", "two dogs", "the red house")[seed % 3]


def add_built(name: str, edits: str, build: Any, inputs: Any, side: int = SIDE) -> None:
    from tests.factories.pipelines import PIPES, Kind

    PIPES[name] = Kind(name, build, inputs, edits, side)


klein = partial(text_of, negative=False)
add(
    "Flux2KleinKVPipeline",
    "reference",
    partial(flux2, guidance_embeds=False),
    partial(usual, text=klein, **LARGE),
    64,
)
add("ZImageControlNetPipeline", "text", z_control, partial(with_control, text=z_image_text))
add(
    "ZImageControlNetInpaintPipeline",
    "control",
    partial(z_control, control_in_dim=9),
    partial(with_control, text=z_image_text),
)
add("ZImageOmniPipeline", "reference", z_omni, partial(usual, text=omni_text, **LARGE), 64)
add(
    "HunyuanDiTControlNetPipeline",
    "text",
    hunyuan_control,
    partial(with_control, text=hunyuan_text, **MIDDLE),
    128,
)
add_built(
    "LongCatImageEditPipeline",
    "reference",
    encoded(
        "LongCatImageEditPipeline",
        longcat,
        _encode_prompt=lambda pipe, prompt, image: drawn(prompt, 1, TEXT, CROSS),
    ),
    lambda seed: {"prompt": words(seed), "num_inference_steps": STEPS},
    1024,
)
add_built("Kandinsky5I2IPipeline", "reference", kandinsky_fifth, kandinsky_fifth_text, 128)
add("BriaFibo2Pipeline", "reference", bria_second, bria_second_text, 64)
add_built(
    "BriaFiboEditPipeline",
    "reference",
    encoded("BriaFiboEditPipeline", bria_edit, encode_prompt=bria_words),
    lambda seed: {
        "prompt": json.dumps({"edit_instruction": words(seed)}),
        "num_inference_steps": STEPS,
        "_auto_resize": False,
        **MIDDLE,
    },
    128,
)
add(
    "HunyuanImageRefinerPipeline",
    "reference",
    refiner,
    partial(usual, text=partial(text_of, mask=True)),
)
for dreaming in ("DreamLitePipeline", "DreamLiteMobilePipeline"):
    add_built(
        dreaming,
        "reference",
        encoded(dreaming, dream, encode_prompt=dream_words),
        lambda seed: {"prompt": words(seed), "num_inference_steps": STEPS, **sized({})},
    )
add_built("JoyImageEditPipeline", "reference", joy, joy_text, 64)
