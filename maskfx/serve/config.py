"""Settings of the server and their defaults; `sources.py` reads and prints them."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
)

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
    rank_devices: Names = ()  # of each rank, such as cuda:0; empty: the worker's, then the others
    # what ranks exchange with; None: nccl between CUDA devices, else rings
    rank_backend: Literal["rings", "gloo", "nccl"] | None = None
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
    # products of edits with weights packed for the CPU's matrix library, which holds them twice
    prepack: bool = False
    inductor: bool = False  # edits run code that Inductor makes at the start
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
    # how rows of templates are stored; all but lossless change the pictures of edits
    encoding: Literal["lossless", "16bit", "8bit"] = "lossless"
    # what they keep of each attention whose loads are planned; both: maskfx's choice
    keep: Literal["both", "keys", "inputs"] = "both"
    lora_dir: Annotated[Path | None, AfterValidator(directory_or_url)] = (
        None  # *.safetensors that requests may name
    )
    lora_host_bytes: int = Field(4 << 30, gt=0)  # memory of a worker's loaded LoRAs
    # denoisers, such as controlnet, that are computed in processes of their own on each worker
    own_process: Names = ()
    own_process_replicas: int = Field(1, ge=1)  # processes of each
    # the device of each, in this order, such as cuda:1; (): the model's others, if there are any
    own_process_devices: Names = ()
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
