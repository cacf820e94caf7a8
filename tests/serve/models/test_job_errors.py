"""What a job's sender gets of an exception: a code, a sentence without paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler

from maskfx.errors import BudgetError, Busy, Closed, DeadlineMissed, InputError, NumberError
from maskfx.serve.errors import CODES, ApiError
from maskfx.serve.models.job_errors import told

CASES: list[tuple[BaseException, str]] = [
    (ApiError("lora_not_found", "no", param="lora"), "lora_not_found"),
    (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
    (MemoryError(), "out_of_memory"),
    (DeadlineMissed("late"), "deadline_exceeded"),
    (Busy("full"), "queue_full"),
    (Closed("closed"), "draining"),
    (NumberError("nan"), "generation_failed"),
    (BudgetError("no room"), "out_of_resources"),
    (InputError("strength=3: give less"), "invalid_value"),
    (RuntimeError("/home/ann/secret.py broke"), "generation_failed"),
    (KeyError("/home/ann/secret.py"), "generation_failed"),
]


@pytest.mark.parametrize(("error", "code"), CASES, ids=lambda value: str(value)[:30])
def test_each_kind_of_error_has_its_code(error: BaseException, code: str) -> None:
    found, message, _ = told(error)
    assert found == code
    assert found in CODES
    assert message
    assert "somebody" not in message


def test_what_is_to_blame_is_named_and_paths_are_not() -> None:
    assert told(ApiError("lora_not_found", "no", param="lora"))[2] == "lora"
    unfit = InputError("style.safetensors: it's damaged")
    assert told(unfit)[2] is None
    unfit.argument = "lora"
    assert told(unfit)[2] == "lora"
    assert told(InputError("model=/srv/secret/models/x: no such folder"))[1] == (
        "model=…: no such folder"
    )


def test_a_check_of_the_pipeline_or_its_scheduler_is_the_clients_to_mend() -> None:
    scheduler: Any = DDIMScheduler()
    with pytest.raises(ValueError, match="2000") as refused:
        scheduler.set_timesteps(2000)
    code, message, _ = told(refused.value)
    assert code == "invalid_value"
    assert "2000" in message
    with pytest.raises(ValueError, match="invalid literal") as other:
        int("2000 steps")
    assert told(other.value)[0] == "generation_failed"


def test_numbers_that_arent_finite_are_told_as_such() -> None:
    assert "aren't finite" in told(NumberError("nan"))[1]


def test_a_template_without_room_is_told_what_to_do() -> None:
    assert "delete another one" in told(BudgetError("12 bytes of 10"))[1]
