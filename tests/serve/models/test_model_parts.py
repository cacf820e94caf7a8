"""What a worker's model is made of: memory for its templates."""

from math import inf

import pytest
import torch

from maskfx.serve.config import ServeSettings
from maskfx.serve.models import model_parts
from maskfx.serve.models.model_parts import device_bytes_of, host_bytes_of, tiers_of

GIB = 1 << 30


def free(monkeypatch: pytest.MonkeyPatch, host: float, device: float = inf) -> None:
    def found(where: torch.device) -> float:
        return host if where.type == "cpu" else device

    monkeypatch.setattr(model_parts, "free_memory", found)


def test_templates_get_half_of_the_free_memory_of_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, 64 * GIB)
    assert host_bytes_of(ServeSettings()) == 32 * GIB
    assert host_bytes_of(ServeSettings(workers=4)) == 8 * GIB
    assert tiers_of(ServeSettings(workers=4)).room == 8 * GIB
    free(monkeypatch, inf)
    assert host_bytes_of(ServeSettings()) == 4 * GIB


def test_templates_get_a_quarter_of_what_a_model_leaves_free_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, 64 * GIB, 40 * GIB)
    assert device_bytes_of(ServeSettings(), torch.device("cuda")) == 10 * GIB
    assert device_bytes_of(ServeSettings(), torch.device("cpu")) == 0


def test_given_bytes_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 64 * GIB, 40 * GIB)
    given = ServeSettings(cache_host_bytes=5, cache_device_bytes=7)
    assert (host_bytes_of(given), device_bytes_of(given, torch.device("cuda"))) == (5, 7)
