"""What `maskfx serve` can be told. Who reads it from where is `configure.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class Limits(BaseModel):
    """What a client may send."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    body_bytes: int = Field(56 << 20, gt=0)
    mask_bytes: int = Field(4 << 20, gt=0)
    image_pixels: int = Field(4 << 20, gt=0)
    images: int = Field(4, gt=0)  # of one call
    pictures: int = Field(4, ge=1, le=10)  # n
    prompt: int = Field(32_000, gt=0)  # characters
    fields: int = Field(64, gt=0)
    steps: int = Field(200, gt=0)
    header_seconds: float = Field(10.0, gt=0)
    body_seconds: float = Field(30.0, gt=0)
    reader_seconds: float = Field(60.0, gt=0)  # how long a client may not read
    urls: bool = False  # response_format=url


class ServeSettings(BaseModel):
    """All that the server can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = None  # a folder, a hub id; None: what ships inside; "fake": no model at all
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)  # 0: any that is free
    api_key: SecretStr | None = Field(default=None, min_length=1)
    workers: int = Field(1, ge=1)
    max_num_seqs: int = Field(8, ge=1)  # requests that a worker runs at once
    queue: int = Field(256, ge=1)  # requests that may wait
    shutdown_timeout: float = Field(60.0, gt=0)
    quality: Literal["fast", "balanced", "faithful"] = "balanced"
    scheduler: Literal["slack", "fcfs"] = "slack"
    router: Literal["cost", "requests", "tokens"] = "cost"
    codecs: int = Field(2, ge=1)  # processes that decode and encode pictures
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    cache_dir: Path | None = None  # templates on disk, shared by workers; None: memory only
    cache_host_bytes: int = Field(4 << 30, gt=0)
    cache_device_bytes: int = Field(0, ge=0)  # of the device's own memory, before the host's
    overlap: Literal["auto", "on", "off"] = "auto"  # load while computing; auto: on CUDA
    cache_disk_bytes: int = Field(32 << 30, gt=0)
    lora_dir: Path | None = None  # *.safetensors that requests may name
    costs: Path | None = None  # fitted costs as JSON; None: learnt while serving
    heartbeat_seconds: float = Field(1.0, gt=0)
    lost_seconds: float = Field(5.0, gt=0)  # a silent worker is given up
    stuck_seconds: float = Field(300.0, gt=0)  # so is one that has requests and makes no step
    restarts: int = Field(3, ge=0)  # in a row that may fail
    limits: Limits = Limits()
    # where OpenTelemetry's spans go, a collector's base URL; None: there are none
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/?#]+[^\s?#]*$")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
