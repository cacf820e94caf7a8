"""Tuning: which block sizes a kernel runs with, measured once for each bucket of shapes.

Choices are kept in a file, by device, kernel, version and bucket, so that a later process measures
nothing. `triton.autotune(cache_results=True)` keeps them by the source of the kernel and measures
again with each change of Triton's settings; it can't be tested without a GPU.

The file lies in `kept_folder()`. If `MASKFX_KERNEL_TUNING` is `0` or `off`, kernels run with their
first configuration, or a kept one.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from maskfx.ops.cache_folder import kept_folder
from maskfx.ops.kernels.serves import OFF, interpreted

log = logging.getLogger(__name__)
Config = dict[str, int]
Measure = Callable[[Callable[[], object]], float]

VERSION = 2  # of all kernels and how they are measured: choices of other versions aren't read
TUNES = "MASKFX_KERNEL_TUNING"


def bucket(number: int) -> int:
    """Return the power of two at or above a number of rows, so that few batches are measured."""
    return 1 << max(number - 1, 0).bit_length()


class Tuner:
    """Chooses configurations and keeps them in a file.

    Args:
        path: The file; None keeps choices in memory only.
        measure: Returns the seconds of a call on the device.
    """

    def __init__(self, path: Path | None, measure: Measure) -> None:
        self.path, self.measure = path, measure
        self._chosen: dict[str, Config] | None = None
        self._lock = threading.RLock()  # what is measured may be tuned itself

    def choose(
        self,
        device: str,
        kernel: str,
        shape: Sequence[object],
        configs: Sequence[Config],
        run: Callable[[Config], object],
        measures: bool = True,
    ) -> Config:
        """Return the configuration for a bucket of shapes.

        If none is known, all are measured; the first is returned if that isn't possible now.
        """
        key = " | ".join((device, kernel, str(VERSION), ",".join(map(str, shape))))
        with self._lock:
            if self._chosen is None:
                self._chosen = self._read()
            known = self._chosen.get(key)
            if known is None or known not in configs:
                if not measures:
                    return configs[0]
                known = self._fastest(key, configs, run)
                self._chosen[key] = known
                self._write({key: known})
        return known

    def _fastest(
        self, key: str, configs: Sequence[Config], run: Callable[[Config], object]
    ) -> Config:
        seconds: list[tuple[float, int]] = []
        failed: Exception | None = None
        for number, config in enumerate(configs):
            try:
                seconds.append((self.measure(lambda config=config: run(config)), number))  # type: ignore[misc]
            except (torch.AcceleratorError, torch.OutOfMemoryError):
                raise  # a full device isn't the configuration's fault
            except Exception as error:  # too large for the device, for example
                log.debug("%s with %s: %s", key, config, error)
                failed = error
        if not seconds:
            assert failed is not None, f"{key} has no configurations"
            raise failed
        return configs[min(seconds)[1]]

    def _read(self) -> dict[str, Config]:
        """Return the choices in the file; none if it is missing or damaged."""
        if self.path is None or not self.path.exists():
            return {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(key): {str(k): int(v) for k, v in c.items()} for key, c in found.items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            log.warning("%s can't be read and is made again: %s", self.path, error)
            return {}

    def _write(self, new: Mapping[str, Config]) -> None:
        """Add choices to the file, which other processes may write to: it is replaced at once."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**self._read(), **new}, indent=1, sort_keys=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, suffix=".tmp", delete=False, encoding="utf-8"
            ) as file:
                file.write(text + "\n")
            os.replace(file.name, self.path)
        except OSError as error:
            log.warning("choices of kernels aren't kept in %s: %s", self.path, error)


def measure_on_gpu(run: Callable[[], object]) -> float:
    """Return the seconds of a call on the device, without the host's launches where possible.

    A host that launches slowly would favour one kernel over several that take less time; steps are
    replayed from CUDA graphs, which launch nothing. What can't be captured is timed with launches.
    """
    from triton.testing import do_bench, do_bench_cudagraph

    run()  # compiles, and copies tables that a capture can't copy
    torch.cuda.synchronize()  # it runs on another stream
    try:
        return float(do_bench_cudagraph(run, rep=20)) / 1e3
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        log.debug("timed with its launches: %s: %s", type(error).__name__, error)
        return float(do_bench(run, warmup=5, rep=20)) / 1e3


_tuner: Tuner | None = None


def configured(
    device: torch.device,
    kernel: str,
    shape: Sequence[object],
    configs: Sequence[Config],
    run: Callable[[Config], object],
) -> Config:
    """Return the configuration that a kernel runs with on a device.

    Args:
        device: The device.
        kernel: The kernel's name.
        shape: What decides which configuration is the fastest, in buckets.
        configs: The configurations to choose from; the first one needs no measurement.
        run: Runs the kernel with a configuration; it may be called many times.
    """
    global _tuner
    tunes = os.environ.get(TUNES, "1").strip().lower() not in OFF
    if len(configs) == 1 or device.type != "cuda" or interpreted():
        return configs[0]
    measures = tunes and not torch.cuda.is_current_stream_capturing()
    if _tuner is None:
        _tuner = Tuner(kept_folder() / "kernels.json", measure_on_gpu)
    return _tuner.choose(torch.cuda.get_device_name(device), kernel, shape, configs, run, measures)
