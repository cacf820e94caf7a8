"""The processes of one test run share what each compiled."""

from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from maskfx.compiler.artifact.artifact import PackedCompilation
from tests.factories.run_programs import RunPrograms

SPEC = pytree.tree_structure({"sample": 1})
PACKED = PackedCompilation("{}", "[]", {"0": torch.arange(3)})


def opened(folder: Path) -> RunPrograms:
    made = RunPrograms(folder)
    made.is_open = True
    return made


def test_a_process_reads_what_another_wrote_once(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    one.put("key", SPEC, PACKED)
    (found,) = other.of("key", SPEC)
    assert found.packed.document == PACKED.document
    assert found.packed.constants["0"].tolist() == [0, 1, 2]
    assert other.of("key", SPEC) == [found]
    assert len(one.of("key", SPEC)) == 1
    assert not other.of("another key", SPEC)
    assert not other.of("key", pytree.tree_structure({"latent": 1}))


def test_what_is_cleared_stays_unknown_until_it_is_opened_again(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    one.put("key", SPEC, PACKED)
    other.clear()
    assert not other.of("key", SPEC)
    other.put("own", SPEC, PACKED)
    assert not one.of("own", SPEC)
    other.is_open = True
    assert len(other.of("key", SPEC)) == 1
