"""The routes of adapters: LoRA files of the server's directory that requests may name."""

from __future__ import annotations

from fastapi import APIRouter, Request

from maskfx.serve.errors import no_lora
from maskfx.serve.http.body import JSON, read_form
from maskfx.serve.http.dependencies import AtDesk
from maskfx.serve.http.responses import Said
from maskfx.serve.http.routes.templates import is_name
from maskfx.serve.request import AdapterInfo

router = APIRouter()


@router.post("/v1/adapters")
async def register_adapter(request: Request, context: AtDesk) -> Said:
    """Make a file of the server's directory known by its name, or its new content."""
    form = await read_form(request, context.forms.adapters, (JSON,), context.settings.limits)
    return said(await context.frontend.register_adapter(form.name))


@router.get("/v1/adapters")
async def list_adapters(context: AtDesk) -> Said:
    """Every adapter that requests may name."""
    return {"object": "list", "data": [said(one) for one in context.frontend.adapters()]}


@router.get("/v1/adapters/{adapter:path}")
async def get_adapter(adapter: str, context: AtDesk) -> Said:
    """One adapter."""
    for one in context.frontend.adapters() if is_name(adapter) else ():
        if one.name == adapter:
            return said(one)
    raise no_lora("adapter")


@router.delete("/v1/adapters/{adapter:path}")
async def delete_adapter(adapter: str, context: AtDesk) -> Said:
    """Forget an adapter and its weights; the file stays in the directory."""
    if not is_name(adapter):
        raise no_lora("adapter")
    context.frontend.remove_adapter(adapter)
    return {"id": adapter, "object": "adapter", "deleted": True}


def said(info: AdapterInfo) -> Said:
    return {
        "id": info.name,
        "object": "adapter",
        "created": info.created,
        "bytes": info.bytes,
    }
