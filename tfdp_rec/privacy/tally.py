"""What was done since one looked, in a few reads: so many more steps of one kind, or something else.

An accountant's answer takes milliseconds, and training makes a step in fewer. Between two of its answers almost always
nothing happened but more of the same,

    steps now = steps when one looked + more,

and whether that is so the counters of the history tell: all but one stand where they stood, and the one that moved is
of the optimizer's present event and the sampling's batches, iterated no further time.
"""

from __future__ import annotations

from typing import Any

from tfdp_rec.privacy.accounting import Accountant


class Tally:
    """Steps of one optimizer on batches of the accountant's sampling, from now on.

    Args:
        accountant: follows the optimizer's model.
        optimizer: whose steps.

    Attributes:
        optimizer: as given.
    """

    def __init__(self, accountant: Accountant, optimizer: Any):
        self.optimizer, self._accountant, self._event = optimizer, accountant, optimizer.dp_event()
        self._counted, self._kind = accountant.counters(), accountant.kind_of(optimizer)

    def more(self) -> int | None:
        """So many; None if anything else was done too."""
        if self.optimizer.dp_event() != self._event:
            return None
        now = self._accountant.counters()
        if now == self._counted:
            return 0
        if self._kind not in now or now.keys() != self._counted.keys():
            return None
        (steps, begun), (before, begun_before) = now[self._kind], self._counted[self._kind]
        alike = {**now, self._kind: (before, begun)} == self._counted and begun == begun_before
        return steps - before if alike else None
