"""canonicalize_sequences: one sequence needs no padding."""

from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from maskfx.passes.canonicalize.sequences import canonicalize_sequences
from tests.passes.tools import check_values, picture, run_pass, shared


class Pads(nn.Module):
    """Tokens as the only sequence of a list, and as one of two."""

    def __init__(self, batch_first: bool = True, several: bool = False) -> None:
        super().__init__()
        self.batch_first, self.several = batch_first, several

    def forward(self, sample: Tensor) -> Tensor:
        flat = sample.tanh().flatten(2).permute(2, 0, 1)
        listed = [flat, flat.exp()] if self.several else [flat]
        axis = 0 if self.batch_first else 1
        padded = pad_sequence(listed, batch_first=self.batch_first).select(axis, 0)
        return padded.permute(1, 2, 0).reshape(sample.shape).sin()


def test_spells_one_sequence() -> None:
    for batch_first in (True, False):
        module = Pads(batch_first)
        run = run_pass(canonicalize_sequences, module, picture)
        assert run.rewrites == run.before["pad_sequence"] == run.gained("unsqueeze") == 1
        assert run.after["pad_sequence"] == 0
        check_values(module, picture)


def test_keeps_several_sequences() -> None:
    run = run_pass(canonicalize_sequences, Pads(several=True), picture)
    assert run.before["pad_sequence"] == 1
    assert run.unchanged


def test_second_run_rewrites_nothing() -> None:
    assert run_pass(canonicalize_sequences, shared(Pads), picture).second_run_is_idle()
