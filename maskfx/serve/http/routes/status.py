"""The routes about the server: models, health, version, metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

import maskfx
from maskfx.serve.errors import ApiError
from maskfx.serve.http.dependencies import AtDesk
from maskfx.serve.http.responses import Said, model
from maskfx.serve.request import Health, ServedModel

router = APIRouter()


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(context: AtDesk) -> Said:
    """Whether this server is of use: alive, and a worker is ready."""
    found = context.frontend.health()
    if not (found.live and found.ready):
        raise unhealthy(found)
    return said(found)


@router.get("/health/live")
@router.head("/health/live", include_in_schema=False)
async def live(context: AtDesk) -> Said:
    """Whether the process should be left alone: false once all workers were given up."""
    found = context.frontend.health()
    if not found.live:
        raise unhealthy(found)
    return said(found)


@router.get("/health/ready")
@router.head("/health/ready", include_in_schema=False)
async def ready(context: AtDesk) -> Said:
    """Whether a worker is ready and the server isn't being stopped."""
    found = context.frontend.health()
    if not found.ready:
        raise unhealthy(found)
    return said(found)


@router.get("/v1/models")
async def list_models(context: AtDesk) -> Said:
    """The models that are served, whether each is loaded, and what it takes."""
    pixels, found = context.settings.limits.image_pixels, []
    for one in context.frontend.models():
        found.append(model(one, pixels))
        found += [model(one, pixels, lora) for lora in loras_of(one)]
    return {"object": "list", "data": found}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, context: AtDesk) -> Said:
    """One model."""
    base, _, lora = name.partition(":")
    for one in context.frontend.models():
        if one.name == base and (not lora or lora in loras_of(one)):
            return model(one, context.settings.limits.image_pixels, lora)
    raise ApiError(
        "model_not_found", "There is no such model; GET /v1/models lists them.", param="model"
    )


def loras_of(served: ServedModel) -> tuple[str, ...]:
    return () if served.card is None else served.card.loras


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of maskfx."""
    return {"version": maskfx.__version__}


@router.get("/metrics")
async def metrics(context: AtDesk) -> Response:
    """Prometheus' text format."""
    return Response(context.frontend.metrics(), headers={"content-type": CONTENT_TYPE_LATEST})


# message by code of a health route
UNHEALTHY = {
    "model_loading": "The model is being loaded.",
    "no_workers": "No worker is running.",
    "draining": "The server is being stopped.",
}
AGAIN = 2.0  # seconds until a probe may find another state


def unhealthy(found: Health) -> ApiError:
    code = found.reason if found.reason in UNHEALTHY else "no_workers"
    return ApiError(code, UNHEALTHY[code], retry_after=AGAIN)


def said(found: Health) -> Said:
    nodes = {"nodes": found.nodes} if found.nodes else {}  # short ids, as no key is needed here
    return {
        "status": "ok",
        "ready": found.ready,
        "waiting": found.waiting,
        "running": found.running,
        "workers": found.workers,
        **nodes,
        **({"ranks": found.ranks} if found.ranks else {}),
        "recordings": found.recordings,
    }
