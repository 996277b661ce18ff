"""One person's device in federated training: its data, its own terms, and the ledger that it pays in.

    a round is asked for -> terms: method, least noise -> labels drawn once, paid -> round paid -> local update

What the server wishes (mechanism, noise) is checked against the node's own configuration, and every wish that is
granted is written into the ledger with the settings that it was granted with: a later round at other settings changes
nothing of what was spent. Every release of the history is taken to tell of every click, and a label of its own click,
so that a click that is a label today and history tomorrow pays for both.

Whether a round is answered depends on the settings, on the ledger, and on how many clicks there are: never on what
they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent
from numpy.typing import NDArray

from tfdp_rec.federated.cohort import Client
from tfdp_rec.federated.labels import LabelPermutation
from tfdp_rec.federated.local import LocalUpdate
from tfdp_rec.noise import words
from tfdp_rec.privacy.profiles import composed_epsilon, releases_of
from tfdp_rec.spending.ledger import REPLACE, Ledger
from tfdp_rec.spending.ledger_lines import Payment, Snapshot

UNIT, DATA = "click", Snapshot(None, "clicks that one person trains with")


class Refused(RuntimeError):
    """The device does not take part: in its own log the reason, to the server none."""


class BudgetSpent(Refused):
    """Another release would cost more than the person allows."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """What one device allows, whatever a server asks for.

    Args:
        ledger: Path of its training ledger, in a folder that exists.
        budget_epsilon: The most that training may cost in all, per click.
        budget_delta: δ at which that is measured.
        methods: Local updates that it computes.
        round_epsilon: The most that one round may cost by itself: the least noise.

    Raises:
        ValueError: On a value out of range.

    Example:
        >>> Terms.of_node({"ledger": "mine.jsonl", "budget-epsilon": 8, "methods": "private private+user"}).methods
        ('private', 'private+user')
    """

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
    def of_node(cls, config: Mapping[str, Any]) -> Terms:
        """The terms in a node's own configuration.

        Raises:
            ValueError: If it names no ledger or no budget: such a node takes part in nothing.
        """
        missing = [key for key in ("ledger", "budget-epsilon") if key not in config]
        if missing:
            raise ValueError(
                f"The node's configuration lacks {' and '.join(missing)}: a device that has not been told what it may "
                "spend, and where to count it, takes part in nothing. Give --node-config both."
            )
        given = {name: float(config[key]) for name, key in _NUMBERS.items() if key in config}
        if "methods" in config:
            given["methods"] = tuple(str(config["methods"]).split())  # type: ignore[assignment]
        return cls(ledger=Path(str(config["ledger"])), **given)  # type: ignore[arg-type]


_NUMBERS = {"budget_epsilon": "budget-epsilon", "budget_delta": "budget-delta", "round_epsilon": "round-epsilon"}


@dataclasses.dataclass
class Participant:
    """One client as the apps see it.

    Args:
        update: What it computes.
        data: Its private data.
        terms: What it allows.
        method: What the server calls the update.
        client_rate: Client learning rate.
        source: Randomness of the labels.
    """

    update: LocalUpdate
    data: Client
    terms: Terms
    method: str = "private"
    client_rate: float = 1.0
    source: words.WordSource = words.os_entropy

    def pay_round(self) -> None:
        """Writes one more round down, and the labels that it needs and that were never drawn.

        Raises:
            Refused: The terms do not allow it; nothing is written then.
        """
        if self.method not in self.terms.methods:
            raise Refused(
                f"The server asks for method {self.method}, and this node computes {', '.join(self.terms.methods)} "
                "alone."
            )
        with Ledger(self.terms.ledger, UNIT, DATA, REPLACE) as ledger:
            kept = _kept_labels(ledger)
            needed = self._labels_needed(kept)
            payments = [*self._payment_for_labels(needed), *self._payment_for_round()]
            self._refuse_dear(payments)
            self._refuse_overspending(ledger, payments)
            for payment in payments:
                if payment.about is not None:
                    payment = dataclasses.replace(payment, settings={**payment.settings, "labels": self._drawn(needed)})
                ledger.pay(**vars(payment))
            self.data = self._with_labels(_kept_labels(ledger))

    # Labels: drawn once, kept with their candidates.

    @property
    def _keeps_labels(self) -> bool:
        mine = self.update.label_event is not None and isinstance(self.update.labels, LabelPermutation)
        return mine and self.data.label_epsilon is None

    def _labels_needed(self, kept: Mapping[tuple[int, ...], list[int]]) -> list[int]:
        """Which training clicks have no label: in each list of candidates those after the last that has one."""
        if not self._keeps_labels:
            return []
        seen: Counter[tuple[int, ...]] = Counter()
        needed = []
        for index, (shown, click) in enumerate(self.data.clicks):
            if self.data.protects(shown[click]) and len(shown) > 1:
                seen[shown] += 1
                if seen[shown] > len(kept.get(shown, ())):
                    needed.append(index)
        return needed

    def _drawn(self, needed: list[int]) -> list[dict[str, Any]]:
        clicks = [self.data.clicks[index] for index in needed]
        return [
            {"candidates": list(shown), "position": int(self.update.labels.sample(len(shown), click, self.source)[0])}
            for shown, click in clicks
        ]

    def _with_labels(self, kept: Mapping[tuple[int, ...], list[int]]) -> Client:
        if not self._keeps_labels:
            return self.data
        left = {shown: list(positions) for shown, positions in kept.items()}
        clicks = tuple(
            (shown, left[shown].pop(0) if self.data.protects(shown[click]) and len(shown) > 1 else click)
            for shown, click in self.data.clicks
        )
        return dataclasses.replace(self.data, clicks=clicks, label_epsilon=0.0)

    # What it costs.

    def _payment_for_labels(self, needed: list[int]) -> list[Payment]:
        """One payment: a click is drawn once in it. Clicks on the same candidates cannot be told apart: all pay."""
        if not needed or self.update.label_event is None:
            return []
        items = sorted({_item(self.data.clicks[index][0]) for index in needed})
        return [Payment(self.update.label_event, 1, "labels", self.update.settings(), about=tuple(items))]

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
        cost = composed_epsilon(releases_of(event), self.terms.budget_delta)
        if cost > self.terms.round_epsilon:
            raise Refused(
                f"A round would cost epsilon = {cost:.3g}, and this node's round-epsilon is "
                f"{self.terms.round_epsilon:.3g}."
            )

    def _refuse_overspending(self, ledger: Ledger, payments: list[Payment]) -> None:
        if self.terms.budget_epsilon == float("inf"):
            return
        total = ledger.epsilon(self.terms.budget_delta, more=payments)
        if total > self.terms.budget_epsilon:
            raise BudgetSpent(
                f"Another round would bring epsilon to {total:.3g}, above the budget of "
                f"{self.terms.budget_epsilon:.3g}."
            )

    def step(self, weights: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """One local update: the server's weights in, this client's out. Numbers that are not finite count as no change.

        Raises:
            ValueError: The weights are not of the model's shapes.
        """
        variables = self.update.model.trainable_variables
        if [tuple(np.shape(value)) for value in weights] != [tuple(variable.shape) for variable in variables]:
            raise ValueError("The weights of this round are not of the model's shapes: the run is of another model.")
        for variable, value in zip(variables, weights):
            variable.assign(value)
        gradients, _ = self.update.gradients(self.update.draw([self.data]))
        return [
            w - self.client_rate * np.where(np.isfinite(g), g, 0.0).astype(g.dtype) for w, g in zip(weights, gradients)
        ]


def _kept_labels(ledger: Ledger) -> dict[tuple[int, ...], list[int]]:
    """The private labels that were ever drawn, under the candidates that were shown, in order."""
    kept: dict[tuple[int, ...], list[int]] = {}
    for paid in ledger.paid:
        for label in paid.settings.get("labels", ()):
            kept.setdefault(tuple(label["candidates"]), []).append(int(label["position"]))
    return kept


def _item(shown: tuple[int, ...]) -> str:
    return "label " + hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]
