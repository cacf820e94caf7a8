"""Settings of the server: their defaults and their sources.

Order of precedence: command line, MASKFX_* variables, a TOML file, defaults. Each value keeps its
origin, for `--print-config` and for errors. Unknown names are refused, never dropped; the error
suggests the nearest known one.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
)

from maskfx.errors import InputError
from maskfx.serve.places import directory_or_url


class Limits(BaseModel):
    """Limits on what a client may send."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_bytes: int = Field(56 << 20, gt=0)
    mask_bytes: int = Field(4 << 20, gt=0)
    image_pixels: int = Field(4 << 20, gt=0)
    images: int = Field(4, gt=0)  # input images of one call
    pictures: int = Field(4, ge=1, le=10)  # result images of one call (parameter `n`)
    prompt: int = Field(32_000, gt=0)  # characters
    fields: int = Field(64, gt=0)
    recordings: int = Field(8, ge=0)  # of a user ahead of edits, waiting for idle time; 0: none
    steps: int = Field(200, gt=0)
    header_seconds: float = Field(10.0, gt=0)
    body_seconds: float = Field(30.0, gt=0)
    reader_seconds: float = Field(60.0, gt=0)  # time for which a client may stop reading
    urls: bool = False  # response_format=url


ANY = "*"


def is_loopback(host: str) -> bool:
    """Return True for names that mean this machine everywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name may resolve to any address


def split(value: object) -> object:
    """Split a list that is given as one string."""
    parts = value.split(",") if isinstance(value, str) else None
    return value if parts is None else [part.strip() for part in parts if part.strip()]


def check_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    if any("/" in host or host.count(":") == 1 for host in hosts):
        raise ValueError("give names without scheme and port, such as edit.example.org")
    return hosts


def check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    if not all(each in (ANY, "null") or ORIGIN.fullmatch(each) for each in origins):
        raise ValueError("give scheme and host, such as https://edit.example.org")
    return origins


def check_resources(resources: tuple[str, ...]) -> tuple[str, ...]:
    if not all(RESOURCE.fullmatch(each) for each in resources):
        raise ValueError("give NAME=AMOUNT, such as big_memory=1")
    return resources


ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+", re.I)
RESOURCE = re.compile(r"[^=\s]+=(?!0*\.?0*$)\d+(\.\d+)?")
Names = Annotated[tuple[str, ...], BeforeValidator(split)]


class RaySettings(BaseModel):
    """Where and with what `executor="ray"` starts workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # auto, HOST:PORT or ray://HOST:PORT; None: a cluster of this machine alone, for this server
    address: str | None = Field(default=None, pattern=r"^(auto|(ray://)?[^\s/:]+:\d+)$")
    cpus: float = Field(1.0, ge=0)  # that a rank reserves; with one rank, threads too
    gpus: float | None = Field(default=None, ge=0)  # None: one with a CUDA device, else none
    resources: Annotated[Names, AfterValidator(check_resources)] = ()  # NAME=AMOUNT, others
    link_host: str | None = None  # where workers reach this process; None: its node's address
    link_port: int = Field(0, ge=0, le=65535)  # 0: any free port
    place_seconds: float = Field(300.0, gt=0)  # for which the first worker may wait for a node
    max_workers: int | None = Field(default=None, ge=1)  # if the queue is long; None: `workers`
    grow_seconds: float = Field(10.0, gt=0)  # of a long queue, before a worker is added
    shrink_seconds: float = Field(300.0, gt=0)  # without need of a worker, before one is removed


class ServeSettings(BaseModel):
    """All settings of the server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = None  # folder or hub id; None: the shipped model; "fake": test model
    # ControlNets that the model's pipeline gets: folders, hub ids, names of what ships with it
    controlnets: Names = ()
    ip_adapters: Names = ()  # that it gets: safetensors files, or folders with one
    image_encoder: Path | None = None  # of the IP-Adapters; None: the model's, or beside the first
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)  # 0: any free port
    api_key: SecretStr | None = Field(default=None, min_length=1)
    # without a key: what `Host` and `Origin` may be, besides loopback and the server's own
    allowed_hosts: Annotated[Names, AfterValidator(check_hosts)] = ()
    allowed_origins: Annotated[Names, AfterValidator(check_origins)] = ()
    workers: int = Field(1, ge=1)
    executor: Literal["processes", "ray"] = "processes"  # what starts the workers
    ranks: int = Field(1, ge=1, le=8)  # processes of a worker that its requests' steps share
    rank_timeout: float = Field(1.0, gt=0)  # seconds without progress after which one is replaced
    max_num_seqs: int = Field(8, ge=1)  # concurrent requests per worker
    queue: int = Field(256, ge=1)  # waiting requests, at most
    loading_seconds: float = Field(30.0, ge=0)  # for which a call waits while the model loads
    shutdown_timeout: float = Field(60.0, gt=0)
    quality: Literal["fast", "balanced", "faithful"] = "balanced"
    # when the template of a picture is recorded; until then its edits go by their own steps
    record_at: Literal["first-edit", "second-edit", "idle"] = "first-edit"
    # which steps of whole pictures are computed, unless a request's quality chooses
    whole_quality: Literal["all-steps", "half-steps", "third-steps", "fifth-steps"] = "all-steps"
    # whole pictures compute the patches that changed by this much since they were; None: all
    patches: float | None = Field(default=None, ge=0)
    # a file of maskfx train-judge, decides in place of that number; auto: judge.npz of the model
    patch_judge: Literal["auto"] | Path | None = None
    # when it is decided: before a step, or before each stretch of blocks; None: maskfx's default
    patch_order: Literal["step", "stretch"] | None = None
    scheduler: Literal["slack", "fcfs"] = "slack"
    router: Literal["cost", "requests", "tokens"] = "cost"
    codecs: int = Field(2, ge=1)  # processes that decode and encode images
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    # templates in a directory, or a URL of an object store, shared by workers; None: memory only
    cache_dir: Annotated[str | Path | None, AfterValidator(directory_or_url)] = None
    # templates in memory, per worker; None: half of the free memory, shared by the workers
    cache_host_bytes: int | None = Field(default=None, gt=0)
    # device memory, used before host memory; None: a quarter of what the model leaves free
    cache_device_bytes: int | None = Field(default=None, ge=0)
    # encoders and VAE in a process beside the steps; auto: if that measures faster
    helpers: Literal["auto", "on", "off"] = "auto"
    # prefetch rows while computing; auto: where they cross a link to the device, as to a GPU, or
    # are read from `cache_dir`
    overlap: Literal["auto", "on", "off"] = "auto"
    # choose per batch what is loaded and what is computed again; auto: the same
    plans: Literal["auto", "on", "off"] = "auto"
    # bytes per second: loads take as long as over such a link (for measurements); None: no limit
    link_bandwidth: float | None = Field(default=None, gt=0)
    cache_disk_bytes: int = Field(32 << 30, gt=0)
    lora_dir: Annotated[Path | None, AfterValidator(directory_or_url)] = (
        None  # *.safetensors that requests may name
    )
    lora_host_bytes: int = Field(4 << 30, gt=0)  # memory of a worker's loaded LoRAs
    # denoisers, such as controlnet, that are computed in processes of their own on each worker
    own_process: Names = ()
    own_process_replicas: int = Field(1, ge=1)  # processes of each
    # weights of the nets whose processes run, per worker; unpopular ones end; None: no limit
    own_process_bytes: int | None = Field(default=None, gt=0)
    own_process_seconds: float = Field(120.0, gt=0)  # for a step, after which one is replaced
    costs: Path | None = None  # fitted costs as JSON; None: learnt while serving
    heartbeat_seconds: float = Field(1.0, gt=0)
    lost_seconds: float = Field(5.0, gt=0)  # of silence, after which a worker is killed
    stuck_seconds: float = Field(300.0, gt=0)  # without a step, after which a busy one is killed
    restarts: int = Field(3, ge=0)  # consecutive failed restarts before a worker is given up
    limits: Limits = Limits()
    ray: RaySettings = RaySettings()
    # base URL of an OpenTelemetry collector for spans; None: no tracing
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/?#]+[^\s?#]*$")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def cache_folder(self) -> Path | None:
        """The directory of `cache_dir`; None for an object store."""
        return self.cache_dir if isinstance(self.cache_dir, Path) else None

    def for_one_call(self) -> ServeSettings:
        """Return the settings of a process that runs one call at a time."""
        return self.model_copy(update={"max_num_seqs": 1})

    @property
    def fake(self) -> bool:
        """Whether the test model is served."""
        return (self.model or "").partition(":")[0] == "fake"

    @property
    def served_name(self) -> str:
        """The model's name for clients."""
        if self.served_model_name is not None:
            return self.served_model_name
        return "fake" if self.fake else (self.model or "maskfx").rstrip("/").rsplit("/", 1)[-1]


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
