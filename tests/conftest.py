"""Settings of every test: one thread, no gradients, only our own warnings, no GPU where none is."""

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from maskfx.ops.cache_folder import FOLDER as KEPT
from maskfx.runtime.hardware import cpu_threads
from maskfx.runtime.programs import shared_programs as shared
from maskfx.runtime.programs.shared_programs import shared_programs
from tests.factories.run_programs import PROGRAMS, RunPrograms

TESTS = Path(__file__).parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for the network

SHARING = (
    "distributed",
    "engine",
    "export",
    "pipelines",
    "runtime",
    "serve",
    "test_devices.py",
    "test_errors.py",
    "test_examples.py",
    "training",
)
THIRD_PARTIES = ("torch", "diffusers", "transformers")


def pytest_configure(config: pytest.Config) -> None:
    for name in (KEPT, PROGRAMS):  # nothing of the user's; processes of a run share theirs
        if name not in os.environ:
            os.environ[name] = made = tempfile.mkdtemp(prefix="maskfx-tests-")
            config.add_cleanup(partial(shutil.rmtree, made, ignore_errors=True))
    own = RunPrograms(Path(os.environ[PROGRAMS]))
    with mock.patch.object(shared, "SharedPrograms", return_value=own):
        assert shared_programs() is own, "programs were shared before the tests began"
    torch.set_num_threads(1)
    gc.set_threshold(5_000, 10, 20)  # a search of everything takes as long as a quick test
    # pytest adds handlers to loggers that don't propagate; with one, torch describes each size
    logging.getLogger("torch.__trace").propagate = True
    for name in THIRD_PARTIES:
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own hook of this name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    silent = [pytest.mark.filterwarnings(f"ignore:::{name}") for name in THIRD_PARTIES]
    for item in items:
        for mark in silent:
            item.add_marker(mark)
        group = group_of(item)
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))
    items.sort(key=case_name)


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of Python's searches for unreachable cycles."""
    gc.collect()
    gc.freeze()


def case_name(item: pytest.Item) -> str:
    """Tests of one model follow one another, so that few processes have to compile it."""
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("name", "")) if callspec is not None else ""


def group_of(item: pytest.Item) -> str:
    """Return the tests that one process runs: those of a model, or of a file, which share more."""
    if item.get_closest_marker("xdist_group"):
        return ""
    return case_name(item) or item.path.relative_to(TESTS).as_posix()


class Wrong(logging.Handler):
    """Programs that gave another result than the module, which then ran instead."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.fixture(autouse=True)
def every_program_is_right(request: pytest.FixtureRequest) -> Iterator[None]:
    """Running dense instead would hide a fault of the compiler."""
    wrong, log = Wrong(), logging.getLogger("maskfx.runtime.programs.program_cache")
    log.addHandler(wrong)
    yield
    log.removeHandler(wrong)
    assert not wrong.seen or request.node.get_closest_marker("wrong_program"), wrong.seen


@pytest.fixture(autouse=True)
def captures_of_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only tests that leave the compiler as it is share what they captured."""
    room = request.path.relative_to(TESTS).parts[0]
    if room in SHARING and request.node.get_closest_marker("wrong_program") is None:
        programs = shared_programs()
        assert isinstance(programs, RunPrograms)
        programs.is_open = True
        yield
        programs.is_open = False
        return
    shared_programs().clear()
    yield
    shared_programs().clear()


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps find no other programs on the machine, such as tests beside this one."""
    monkeypatch.setattr(cpu_threads.busy, "by_others", lambda: 0)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every thread that begins computes with three, on a machine of three cores."""
    monkeypatch.setattr(cpu_threads.busy, "total", 3)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
