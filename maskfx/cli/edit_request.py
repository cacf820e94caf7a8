"""The request of `maskfx edit`, the same for an edit in this process and one on a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from maskfx.errors import InputError
from maskfx.serve.request import Mask, Pixels, Request, hints_of


@dataclass(frozen=True, eq=False)
class EditCall:
    """One requested edit."""

    picture: Pixels
    mask: Mask
    parameters: Mapping[str, Any]  # those that are set, by the names of `serve.request.Request`

    def check(self) -> None:
        """Raise InputError for a parameter out of its range; a server checks its own limits."""
        for name, value in self.parameters.items():
            try:
                TypeAdapter[Any](hints_of(Request)[name]).validate_python(value)
            except ValidationError as error:
                wrong = error.errors()[0]["msg"]
                option = name.replace("_", "-")
                raise InputError(f"--{option} {value}: {wrong[:1].lower()}{wrong[1:]}") from None
