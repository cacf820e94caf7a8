"""Json: the values of a JSON document, for what writes one or passes one on; Document reads one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"
Document = Mapping[str, Any]  # a JSON object whose form is checked, such as a manifest
