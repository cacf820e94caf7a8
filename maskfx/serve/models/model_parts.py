"""Makes the parts of a model that the server's settings choose.

These are the quality of pictures, cache tiers, the loader of rows, LoRAs and nets in processes of
their own.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import torch

from maskfx.distributed.ranks import Ranks
from maskfx.distributed.unsupported import own_device, why_unsupported
from maskfx.engine.processes.services import OwnProcesses
from maskfx.errors import InputError
from maskfx.ops.cache_folder import kept_folder
from maskfx.pipelines.adapters.lora_files import LoraTarget
from maskfx.pipelines.compile import pipeline_state_of
from maskfx.pipelines.handlers.autoencoder import find_methods
from maskfx.pipelines.parts.pipeline import Pipeline
from maskfx.pipelines.quality import Quality
from maskfx.runtime.backends.eager import packed_bytes
from maskfx.runtime.cache.loader import Loader
from maskfx.runtime.cache.movers import DeviceMover, HostMover
from maskfx.runtime.cache.stores.entry_store import EntryStore
from maskfx.runtime.cache.stores.remote_store import RemoteStore
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.explain import amount
from maskfx.runtime.hardware.devices import CPU, free_memory
from maskfx.runtime.hardware.offload import device_of
from maskfx.runtime.lora.registry import Adapters
from maskfx.runtime.reuse.patches import PatchReuse
from maskfx.runtime.templates.footprint import ENCODINGS
from maskfx.serve.config import ServeSettings
from maskfx.serve.models.pipeline_set import PipelineSet, denoisers_of

PROGRAMS = "programs"  # folder of compiled programs
HOST_BYTES = 4 << 30  # of templates, where the free memory isn't known
HOST_SHARE, DEVICE_SHARE = 0.5, 0.25  # of the free memory at the start


OWN_STEPS = 4  # `Quality.refresh` of edits without a template


def quality_of(settings: ServeSettings) -> Quality:
    """Return the quality of the server's pictures."""
    quality = Quality.of(settings.quality)
    if settings.record_at != "first-edit":
        reuse = "idle" if settings.record_at == "idle" else "auto"
        quality = replace(quality, reuse=reuse, refresh=OWN_STEPS)
    if settings.patches is None and settings.patch_judge is None:
        if settings.patch_order is not None:
            raise InputError(
                f"patch_order={settings.patch_order}: no patches are kept; set patches or "
                "patch_judge too, or leave it out"
            )
        return quality
    threshold = PatchReuse.threshold if settings.patches is None else settings.patches
    order, judge = settings.patch_order or PatchReuse.order, settings.patch_judge
    return replace(quality, patches=PatchReuse(threshold, judge=judge, order=order))


def packed_bytes_of(settings: ServeSettings, pipe: Pipeline) -> int:
    """Return the memory that packed weights take in a worker; 0 without `prepack`.

    Each rank packs them for itself. InputError if they have no room.
    """
    if not settings.prepack:
        return 0
    coders = [method.autoencoder for method in find_methods(pipe.components).values()]
    modules = {id(each): each for each in (*denoisers_of(pipe), *coders)}
    needed = settings.ranks * sum(map(packed_bytes, modules.values()))
    free = free_memory(CPU) / settings.workers
    if needed > free:
        raise InputError(
            f"prepack: packed weights take {amount(needed)}B beside the others, and each worker "
            f"has {amount(free)}B of free memory; leave prepack out, or start fewer workers"
        )
    return needed


def tiers_of(settings: ServeSettings, packed: int = 0) -> Tiers:
    """Create the cache tiers: device (if it has a budget), host, disk (if `cache_dir` is set).

    An object store takes the place of the disk. Host memory is pinned for CUDA devices.

    Args:
        settings: Settings of the server.
        packed: Bytes of free memory that packed weights will take.
    """
    store = store_of(settings.cache_dir)
    device = torch.device(settings.device)
    return Tiers(
        store,
        host_bytes=host_bytes_of(settings, packed),
        device_bytes=device_bytes_of(settings, device),
        disk_bytes=None if store is None else settings.cache_disk_bytes,
        encoding=ENCODINGS[settings.encoding],
        mover=HostMover() if device.type == "cpu" else DeviceMover(device),
    )


def store_of(place: Path | str | None) -> EntryStore | None:
    """Return the store of a directory or a URL; None without one."""
    if place is None:
        return None
    return Store(place) if isinstance(place, Path) else RemoteStore(place)


def host_bytes_of(settings: ServeSettings, packed: int = 0) -> int:
    """Return the memory of a worker's templates: a share of what is free, if none is set.

    `packed` bytes of it are for packed weights.
    """
    if settings.cache_host_bytes is not None:
        return settings.cache_host_bytes
    free = free_memory(CPU) / settings.workers - packed
    return HOST_BYTES if free == inf else max(1, int(free * HOST_SHARE))


def device_bytes_of(settings: ServeSettings, device: torch.device) -> int:
    """Return the device memory of a worker's templates: a share of what is free, if none is set."""
    if settings.cache_device_bytes is not None:
        return settings.cache_device_bytes
    free = inf if device.type == "cpu" else free_memory(device)
    return 0 if free == inf else int(free * DEVICE_SHARE)


def loader_of(settings: ServeSettings) -> Loader | None:
    """Create the loader of rows, or None for the default of `maskfx.compile`.

    The default loads ahead of the steps where rows cross a link to the device, which a CPU lacks:
    there is no transfer to hide, and the loader's thread would slow down the computing ones.
    """
    bandwidth = settings.link_bandwidth or inf
    if settings.overlap == "auto" and settings.link_bandwidth is None:
        return None
    if settings.overlap == "off" and settings.link_bandwidth is None and settings.plans != "on":
        return None
    return Loader(bandwidth, overlap=settings.overlap != "off")


def plans_of(settings: ServeSettings) -> bool | None:
    """Return whether loads are planned; None where rows cross a link to the device.

    Without overlapping loads there is nothing to plan, unless it is asked for.
    """
    if settings.plans == "auto":
        return False if settings.overlap == "off" else None
    return settings.plans == "on"


def programs_of(settings: ServeSettings) -> Path | None:
    """Return the directory of compiled programs; None without one if the user has no home."""
    try:
        return (settings.cache_folder or kept_folder()) / PROGRAMS
    except RuntimeError:  # no home
        return None


def adapters_of(settings: ServeSettings, family: PipelineSet) -> Adapters | None:
    """Register the files of `lora_dir` for the pipelines; None without a directory."""
    if settings.lora_dir is None:
        return None
    LoraTarget.of(family.main.plain)  # refuses a pipeline that takes no LoRA
    found = Adapters(settings.lora_dir, host_bytes=settings.lora_host_bytes)
    found.start()
    for member in family.members:
        pipeline_state_of(member.pipe).adapters = lambda: found
    return found


def own_processes_of(settings: ServeSettings, family: PipelineSet) -> OwnProcesses:
    """Return which denoisers have processes of their own; InputError for names that none has."""
    found = OwnProcesses(
        settings.own_process,
        settings.own_process_replicas,
        settings.own_process_bytes,
        seconds=settings.own_process_seconds,
        devices=settings.own_process_devices,
    )
    denoisers = [pipeline_state_of(m.pipe).denoisers for m in family.members]
    known = {name for own in denoisers for name in own}
    parts = known | {name.split(".")[0] for name in known}
    unknown = [name for name in found.names if name not in parts]
    if unknown:
        raise InputError(
            f"own_process: the model has no denoiser {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(sorted(known))}"
        )
    for name, denoiser in [pair for own in denoisers for pair in own.items()]:
        if found.has(name):
            found.device(name, device_of(denoiser.module))  # refuses one that it can't have
    return found


def check_denoisers(settings: ServeSettings, family: PipelineSet) -> None:
    """Raise InputError if ranks, or settings of the compiler, don't suit a denoiser."""
    chosen = [name for name in ("prepack", "inductor") if getattr(settings, name)]
    for name, denoiser in pipeline_state_of(family.main.pipe).denoisers.items():
        if settings.ranks > 1:
            if (why := why_unsupported(denoiser)) is not None:
                raise InputError(f"ranks: {name} {why}")
            ranks = Ranks(settings.ranks, settings.rank_devices, settings.rank_backend)
            ranks.placed(own_device(denoiser))
        if chosen and type(denoiser) is not CompiledDenoiser:
            raise InputError(
                f"{' and '.join(chosen)}: {name} has exported graphs, which run as they are; serve "
                "the model that they were exported from, or leave the setting out"
            )
