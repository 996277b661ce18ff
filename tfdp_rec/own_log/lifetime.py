"""What all days together may cost: decided on the first of them, and written in the ledger before anything is paid.

The first day says ε, δ and for how many days (`--epsilon`, `--delta`, `--days`). Whoever continues cannot change it: a
budget that could be raised by the one whom it limits is none. What was spent is the total of the ledger's entries, as
they stand in it, days that were cut off included; users are taken to be in the log of every day.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dp_accounting import DpEvent

from tfdp_rec.own_log.budget import Budget
from tfdp_rec.spending.ledger import Ledger
from tfdp_rec.spending.ledger_lines import Chain, Payment
from tfdp_rec.spending.statement import rounded_up

LABEL = "budget of all days"


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """What the first day decided.

    Attributes:
        epsilon: of all days together.
        delta: δ of all days together.
        days: how many there may be.
        public: the items are.
        items_epsilon: of finding items on all days, by itself; a quarter of ε if None.
    """

    epsilon: float
    delta: float
    days: int
    public: bool
    items_epsilon: float | None

    @property
    def budget(self) -> Budget:
        """What a day may cost."""
        return Budget.of(self.epsilon, self.delta, self.public, self.items_epsilon, self.days)

    def decided(self, ledger: Ledger) -> Lifetime:
        """What stands in a ledger; this, written there, if nothing does.

        Args:
            ledger: of a first day.
        """
        if not _notes(ledger.chain):
            ledger.note(LABEL, dataclasses.asdict(self))
        return Lifetime.of(ledger.chain)

    @classmethod
    def of(cls, chain: Chain) -> Lifetime:
        """The first that stands in a ledger: no later one counts.

        Raises:
            ValueError: there is none.
        """
        notes = _notes(chain)
        if not notes:
            raise ValueError(
                f"{chain.path} does not say what all days together may cost, so that no day can be added: begin "
                "another run with --days."
            )
        return cls(**notes[0])

    def refuse_beyond(self, ledger: Ledger, events: Sequence[DpEvent]) -> None:
        """Raises if what is about to be paid would pass what was decided.

        Args:
            ledger: to pay in.
            events: to be paid.

        Raises:
            ValueError: saying what was spent.
        """
        after = ledger.epsilon(self.delta, more=[Payment(event) for event in events])
        if after > self.epsilon:
            spent = rounded_up(ledger.epsilon(self.delta)) if ledger.paid else 0.0
            days = "1 day" if self.days == 1 else f"{self.days} days"
            raise ValueError(
                f"{ledger.path} has spent epsilon = {spent:g} of the {self.epsilon:g} that the first day decided on "
                f"for {days} (--epsilon, --days), and this day would make it {rounded_up(after):g}: what is released "
                "can be served on, and nothing more is to be asked of these users."
            )


def _notes(chain: Chain) -> list[dict]:
    return [line["settings"] for line in chain.lines if line["kind"] == "note" and line["label"] == LABEL]
