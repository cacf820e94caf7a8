"""LateRows: lets the ranks of a step read each other's rows of the step before, call by call.

Owns how a run's calls are identified to the ranks; knows nothing of how these divide a step.
"""

from __future__ import annotations

from maskfx.pipelines.call_policy import CallPosition
from maskfx.runtime.steps import LateExchange, SplitRun

Key = tuple[str, str]  # denoiser, branch


class LateRows:
    """The calls of one run whose exchanges between ranks may be late.

    A call is the same in each step until the denoiser's function changes: its settings, or the
    adapters that act. The step after that waits.

    Args:
        first: The number of steps at the start in which ranks wait.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._runs: dict[Key, SplitRun] = {}
        self._reads = 0  # of calls that are forgotten

    def of(self, position: CallPosition) -> LateExchange:
        """Return how the exchanges of a call are late."""
        run = self._runs.setdefault((position.name, position.branch), SplitRun())
        return LateExchange(run, position.step, waits=position.step < self._first)

    @property
    def reads(self) -> int:
        """The number of calls in which ranks read rows of the step before."""
        return self._reads + sum(run.reads for run in self._runs.values())

    def forget(self) -> None:
        """Let the next step of each call wait; free what the ranks hold."""
        runs, self._runs = self._runs, {}
        self._reads += sum(run.reads for run in runs.values())
        for run in runs.values():
            run.close()
