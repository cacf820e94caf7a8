"""DefaultAdmission: the policy of an engine that was given none; it acts where there are deadlines.

Requests begin at once, as without a policy, while none of those that wait or step has a deadline,
and until enough steps were measured to predict further ones. After that `SlackAdmission` decides.
It is imported when the first deadline is seen, because what it needs is installed with
maskfx[serve]; without that requests always begin at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import isfinite
from typing import Literal

from maskfx.scheduling.admission_policy import AdmissionDecision, AdmissionPolicy
from maskfx.scheduling.rounds.round_policy import RoundCall, StepLoad

Default = Literal["default"]

log = logging.getLogger(__name__)

MEASURED = 8  # steps, from which on costs are known


class DefaultAdmission:
    """Lets requests begin at once, or by slack where there are deadlines.

    `policy` decides then; it is None until there is a deadline, and where it can't be imported.
    """

    def __init__(self) -> None:
        self.policy: AdmissionPolicy | None = None
        self._looked_up = False
        self._measured = 0  # steps

    def acts(self, dues: Sequence[float]) -> bool:
        """Return True if a request has a deadline, and enough steps were measured to predict it."""
        if not any(map(isfinite, dues)):
            return False
        if not self._looked_up:
            self._looked_up, self.policy = True, slack_admission()
        return self.policy is not None and self._measured >= MEASURED

    def decide(
        self, now: float, waiting: Sequence[RoundCall], active: Sequence[RoundCall], slots: int
    ) -> AdmissionDecision:
        assert self.policy is not None, "acts() is asked first"
        return self.policy.decide(now, waiting, active, slots)

    def learn(self, batch: Sequence[StepLoad], seconds: float) -> None:
        if self.policy is not None:
            self._measured += 1
            self.policy.learn(batch, seconds)


def slack_admission() -> AdmissionPolicy | None:
    """Return a policy by slack; None if what it needs isn't installed."""
    try:
        from maskfx.scheduling.slack_admission import SlackAdmission
    except ImportError as error:
        log.info("requests with deadlines begin at once (%s): install maskfx[serve]", error)
        return None
    return SlackAdmission()
