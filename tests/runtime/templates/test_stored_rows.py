"""Rows on disk: a plan chooses what is read of them, and an edit is the same wherever they lay."""

import dataclasses
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import maskfx
from maskfx import EditStep, Loader, StepCache, Templates
from maskfx.errors import CacheError
from maskfx.runtime.cache import stored_steps
from maskfx.runtime.cache.rows import RowSubset, StoredRows, in_memory, stored_parts, whole
from maskfx.runtime.cache.serialize import CHECK, LENGTH, StepReader, decode, encode
from maskfx.runtime.cache.step_cache import has_unread
from maskfx.runtime.cache.stored_steps import decode_parts
from maskfx.runtime.cache.stores import read_speed
from maskfx.runtime.cache.stores.filesystem import Disk
from maskfx.runtime.cache.stores.read_speed import ReadSpeed
from maskfx.runtime.cache.stores.store import Store
from maskfx.runtime.cache.tiers import Tiers
from maskfx.runtime.planner.blocks import find_blocks
from maskfx.runtime.planner.calibration import one_batch
from maskfx.runtime.planner.choices import INPUT, KEYS, choices_of_member
from maskfx.runtime.planner.costs import Costs
from maskfx.runtime.planner.step_planner import StepPlanner
from tests.factories import masks
from tests.factories.step_caches import key
from tests.factories.zoo import ZOO, Case, slow_unet
from tests.passes.tools import error

CASES = ("UNet2DConditionModel-sd15", "FluxTransformer2DModel")
LARGE = 1 << 30


@pytest.fixture(autouse=True)
def no_rows_among_the_first_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are so small that all of them would be."""
    monkeypatch.setattr(stored_steps, "BEGINNING", LENGTH.size)


class CountingDisk(Disk):
    """Counts the bytes that are read at places in files."""

    def __init__(self) -> None:
        self.nbytes = 0

    def read_at(self, file: int, into: memoryview, offset: int) -> int:
        found = super().read_at(file, into, offset)
        self.nbytes += found
        return found


class MemoryParts:
    """An entry in memory, read in parts."""

    elsewhere = False

    def __init__(self, payload: bytes) -> None:
        self.payload, self.nbytes, self.speed = payload, len(payload), ReadSpeed()
        self.damaged = 0
        self.reads: list[tuple[int, int]] = []

    def read(self, begin: int, end: int) -> bytearray:
        self.reads.append((begin, end))
        return bytearray(self.payload[begin:end])

    def is_damaged(self) -> None:
        self.damaged += 1


@dataclasses.dataclass
class Bed:
    """A denoiser with a planner, and a template of one step on disk."""

    case: Case
    denoiser: maskfx.CompiledDenoiser
    inputs: dict[str, Any]
    mask: torch.Tensor
    cache: StepCache
    root: Path
    disk: CountingDisk

    def templates(self) -> Templates:
        """A process that starts: nothing is in memory."""
        store = Store(self.root, disk=self.disk)
        return Templates(self.denoiser, Tiers(store, host_bytes=LARGE))

    def edit(self, templates: Templates) -> EditStep:
        found = templates.edit("cat", 0, self.inputs, self.mask)
        assert found is not None
        return dataclasses.replace(found, any_step=True)


def bed_of(name: str, root: Path) -> Bed:
    case = ZOO[name]
    size = case.sizes[0]
    denoiser = maskfx.compile(case.build(), plans=True, loader=Loader())
    inputs = case.inputs(size, 0)
    cache = dataclasses.replace(denoiser.record(**inputs)[1], given=[])  # nothing is computed whole
    mask = masks.random(case.mask_shape(size), 0)
    made = Bed(case, denoiser, case.inputs(size, 1), mask, cache, root, CountingDisk())
    made.templates().put("cat", 0, cache)
    costs = costs_of(denoiser, EditStep(made.inputs, mask, cache, any_step=True))
    denoiser.planner = StepPlanner(denoiser, costs)
    return made


def costs_of(denoiser: maskfx.CompiledDenoiser, step: EditStep) -> Costs:
    """A machine whose link takes no time: only reads from the store do."""
    program, members = one_batch(denoiser, [step])
    count = len(find_blocks(program, members[0].sites))
    return Costs((1e-6,) * count, ((1e-12, 1e-12, 0.0),) * count, 0.0, 0.0, 0.0)


def with_speed(monkeypatch: pytest.MonkeyPatch, fixed: float, slope: float) -> None:
    monkeypatch.setattr(ReadSpeed, "line", property(lambda _: (fixed, slope)))


@pytest.mark.parametrize("name", slow_unet(CASES))
def test_a_plan_chooses_what_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = bed_of(name, tmp_path)
    wanted = bed.denoiser.edit([EditStep(bed.inputs, bed.mask, bed.cache, any_step=True)])
    read, again = {}, {}
    for slope in (0.0, 1e-3):
        with_speed(monkeypatch, 0.0, slope)
        planner = StepPlanner(bed.denoiser, costs_of(bed.denoiser, bed.edit(bed.templates())))
        bed.denoiser.planner = planner
        edit = bed.edit(bed.templates())
        bed.disk.nbytes = 0
        [planned] = planner.plan_step([edit])
        assert bed.disk.nbytes == 0, "plans read nothing"
        assert isinstance(planned, EditStep)
        bed.denoiser.ahead([planned], only=True)
        assert error(bed.denoiser.step([planned]), wanted) < 1e-5
        read[slope], again[slope] = bed.disk.nbytes, planner.again
        assert has_unread(planned.cache), "what the plan doesn't read stays on disk"
    assert again[0.0][0] == 0
    assert again[1e-3][0] > 0.8 * again[1e-3][1], "most inputs are fewer bytes"
    assert read[1e-3] < read[0.0]


@pytest.mark.parametrize("name", slow_unet(CASES))
def test_choices_pay_for_what_is_read_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = bed_of(name, tmp_path)
    with_speed(monkeypatch, 1.0, 0.0)  # a second per read
    edit = bed.edit(bed.templates())
    program, [member] = one_batch(bed.denoiser, [edit])
    blocks = find_blocks(program, member.sites)
    costs = costs_of(bed.denoiser, edit)
    own = choices_of_member(program, blocks, member, costs)
    for place, choice in ((0, KEYS), (-1, INPUT)):
        seconds = sum(menu[place].load_seconds for menu in own.menus)
        names = [name for name, load in own.moved[choice].items() if load.nbytes]
        taps = {program.interface.inputs[name].tap for name in names}  # type: ignore[union-attr]
        values = {id(edit.cache.rows[tap].value) for tap in taps}  # type: ignore[union-attr]
        assert seconds == len(values)
    for tap in edit.cache.rows.values():
        in_memory(tap)
    own = choices_of_member(program, blocks, member, costs)
    assert sum(c.load_seconds for menu in own.menus for c in menu) == 0, "all are in memory"


def test_the_first_plan_measures_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = bed_of(CASES[1], tmp_path)
    monkeypatch.setattr(read_speed, "ENOUGH", 1)
    edit = bed.edit(bed.templates())
    planner = bed.denoiser.planner
    assert isinstance(planner, StepPlanner)
    planner.plan_step([edit])
    assert planner.store is not None
    assert planner.store.line is not None
    assert "rows on disk read at" in planner.describe()


def test_without_a_planner_steps_are_read_whole(tmp_path: Path) -> None:
    bed = bed_of(CASES[1], tmp_path)
    bed.denoiser.planner = None
    assert not has_unread(bed.edit(bed.templates()).cache)


def test_a_removed_step_fails_only_when_its_rows_are_read(tmp_path: Path) -> None:
    bed = bed_of(CASES[1], tmp_path)
    edit = bed.edit(bed.templates())
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(CacheError, match="record its template again"):
        bed.denoiser.edit([edit])


def test_a_replaced_step_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    bed = bed_of(CASES[1], tmp_path)
    edit = bed.edit(bed.templates())
    other = bed.denoiser.record(**bed.case.inputs(bed.case.sizes[0], 5))[1]
    bed.templates().put("cat", 0, other)
    with pytest.raises(CacheError, match="was replaced"):
        bed.denoiser.edit([edit])


# One step in parts.


def recorded() -> StepCache:
    case = ZOO[CASES[1]]
    denoiser = maskfx.compile(case.build(), plans=True)
    return denoiser.record(**case.inputs(case.sizes[0], 0))[1]


def test_a_step_in_parts_is_the_whole_step() -> None:
    payload = encode(recorded())
    parts = MemoryParts(payload)
    got, wanted = decode_parts(parts), decode(payload)
    assert got is not None
    assert got.nbytes() == wanted.nbytes()
    before = len(parts.reads)
    for tap, rows in got.rows.items():
        assert isinstance(rows, StoredRows)
        assert rows.unread == rows.value.nbytes > 0
        assert rows.nbytes == wanted.rows[tap].nbytes
        assert torch.equal(whole(rows), whole(wanted.rows[tap]))
        assert rows.unread == 0
        whole(rows)
    values = {id(rows.value) for rows in got.rows.values() if isinstance(rows, StoredRows)}
    assert len(parts.reads) - before == len(values)
    assert got.nbytes() == wanted.nbytes()
    assert torch.equal(got.output[0], wanted.output[0])


def test_parts_of_a_batch_and_pickled_rows_are_the_same() -> None:
    payload = encode(recorded())
    got, wanted = decode_parts(MemoryParts(payload)), decode(payload)
    assert got is not None
    one, other = got.of_elements([0]), wanted.of_elements([0])
    assert has_unread(one)
    for tap, rows in one.rows.items():
        assert torch.equal(whole(rows), whole(other.rows[tap]))
        sent = pickle.loads(pickle.dumps(rows))
        assert isinstance(sent, torch.Tensor | RowSubset)
        assert torch.equal(whole(sent), whole(rows))


def test_rows_among_the_first_bytes_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = encode(recorded())
    wanted = decode(payload)
    first = len(payload) // 2
    monkeypatch.setattr(stored_steps, "BEGINNING", first)
    parts = MemoryParts(payload)
    got = decode_parts(parts)
    assert got is not None
    for tap, rows in got.rows.items():
        assert torch.equal(whole(rows), whole(wanted.rows[tap]))
    assert parts.reads[0] == (0, first)
    assert len(parts.reads) > 1
    assert all(end > first for _, end in parts.reads[1:])


def test_what_was_fetched_is_checked_and_not_read_again() -> None:
    payload = encode(recorded())
    wanted = decode(payload)
    parts = MemoryParts(payload)
    got = decode_parts(parts)
    assert got is not None
    for tap, rows in got.rows.items():
        for part in stored_parts(rows):
            part.fetch()
            before = len(parts.reads)
            part.fetch()
            assert not part.is_read
            assert torch.equal(whole(rows), whole(wanted.rows[tap]))
            assert len(parts.reads) == before
    at = len(payload) - 1
    broken = MemoryParts(payload[:at] + bytes([payload[at] ^ 1]))
    got = decode_parts(broken)
    assert got is not None
    parts_of = [part for rows in got.rows.values() for part in stored_parts(rows)]
    for part in parts_of:
        part.fetch()
    assert broken.damaged == 0, "nothing is checked yet"
    with pytest.raises(CacheError, match="are damaged"):
        [part.read() for part in parts_of]
    assert broken.damaged > 0


def test_concurrent_readers_read_once() -> None:
    parts = MemoryParts(encode(recorded()))
    got = decode_parts(parts)
    assert got is not None
    rows, before = next(iter(got.rows.values())), len(parts.reads)
    threads = [threading.Thread(target=whole, args=(rows,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(parts.reads) == before + 1


def test_any_damage_is_found_when_it_is_read() -> None:
    payload = encode(recorded())
    reader = StepReader(payload)
    base = reader._base
    for at in (*range(8, base, max(base // 60, 1)), *range(base, len(payload), 4099)):
        broken = bytearray(payload)
        broken[at] ^= 1
        parts = MemoryParts(bytes(broken))
        assert not whole_from(parts) or is_padding(payload[:base], at), at
        assert at < base or parts.damaged


def whole_from(parts: MemoryParts) -> bool:
    """Return True if a step is read from parts, with all its rows; None means: read it whole."""
    try:
        got = decode_parts(parts)
        for rows in () if got is None else got.rows.values():
            whole(rows)
    except CacheError:
        return False
    return got is not None


def is_padding(header: bytes, at: int) -> bool:
    """Return True for what the header doesn't mean: spaces at its end."""
    return not header[at:].strip(b" ")


def test_a_step_without_checksums_is_read_whole() -> None:
    payload = encode(recorded())
    older = payload.replace(CHECK.encode(), b"x" * len(CHECK))
    assert decode_parts(MemoryParts(older)) is None


def test_the_speed_of_a_store_is_a_line() -> None:
    speed = ReadSpeed()
    assert speed.line is None
    assert speed.describe() == "not measured yet"
    for nbytes in (1 << 16, 1 << 18, 1 << 20, 1 << 22):
        speed.add(nbytes, 1e-3 + nbytes / 100e6)
    assert speed.line is not None
    assert speed.line == pytest.approx((1e-3, 1e-8), rel=0.06)
    same = ReadSpeed()
    for _ in range(3):
        same.add(1 << 20, 0.01)
    assert same.line is not None
    assert same.line[0] == 0.0
    assert same.line[1] * (1 << 20) == pytest.approx(0.01, rel=0.06)


def test_the_store_gives_parts_of_its_own_entries_only(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(key(step=1), b"0123456789")
    parts = store.parts(key(step=1))
    assert parts is not None
    assert bytes(parts.read(2, 5)) == b"234"
    assert store.parts(key(step=2)) is None
    other = store.path(key(step=2).digest())
    other.write_bytes(store.path(key(step=1).digest()).read_bytes())
    assert store.parts(key(step=2)) is None, "another entry under its name"
    store.path(key(step=1).digest()).write_bytes(b"short")
    assert store.parts(key(step=1)) is None
    with pytest.raises(CacheError, match="replaced or cut short"):
        parts.read(0, 5)


def test_a_request_that_waits_reads_what_its_plan_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the graph; then its step reads nothing more."""
    bed = bed_of("FluxTransformer2DModel", tmp_path)
    [program] = bed.denoiser.programs.values()
    regions = [program.interface.region_taps(r) for r in range(1, len(bed.denoiser.regions) + 1)]
    keys, inputs = (set().union(*taps) for taps in zip(*regions, strict=True))
    for slope, wanted, unwanted in ((0.0, keys, inputs), (1e-3, inputs, keys)):
        with_speed(monkeypatch, 0.0, slope)
        first = bed.edit(bed.templates())
        assert bed.denoiser.planner is not None
        bed.denoiser.step(bed.denoiser.planner.plan_step([first]))
        templates = bed.templates()
        [done] = templates.prefetch("cat", [0], rows=True)
        assert done.result()
        waiting = bed.edit(templates)
        unread = {tap for tap, rows in waiting.cache.rows.items() if stored_parts(rows)}
        assert not unread & wanted
        assert unwanted - wanted <= unread
        before = bed.disk.nbytes
        bed.denoiser.step(bed.denoiser.planner.plan_step([waiting]))
        assert bed.disk.nbytes == before


def test_rows_for_a_request_that_waits_stay_within_the_memory(tmp_path: Path) -> None:
    bed = bed_of("FluxTransformer2DModel", tmp_path)
    templates = Templates(bed.denoiser, Tiers(Store(bed.root, disk=bed.disk), host_bytes=1))
    before = bed.disk.nbytes
    [done] = templates.prefetch("cat", [0], rows=True)
    assert done.result()
    opened = bed.disk.nbytes - before
    [done] = bed.templates().prefetch("cat", [0])
    assert done.result()
    assert bed.disk.nbytes - before == 2 * opened, "no more than without rows"
