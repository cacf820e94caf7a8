"""Blocks of shared memory: their bytes, their room, their end; and what happens without room."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from maskfx.serve.messages import PixelBlock
from maskfx.serve.workers import shared_memory
from maskfx.serve.workers.lock_file import LockFile, orphaned
from maskfx.serve.workers.shared_memory import Blocks

BIG = np.arange(200 * 300 * 3, dtype=np.uint32).astype(np.uint8).reshape(200, 300, 3)


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[Blocks]:
    made = Blocks(tmp_path)
    yield made
    made.close()
    assert not list(tmp_path.iterdir())


def test_a_worker_reads_what_was_packed_and_answers_in_the_room(blocks: Blocks) -> None:
    mask = BIG[:, :, 0] > 9
    packed = blocks.pack([BIG, mask], BIG.nbytes)
    assert not packed.frames
    first, second = (shared_memory.read(blocks.directory, b, iter(())) for b in packed.blocks)
    assert np.array_equal(first, BIG)
    assert np.array_equal(second.astype(bool), mask)
    block = shared_memory.write(blocks.directory, packed.result, BIG[::-1])
    assert block is not None
    assert np.array_equal(blocks.read(block, iter(())), BIG[::-1])
    blocks.drop(packed.memory)
    assert len(blocks) == 0
    assert shared_memory.write(blocks.directory, packed.result, BIG) is None  # taken back


def test_the_answers_room_is_really_there(blocks: Blocks) -> None:
    """Not a hole in a file, which a full file system would refuse to fill later."""
    packed = blocks.pack([BIG], 10 * BIG.nbytes)
    held = (blocks.directory / (packed.memory or "")).stat()
    assert held.st_blocks * 512 >= 11 * BIG.nbytes


def test_an_answer_that_is_larger_than_its_room_isnt_written(blocks: Blocks) -> None:
    packed = blocks.pack([BIG], BIG.nbytes)
    larger = np.zeros((400, 300, 3), np.uint8)
    assert shared_memory.write(blocks.directory, packed.result, larger) is None
    smaller = shared_memory.write(blocks.directory, packed.result, BIG[:10])
    assert smaller is not None
    assert np.array_equal(blocks.read(smaller, iter(())), BIG[:10])


def test_little_goes_as_frames(blocks: Blocks) -> None:
    packed = blocks.pack([BIG[:5, :5]], 75)
    assert packed.memory is None
    (block,) = packed.blocks
    assert np.array_equal(
        shared_memory.read(blocks.directory, block, iter(packed.frames)), BIG[:5, :5]
    )


@pytest.mark.parametrize(
    ("block", "frames"),
    [
        (PixelBlock((2, 2, 3)), [b"short"]),
        (PixelBlock((2, 2, 3)), []),
        (PixelBlock((2, -2, 3)), [b"x" * 12]),
        (PixelBlock((2, 2, 3), "maskfx-somebody-elses"), []),
        (PixelBlock((2, 2, 3), "../../etc/passwd"), []),
    ],
)
def test_what_isnt_what_it_says_is_refused(
    blocks: Blocks, block: PixelBlock, frames: list[bytes]
) -> None:
    with pytest.raises(ValueError, match="pixels|block"):
        blocks.read(block, iter(frames))


def test_a_worker_opens_no_file_but_blocks(tmp_path: Path) -> None:
    for name in ("passwd", "maskfx-/../passwd"):
        with pytest.raises(ValueError, match="no front makes"):
            shared_memory.read(tmp_path, PixelBlock((1,), name), iter(()))


def test_a_shortened_block_is_an_error_not_a_signal(blocks: Blocks) -> None:
    packed = blocks.pack([BIG], 0)
    os.truncate(blocks.directory / (packed.memory or ""), 100)
    with pytest.raises(ValueError, match="100 bytes of pixels"):
        blocks.read(packed.blocks[0], iter(()))


def test_no_room_means_frames(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes files fail as a full file system does, here for one process."""
    code = f"""
import resource, signal
import numpy as np
from pathlib import Path
from maskfx.serve.workers.shared_memory import Blocks
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
blocks = Blocks(Path({str(tmp_path)!r}))
packed = blocks.pack([np.zeros((300, 300, 3), np.uint8)], 270_000)
assert packed.memory is None and packed.result is None and len(packed.frames[0]) == 270_000
assert blocks.pack([np.zeros((150, 200, 3), np.uint8)], 9_000).memory is not None
blocks.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert not list(tmp_path.iterdir())


def test_no_descriptor_means_frames(blocks: Blocks) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = os.dup(0)
    os.close(used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        packed = blocks.pack([BIG], 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert packed.memory is None
    assert len(packed.frames[0]) == BIG.nbytes


def test_without_shared_memory_all_goes_as_frames(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path / "missing")
    assert blocks.pack([BIG], BIG.nbytes).memory is None
    blocks.close()


HOLD = """
import sys, time
import numpy as np
from pathlib import Path
from maskfx.serve.workers.shared_memory import Blocks
blocks = Blocks(Path(sys.argv[1]))
for _ in range(3):
    blocks.pack([np.zeros((300, 300, 3), np.uint8)], 9)
print("held", flush=True)
time.sleep(60)
"""


def test_what_a_dead_front_left_is_collected_and_a_living_ones_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        while "held" not in other.stdout.readline():
            pass
        assert shared_memory.collect(tmp_path) == 0
        assert len(list(tmp_path.iterdir())) == 4
        other.send_signal(signal.SIGKILL)
    blocks = Blocks(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [blocks._name + ".lock"]
    blocks.close()


def test_a_lock_ends_with_its_owner(tmp_path: Path) -> None:
    owned = LockFile(tmp_path / "lock")
    assert not orphaned(tmp_path / "lock")
    assert not orphaned(tmp_path / "missing")
    owned.close()
    assert not (tmp_path / "lock").exists()
    (tmp_path / "lock").touch()
    assert orphaned(tmp_path / "lock")


def test_a_lock_that_isnt_ours_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may write to /dev/shm and /tmp; whose lock looks dead has files removed."""
    (tmp_path / "lock").touch()
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    assert orphaned(tmp_path / "lock")
    assert not orphaned(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not orphaned(tmp_path / "lock")
