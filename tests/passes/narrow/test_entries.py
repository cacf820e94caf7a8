"""narrow_entries: rows behind a cut come from a table."""

from maskfx.ir.programs.sources import Enter, Loaded
from maskfx.passes.narrow.entries import narrow_entries
from tests.passes.test_cut_keys import Block, make_inputs
from tests.passes.tools import run_pass


def test_reads_rows_and_loaded_ones() -> None:
    run = run_pass(narrow_entries, Block(), make_inputs, plans=True)
    assert run.rewrites == run.before["enter_rows"] == run.gained("enter") == 1
    assert run.after["enter_rows"] == 0
    sources = list(run.ctx.interface.inputs.values())
    [loaded] = [s for s in sources if isinstance(s, Loaded)]
    [table] = [s for s in sources if isinstance(s, Enter)]
    for source in (loaded, table):
        assert (source.before, source.after) == (("image",), ("image@1",))
    assert run.ctx.interface.taps[loaded.tap].shape == (8,)


def test_keeps_a_graph_without_cuts() -> None:
    assert run_pass(narrow_entries, Block(), make_inputs).unchanged


def test_second_run_rewrites_nothing() -> None:
    run = run_pass(narrow_entries, Block(), make_inputs, plans=True)
    assert run.second_run_is_idle()
