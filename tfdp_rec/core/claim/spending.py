"""What was spent on the units of one sampling: by the models that are followed, and by other uses of their data.

    followed models -> their entries, and those that were recorded here -> a ledger, if there is one: its payments

With a ledger the payments are the record, the models' entries are receipts, and steps are paid for before they are
made. Without one what the models carry is the record (`NoPayments`).
"""

from __future__ import annotations

from typing import Any

from dp_accounting import DpEvent

from tfdp_rec.core.claim import payments
from tfdp_rec.core.claim.entries import Entries, Use
from tfdp_rec.core.claim.ledger import Ledger
from tfdp_rec.core.claim.payments import NoPayments, Payments
from tfdp_rec.core.claim.schemes import Sampling
from tfdp_rec.core.ground.files import Path


class Unaccounted(ValueError):
    """The data were used in a way that an accountant cannot account for, so that it gives no ε."""


class Spending:
    """What an accountant counts, and what it has paid for ahead."""

    # A `Ledger` that was opened here, from a path, is `owned`.

    def __init__(self, sampling: Sampling, ledger: Path | Ledger | None = None):
        self.sampling, self.owned = sampling, ledger is not None and not isinstance(ledger, Ledger)
        self.payments = NoPayments() if ledger is None else Payments(ledger, sampling)
        self.version = 0  # number of changes, other than steps, of what is counted here alone
        self._recorded, self._followed = Entries(), list[Any]()
        self._open: tuple[str, DpEvent] | None = None  # id and event of steps that are paid for, and not all made
        self._payee: Any = None  # the meter of the optimizer that they are paid for

    def follow(self, model: Any) -> None:
        """Counts the steps of a private `model`, or of an optimizer; refuses one without a privacy history."""
        found = _meter_of(model)
        if found is None:
            raise TypeError(
                f"{type(model).__name__} has no privacy history: follow a model that was compiled with a mechanism of "
                "tfdp_rec."
            )
        found.followed = True
        if not any(model is known for known in self._followed):
            self._followed.append(model)
            self.version += 1

    @property
    def meters(self) -> list[Any]:
        """The meters of the models that are followed, under their present optimizers."""
        return list({id(meter): meter for meter in map(_meter_of, self._followed)}.values())

    @property
    def history(self) -> Entries:
        """All entries that were recorded here or that the followed models carry; under a ledger these are receipts."""
        found = Entries()
        for entries in (self._recorded, *(meter.snapshot() for meter in self.meters)):
            found.merge(entries)
        return found

    def entries(self, event: DpEvent) -> Entries:
        """All that was spent, less steps that are still ahead, if the next steps are of an event."""
        return self.payments.entries(self.history, (self.paid_id, getattr(event, "plan", "")))

    def merge(self, entries: Entries) -> None:
        """Adds what an earlier run counted, each entry once; under a ledger, which has paid for it."""
        self._recorded.merge(entries)
        self.version += 1

    def spend(self, use: Use) -> None:
        """Counts one use of the data that is no step; under a ledger it is paid for, unless it was."""
        self.history.add(use.entry, use.id)  # raises for the id of another expense, before anything is paid
        if not self.payments.has_paid(use):
            self.payments.pay_once(use)
        self._recorded.add(use.entry, use.id)
        self.version += 1

    def has_spent(self, use: Use) -> bool:
        """Whether a use is counted: under a ledger, whether that has paid for it."""
        is_carried = self.payments.ledger is None and self.history.steps_of(use.id) > 0
        return is_carried or self.payments.has_paid(use)

    def refuse(self) -> None:
        """Raises `Unaccounted` if steps were for another unit, not paid for, or without a record."""
        carried = self.history
        self._refuse_other_units(carried)
        if unpaid := self.payments.debts(carried):
            uses = dict.fromkeys(f"'{entry.label}'" for id, entry in carried.items() if id in unpaid and entry.label)
            made = f"{sum(unpaid.values())} steps" + (f" or uses ({', '.join(uses)})" if uses else "")
            raise Unaccounted(
                f"{made} were made that {self.payments.path} has not paid for: the file was deleted, "
                "restored from an older backup, or begun after these steps, or another model made them. Restore the "
                "newest file; or begin the ledger before the first step of a new model."
            )
        missing = sum(meter.undescribed_steps for meter in set(self.meters))
        if missing:
            raise Unaccounted(
                f"The optimizer has made {missing} steps that its privacy history does not describe: weights or "
                "counters were restored without it. Restore with load_model, load_weights or TrainingCheckpoint."
            )

    def _refuse_other_units(self, carried: Entries) -> None:
        # A user may have many rows: what a step costs for one row does not tell what it costs for a user.
        units = {entry.sampling.get("unit") for entry in carried if entry.sampling and not entry.label}
        for unit in units - {self.sampling.unit}:
            raise Unaccounted(
                f"Steps were made for another unit, one {unit}, and this accountant counts for one "
                f"{self.sampling.unit}: what a step costs for the one does not tell what it costs for the other. Train "
                "a model anew with samplings of one unit."
            )

    # Steps that are paid for ahead.

    def pay_ahead(
        self, event: DpEvent, steps: int, most: int, optimizer: Any, block: float = payments.BLOCK
    ) -> int:  # fmt: skip
        """Pays for `steps` next steps of an `event` by `optimizer`; returns how many are paid for.

        They are paid for in blocks of at most `block` steps, which a crash would lose, unless `steps` are more, and at
        most `most`; planned ones as a whole.
        """
        ahead = self.prepaid_steps(event, optimizer, most)
        if isinstance(self.payments, NoPayments) or ahead >= steps:
            return ahead
        if optimizer.correlates_noise:
            self.payments.refuse_superseded(optimizer.training_id, optimizer.state_id)
        if not self._pays_for(event, optimizer):
            self.give_back_rest()  # steps of another price, or of another optimizer, are under an id of their own
        # Payments are durable, so they are made in blocks: one sync of the disk for many steps.
        wanted = max(steps, int(min(payments.BLOCK, block, most)))
        self._open = self.payments.pay_steps(event, wanted - ahead, self.paid_id), event
        self._payee = optimizer.privacy_history
        return min(most, self._steps_ahead(self.payments))

    def prepaid_steps(self, event: DpEvent, optimizer: Any, most: int) -> int:
        """Number of next steps of an optimizer, at most `most`, that are paid for; all of them without a ledger."""
        if isinstance(self.payments, NoPayments):
            return most
        return min(most, self._steps_ahead(self.payments)) if self._pays_for(event, optimizer) else 0

    def _pays_for(self, event: DpEvent, optimizer: Any) -> bool:
        # Whether what is paid ahead is for the next steps of an optimizer, at an event.
        meter = optimizer.privacy_history
        return meter is self._payee and self._open == (meter.id_of(self.sampling.name), event)

    @property
    def paid_id(self) -> str:
        """Id of the steps that are paid for and not all made; empty if there are none."""
        return self._open[0] if self._open else ""

    def _steps_ahead(self, paid: Payments) -> int:
        # Number of steps that are paid for and not made yet.
        return max(0, paid.steps_of(self.paid_id) - self.history.steps_of(self.paid_id)) if self._open else 0

    def give_back_rest(self) -> None:
        """Gives back the steps that were paid for in the ledger and will not be made."""
        if self._open is None or isinstance(self.payments, NoPayments):
            return
        if left := self._steps_ahead(self.payments):
            for meter in self.meters:  # also within a fit: no step that is not paid for
                meter.stop()
            self.payments.give_back(self.paid_id, left)
        self._open = None
        self.version += 1


def _meter_of(model: Any) -> Any:
    return getattr(model, "privacy_history", None) or getattr(
        getattr(model, "optimizer", None), "privacy_history", None
    )
