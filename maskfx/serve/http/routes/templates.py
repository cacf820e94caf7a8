"""The routes of templates: images stored for edits."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request, Response

from maskfx.serve.errors import no_template
from maskfx.serve.http.body import JSON, MULTIPART, read_form
from maskfx.serve.http.cancellation import unless_gone
from maskfx.serve.http.dependencies import AtDesk, Calls
from maskfx.serve.http.responses import Said
from maskfx.serve.request import NAME, RequestKind, TemplateInfo

router = APIRouter()


@router.post("/v1/templates")
async def register_template(
    request: Request, response: Response, context: AtDesk, caller: Calls
) -> Said:
    """Record, warm and pin a picture, so that its edits start at once.

    With `record_at=idle` it is recorded later, while no request runs, if there is such a time.
    """
    kinds = (MULTIPART, JSON)
    form = await read_form(request, context.forms.templates, kinds, context.settings.limits)

    async def record() -> TemplateInfo | None:
        request, pictures = await context.orders.template(form, caller)
        if request.kind is not RequestKind.AHEAD:
            return await context.frontend.record(request, pictures)
        context.frontend.record_ahead(request, pictures)
        return None

    info = await unless_gone(request.receive, record())
    if info is not None:
        return said(info)
    response.status_code = 202
    return {"object": "template.recording", "record_at": "idle"}


@router.get("/v1/templates")
async def list_templates(context: AtDesk) -> Said:
    """Every template, with its bytes per tier."""
    return {"object": "list", "data": [said(one) for one in context.frontend.templates()]}


@router.get("/v1/templates/{template_id:path}")
async def get_template(template_id: str, context: AtDesk) -> Said:
    """One template."""
    checked(template_id)
    for one in context.frontend.templates():
        if one.id == template_id:
            return said(one)
    raise no_template(template_id)


@router.delete("/v1/templates/{template_id:path}")
async def delete_template(template_id: str, context: AtDesk) -> Said:
    """Unpin a template and forget its picture."""
    checked(template_id)
    await context.frontend.forget(template_id)
    return {"id": template_id, "object": "template", "deleted": True}


def checked(name: str) -> None:
    """Raise ApiError unless the name matches `NAME`, so that no path is looked up."""
    if not is_name(name):
        raise no_template(name)


def is_name(name: str) -> bool:
    return "\n" not in name and re.match(NAME, name, re.ASCII) is not None


def said(info: TemplateInfo) -> Said:
    return {
        "id": info.id,
        "object": "template",
        "created": info.created,
        "width": info.width,
        "height": info.height,
        "pinned": info.pinned,
        "bytes": info.bytes,
        "workers": len(info.workers),
    }
