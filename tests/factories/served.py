"""Tiny pipelines that understand prompts, a model over each, and jobs for them."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import torch

from maskfx.scheduling.step_reports import Stepped
from maskfx.serve.config import ServeSettings
from maskfx.serve.messages import Failed, Job, JobProgress, JobSpan
from maskfx.serve.models.model import Made, PreviewMade
from maskfx.serve.models.pipeline_model import PipelineModel
from maskfx.serve.request import Mask, Pictures, Pixels, Request, RequestKind
from tests.factories import pipelines, small_unets
from tests.factories.zoo import CROSS, POOLED

SIDE = pipelines.SIDE


def projecting_clip(width: int, projection: int = POOLED // 2) -> Any:
    """A text encoder whose pooled states have the width that SDXL and SD3 want."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(pipelines.words()),
        hidden_size=width,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=16,
        projection_dim=projection,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        made = CLIPTextModelWithProjection(config)
    return made.eval().requires_grad_(False)


def sd3_spoken() -> dict[str, Any]:
    return {
        **pipelines.sd3(num_layers=2),
        "text_encoder": projecting_clip(CROSS // 2),
        "tokenizer": pipelines.clip_tokenizer(),
        "text_encoder_2": projecting_clip(CROSS // 2),
        "tokenizer_2": pipelines.clip_tokenizer(),
    }


def control_spoken() -> dict[str, Any]:
    return {**pipelines.spoken(), "controlnet": pipelines.control_net(pipelines.SD15)}


def union_spoken() -> dict[str, Any]:
    """SDXL with a ControlNet that takes images of several kinds."""
    return {
        **small_unets.union_control(small_unets.LEAST),
        "text_encoder": pipelines.clip(CROSS // 2),
        "tokenizer": pipelines.clip_tokenizer(),
        "text_encoder_2": projecting_clip(CROSS // 2, POOLED),
        "tokenizer_2": pipelines.clip_tokenizer(),
    }


COMPONENTS = {
    "StableDiffusionInpaintPipeline": pipelines.spoken,
    "StableDiffusionInpaintPipeline-9": lambda: {
        **pipelines.spoken(),
        "unet": pipelines.unet(in_channels=9),
    },
    "StableDiffusionPipeline": pipelines.spoken,
    "StableDiffusionControlNetInpaintPipeline": control_spoken,
    "StableDiffusionXLControlNetUnionInpaintPipeline": union_spoken,
    "StableDiffusion3InpaintPipeline": sd3_spoken,
    "FluxInpaintPipeline": pipelines.flux_spoken,
    "FluxKontextPipeline": pipelines.flux_spoken,
    "FluxPipeline": pipelines.flux_spoken,
    "Flux2KleinPipeline": pipelines.klein_spoken,
}

LEAST = {"Flux2KleinPipeline": 64}  # pixels along a side


def build(name: str) -> Any:
    """A pipeline; small pictures are its usual ones."""
    made = pipelines.pipe_of(name.partition("-")[0], COMPONENTS[name])
    if hasattr(made, "default_sample_size"):
        side = LEAST.get(name, SIDE)
        made.default_sample_size = side // made.vae_scale_factor
    return made


class Told:
    """What a model reported, by job; safe between threads."""

    def __init__(self) -> None:
        self.answers: queue.Queue[Made | Failed] = queue.Queue()
        self.progress: list[JobProgress] = []
        self.previews: list[PreviewMade] = []
        self.steps: list[Stepped] = []
        self.spells: list[JobSpan] = []
        self.moved = threading.Event()

    def __call__(self, message: Any) -> None:
        kinds: dict[type, list[Any]] = {
            JobProgress: self.progress,
            PreviewMade: self.previews,
            Stepped: self.steps,
            JobSpan: self.spells,
        }
        if type(message) in kinds:
            kinds[type(message)].append(message)
            self.moved.set()
        else:
            self.answers.put(message)

    def answer(self) -> Made | Failed:
        return self.answers.get(timeout=300)


class Served:
    """A model and what it reported."""

    def __init__(self, pipe: Any, **settings: Any) -> None:
        settings = {"helpers": "off"} | settings  # the measurement starts a process
        self.told = Told()
        self.model = PipelineModel(ServeSettings(**settings), self.told, pipe)

    def answers(self, *jobs: tuple[Job, Pictures]) -> dict[str, Made | Failed]:
        """All at once."""
        for job, pictures in jobs:
            self.model.start(job, pictures)
        found = [self.told.answer() for _ in jobs]
        return {one.id: one for one in found}

    def made(self, job: Job, pictures: Pictures) -> Made:
        (answer,) = self.answers((job, pictures)).values()
        assert isinstance(answer, Made), answer
        return answer

    def failed(self, job: Job, pictures: Pictures) -> Failed:
        (answer,) = self.answers((job, pictures)).values()
        assert isinstance(answer, Failed), "it was made"
        return answer


def job(id: str = "a", kind: str = "edit", seed: int = 1, **more: Any) -> Job:
    fields: dict[str, Any] = {"prompt": "a cat", "steps": 3, **more}
    of_job = {name: fields.pop(name) for name in ("left", "traced") if name in fields}
    request = Request(id=id, kind=RequestKind(kind), seed=seed, **fields)
    return Job(id=id, attempt=1, request=request, **of_job)


def picture(seed: int = 0, width: int = SIDE, height: int = SIDE) -> Pixels:
    made = pipelines.picture(seed, max(width, height))
    return np.asarray(made)[:height, :width].copy()


def square(width: int = SIDE, height: int = SIDE, first: int = 8, last: int = 20) -> Mask:
    mask = np.zeros((height, width), bool)
    mask[first:last, first:last] = True
    return mask


def edit(seed: int = 0, **more: Any) -> Pictures:
    return Pictures((picture(seed),), square(), **more)
