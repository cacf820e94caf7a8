"""Where the server's settings come from, and how they are printed.

Order of precedence: command line, MASKFX_* variables, a TOML file, defaults. Each value keeps its
origin, for `--print-config` and for errors. Unknown names are refused, never dropped; the error
suggests the nearest known one.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError

from maskfx.errors import InputError
from maskfx.serve.config import ServeSettings

PREFIX = "MASKFX_"
FILE = "MASKFX_CONFIG"  # variable with the path of the TOML file, if --config isn't given
# variables of the operators (maskfx.ops), which are no settings of the server
OPERATORS = ("MASKFX_KERNELS", "MASKFX_KERNEL_CACHE", "MASKFX_KERNEL_TUNING")
MASK = "********"


@dataclass(frozen=True)
class SettingValue:
    """The value of a setting, and its origin."""

    value: object
    origin: str


@dataclass(frozen=True)
class Effective:
    """The settings, and the origins of non-default values by dotted key."""

    settings: ServeSettings
    origins: Mapping[str, str]


def configure(
    command_line: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Effective:
    """Merge all sources into the effective settings; InputError for unknown or invalid ones.

    Args:
        command_line: Options by dotted key; None means not given.
        environment: Environment variables, `os.environ` by default.
        file: A TOML file; by default the one that MASKFX_CONFIG names, if any.
    """
    variables = os.environ if environment is None else environment
    where = file if file is not None else path_in(variables)
    given: dict[str, SettingValue] = {}
    given |= {} if where is None else from_file(where)
    given |= from_environment(variables)
    given |= from_command_line(command_line)
    nested: dict[str, Any] = {}
    for key, one in given.items():
        *tables, name = key.split(".")
        table = nested
        for each in tables:
            table = table.setdefault(each, {})
        table[name] = one.value
    try:
        settings = ServeSettings.model_validate(nested)
    except ValidationError as error:
        raise InputError(describe_errors(error, given)) from None
    return Effective(settings, {key: one.origin for key, one in given.items()})


def path_in(variables: Mapping[str, str]) -> Path | None:
    return Path(variables[FILE]) if variables.get(FILE) else None


# Sources.


def from_command_line(options: Mapping[str, object]) -> dict[str, SettingValue]:
    found = {}
    for key, value in options.items():
        if value is not None:
            check_known(key, "on the command line")
            found[key] = SettingValue(value, "command line")
    return found


def from_environment(variables: Mapping[str, str]) -> dict[str, SettingValue]:
    """Read MASKFX_* variables (e.g. MASKFX_LIMITS__BODY_BYTES); empty ones count as unset."""
    found = {}
    for name, value in sorted(variables.items()):
        if name.startswith(PREFIX) and name not in (FILE, *OPERATORS) and value:
            key = name.removeprefix(PREFIX).lower().replace("__", ".")
            check_known(key, f"the variable {name}")
            found[key] = SettingValue(value, name)
    return found


def from_file(path: Path) -> dict[str, SettingValue]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise InputError(f"--config {path}: can't be read: {error.strerror}") from None
    except ValueError as error:  # invalid TOML or encoding
        raise InputError(f"--config {path}: not TOML: {error}") from None
    found = {}
    for key, value in flat(table):
        check_known(key, str(path))
        found[key] = SettingValue(value, str(path))
    return found


def flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys and values of nested tables."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


# Known settings.


def known_keys(model: type[BaseModel] = ServeSettings, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every setting."""
    for name, each in model.model_fields.items():
        kind = each.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from known_keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def check_known(key: str, where: str) -> None:
    known = list(known_keys())
    if key in known:
        return
    near = get_close_matches(key, known, 1, 0.5) or known_by_end(key, known)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
    raise InputError(f"{where}: there is no setting {key!r}; {hint}")


def known_by_end(key: str, known: list[str]) -> list[str]:
    """Return the nested setting for a key without its table or in a wrong one, if there is one."""
    ends = {each.rpartition(".")[2]: each for each in reversed(known)}
    return [ends[end] for end in get_close_matches(key.rpartition(".")[2], list(ends), 1)]


def describe_errors(error: ValidationError, given: Mapping[str, SettingValue]) -> str:
    """Describe a validation error, one line per setting: key, origin, value, expectation."""
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        one = given.get(key)
        origin = "" if one is None else f" (from {one.origin})"
        seen = MASK if is_secret(key) else repr(item["input"])
        lines.append(f"{key}{origin}: got {seen}; {item['msg'].lower()}")
    return "\n".join(lines)


def is_secret(key: str) -> bool:
    return "key" in key.split(".")[-1].split("_")


# Printing.


def shown(effective: Effective) -> str:
    """Format the settings as TOML, each with its origin; secrets are masked and commented out."""
    lines, tables = list[str](), list[str]()
    for key, value in flat_values(effective.settings):
        origin = effective.origins.get(key, "default")
        table, _, name = key.rpartition(".")
        text = written(value)
        line = f"{name} = {text}" if text is not None else f"# {name} ="
        if isinstance(value, SecretStr):
            line = f'# {name} = "{MASK}"'
        if table and f"[{table}]" not in tables:
            tables += ["", f"[{table}]"]
        (tables if table else lines).append(f"{line}  # {origin}")
    return "\n".join([*lines, *tables])


def flat_values(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from flat_values(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def written(value: object) -> str | None:
    """Format a value as TOML; None if the value is None, which TOML can't represent."""
    if value is None:
        return None
    if isinstance(value, bool | int | float | tuple):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)
