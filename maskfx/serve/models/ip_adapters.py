"""The IP-Adapters of a model, and the arguments of a call that a request's fields become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from maskfx.pipelines.adapters.ip_adapters import count_of, ip_adapters, takes_several
from maskfx.pipelines.adapters.lora import Lora
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.runtime.lora.adapter import Adapter
from maskfx.serve.errors import ApiError
from maskfx.serve.ip_adapters import PICTURES, of_request
from maskfx.serve.request import Request

BLANK = 64  # pixels per side of what an unused IP-Adapter is shown


@dataclass(frozen=True)
class IpAdapters:
    """The IP-Adapters of a model; requests add them with a scale, and use none otherwise.

    Args:
        adapters: In the order in which they were loaded.
        several: Whether the pipeline takes several, and several pictures for each.
    """

    adapters: tuple[Adapter, ...] = ()
    several: bool = False

    @classmethod
    def of(cls, pipe: Pipeline, names: Sequence[str] = ()) -> IpAdapters:
        """Take the IP-Adapters of a pipeline out of its calls; none if it has none."""
        if not count_of(pipe):
            return cls()
        return cls(tuple(ip_adapters(pipe, names)), takes_several(pipe))

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.adapters]

    def check(self, request: Request, shown: int) -> None:
        """Raise ApiError if the request's names, scales and pictures don't fit the model."""
        fields = {
            PICTURES: shown or None,
            "ip_adapter": request.ip_adapters,
            "ip_adapter_scale": request.ip_scale,
        }
        for name, value in fields.items():
            if value is not None and not self.adapters:
                message = f"This model doesn't take {name}; leave it out."
                raise ApiError("unsupported_parameter", message, param=name)
        of_request(request, shown, self.names)
        if shown > 1 and not self.several:
            raise ApiError(
                "invalid_value", f"{PICTURES}: this model takes one picture.", param=PICTURES
            )

    def loras(self, request: Request, shown: int) -> list[Lora]:
        """Return the adapters that act on a request; templates are recorded without them."""
        known = {one.name: one for one in self.adapters}
        return [
            Lora(known[name], scale, recorded=False)
            for name, scale in of_request(request, shown, self.names)
        ]

    def pictures(self, request: Request, shown: Sequence[Image.Image]) -> dict[str, object]:
        """Return the arguments of the call: a picture for each, black for those that aren't used.

        One adapter is shown all pictures of a request that uses no other.
        """
        used = [name for name, _ in of_request(request, len(shown), self.names)]
        mine: dict[str, object] = dict(zip(used, shown, strict=False))
        if len(used) == 1 and len(shown) > 1:
            mine[used[0]] = list(shown)
        blank = Image.new("RGB", (BLANK, BLANK))
        found = [mine.get(name, blank) for name in self.names]
        return self._argument(found)

    def blank(self) -> dict[str, object]:
        """Return the arguments of a call that uses none."""
        return self._argument([Image.new("RGB", (BLANK, BLANK))] * len(self.adapters))

    def _argument(self, each: list[object]) -> dict[str, object]:
        return {PICTURES: each if self.several else each[0]} if each else {}
