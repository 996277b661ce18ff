"""One person's device in federated training: its data, its own terms, and the ledger that it pays in.

    weights come in -> their shapes -> terms: method, least noise, budget -> labels drawn once -> paid -> local update

What the server wishes (mechanism, noise) is checked against the node's own configuration, and every wish that is
granted is written into the ledger with the settings that it was granted with: a later round at other settings changes
nothing of what was spent. Every release of the history counts for every click, and a label's draw of every
click on a news among its candidates: by the ids that the device keeps, whatever rows they have in today's catalogue. So
a click that is a label today and history tomorrow pays for both, and candidates that overlap pay together.

Whether a round is answered depends on the settings, on the ledger, and on how many clicks there are: never on what
they are, and never on what the catalogue holds.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.claim.events import ComposedDpEvent, DpEvent
from tfdp_rec.core.claim.ledger import BrokenLedger, Ledger, Mark, Payment, Snapshot
from tfdp_rec.core.claim.profiles import epsilon_of_releases, releases_of
from tfdp_rec.core.ground.files import open_atomically
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated import accounting
from tfdp_rec.federated.cohort import Client
from tfdp_rec.federated.local import LocalUpdate
from tfdp_rec.sums.fixed_point import event_with

DATA = Snapshot(None, "clicks that one person trains with")

Labels = dict[tuple[str, ...], list[str]]  # candidates, sorted -> the private labels drawn among them, in order


class Refused(RuntimeError):
    """The device does not take part: in its own log the reason, to the server none."""


class BudgetSpent(Refused):
    """Another release would cost more than the person allows."""


@dataclasses.dataclass(frozen=True)
class DeviceTerms:
    """What one device allows, whatever a server asks for."""

    ledger: Path
    budget_epsilon: float
    budget_delta: float = 1e-5
    methods: tuple[str, ...] = ("private",)
    round_epsilon: float = float("inf")

    def __post_init__(self) -> None:
        if not (self.budget_epsilon > 0 and self.round_epsilon > 0):
            raise ValueError(
                f"budget-epsilon and round-epsilon must be positive, got {self.budget_epsilon} and "
                f"{self.round_epsilon}."
            )
        if not 0 <= self.budget_delta < 1:
            raise ValueError(f"budget-delta must be in [0, 1), got {self.budget_delta}.")

    @classmethod
    def from_node(cls, config: Mapping[str, Any]) -> DeviceTerms:
        """The terms in a node's own configuration; a node without ledger or budget is refused."""
        missing = [key for key in ("ledger", "budget-epsilon") if key not in config]
        if missing:
            raise ValueError(
                f"The node's configuration lacks {' and '.join(missing)}: a device that has not been told what it may "
                "spend, and where to count it, takes part in nothing. Give --node-config both."
            )
        numbers = ("budget-epsilon", "budget-delta", "round-epsilon")
        given: dict[str, Any] = {key.replace("-", "_"): float(config[key]) for key in numbers if key in config}
        if "methods" in config:
            given["methods"] = tuple(str(config["methods"]).split())
        return cls(ledger=Path(str(config["ledger"])), **given)


@dataclasses.dataclass
class Participant:
    """One client as the apps see it."""

    update: LocalUpdate
    data: Client
    terms: DeviceTerms
    method: str = "private"
    source: words.WordSource = words.os_entropy
    person: str = ""  # whose data they are, of a folder that holds several people's

    def answer(self, weights: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """One round, paid for first: the server's weights in, this client's out. What is no number is no change."""
        variables = self.update.model.trainable_variables
        numbers = all(np.issubdtype(np.asarray(value).dtype, np.floating) for value in weights)
        if not numbers or [np.shape(value) for value in weights] != [tuple(variable.shape) for variable in variables]:
            raise Refused("The weights of this round are not of the model's shapes: the run is of another model.")
        self.pay_round()
        for variable, value in zip(variables, weights):
            variable.assign(value)
        gradients, _ = self.update.gradients(self.update.draw([self.data]))
        return [w - np.where(np.isfinite(g), g, 0.0).astype(g.dtype) for w, g in zip(weights, gradients)]

    def pay_round(self) -> None:
        """Writes one more round down, and the labels that it needs and that were never drawn."""
        if self.method not in self.terms.methods:
            raise Refused(
                f"The server asks for method {self.method}, and this node computes {', '.join(self.terms.methods)} "
                "alone."
            )
        mark = _mark(self._mark_path)
        with accounting.open_ledger(self.terms.ledger, DATA, mark) as ledger:
            if mark is None:
                self._remember(ledger)
            accounting.keep_to(ledger, self.person)
            needed = self._find_missing_labels(_read_labels(ledger))
            private = [*self._payment_for_labels(needed), *self._payment_for_round()]
            payments = [*accounting.exact_payments(ledger, self.data.exact), *private]
            self._refuse_dear(private)
            self._refuse_overspending(ledger, payments)
            for payment in payments:
                if payment.label == "labels":
                    settings = {**payment.settings, "labels": self._draw_labels(needed)}
                    payment = dataclasses.replace(payment, settings=settings)
                ledger.pay(**vars(payment))
            self._remember(ledger)
            self.data = self._add_labels(_read_labels(ledger))

    @property
    def _mark_path(self) -> str:
        """Path of what the device remembers of its ledger."""
        return f"{self.terms.ledger}.mark"

    def _remember(self, ledger: Ledger) -> None:
        with open_atomically(self._mark_path, private=True) as file:
            json.dump(dataclasses.asdict(ledger.mark), file)

    # Labels: drawn once, kept with the ids of their candidates.

    @property
    def _keeps_labels(self) -> bool:
        return self.update.label_event is not None and self.data.label_epsilon is None

    def _find_missing_labels(self, kept: Labels) -> list[int]:
        """Which training clicks have no label: among the same candidates those after the last that has one."""
        if not self._keeps_labels:
            return []
        seen: Counter[tuple[str, ...]] = Counter()
        needed = []
        for index, (shown, click) in enumerate(self.data.clicks):
            if self.data.is_secret(shown, click):
                seen[_question(shown)] += 1
                if seen[_question(shown)] > len(kept.get(_question(shown), ())):
                    needed.append(index)
        return needed

    def _draw_labels(self, needed: list[int]) -> list[dict[str, Any]]:
        clicks = [self.data.clicks[index] for index in needed]
        return [
            {"candidates": shown, "label": shown[int(self.update.labels.sample(len(shown), click, self.source)[0])]}
            for shown, click in clicks
        ]

    def _add_labels(self, kept: Labels) -> Client:
        if not self._keeps_labels:
            return self.data
        left = {question: list(labels) for question, labels in kept.items()}
        clicks = tuple(
            (shown, shown.index(left[_question(shown)].pop(0)) if self.data.is_secret(shown, click) else click)
            for shown, click in self.data.clicks
        )
        return dataclasses.replace(self.data, clicks=clicks, label_epsilon=0.0)

    # What it costs.

    def _payment_for_labels(self, needed: list[int]) -> list[Payment]:
        """One payment: it draws no click twice. It counts for any click on a candidate of one of its draws."""
        if not needed or self.update.label_event is None:
            return []
        items = sorted({news for index in needed for news in self.data.clicks[index][0]})
        event = event_with(self.source, self.update.label_event)
        return [Payment(event, 1, "labels", self.update.settings(), about=tuple(items))]

    def _payment_for_round(self) -> list[Payment]:
        events = list(self.update.round_events(self.data))
        if self.update.label_event is not None and not self._keeps_labels and self.data.spends_on_labels:
            events.append(self.update.label_event)  # drawn anew in every round
        if not events:
            return []
        event: DpEvent = events[0] if len(events) == 1 else ComposedDpEvent(events)
        return [Payment(event, 1, "round", self.update.settings())]

    def _refuse_dear(self, payments: list[Payment]) -> None:
        """What a round and the labels with it may cost by themselves."""
        if self.terms.round_epsilon == float("inf"):
            return
        event = ComposedDpEvent([payment.event for payment in payments])
        cost = epsilon_of_releases(releases_of(event), self.terms.budget_delta)
        if not cost <= self.terms.round_epsilon:
            raise Refused(
                f"A round would cost epsilon = {cost:.3g}, and this node's round-epsilon is "
                f"{self.terms.round_epsilon:.3g}."
            )

    def _refuse_overspending(self, ledger: Ledger, payments: list[Payment]) -> None:
        if self.terms.budget_epsilon == float("inf"):
            return
        total = accounting.epsilon([*ledger.paid, *payments], self.terms.budget_delta, self.data.declared)
        if not total <= self.terms.budget_epsilon:
            raise BudgetSpent(
                f"Another round would bring epsilon to {total:.3g}, above the budget of "
                f"{self.terms.budget_epsilon:.3g}."
            )


def _question(shown: tuple[str, ...]) -> tuple[str, ...]:
    """What a label answers, in whatever order the candidates stand."""
    return tuple(sorted(shown))


def _read_labels(ledger: Ledger) -> Labels:
    """The private labels that were ever drawn."""
    kept: Labels = {}
    for paid in ledger.paid:
        for drawn in paid.settings.get("labels", ()):
            kept.setdefault(_question(tuple(drawn["candidates"])), []).append(drawn["label"])
    return kept


def _mark(path: str) -> Mark | None:
    """What the device remembers of its ledger; None if it never paid."""
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return Mark(**json.load(file))
    except (ValueError, TypeError) as problem:
        raise BrokenLedger(f"{path} holds no mark of a ledger: restore it from where its ledger is kept.") from problem
