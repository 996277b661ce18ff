"""The best of several runs of one plan: the event of its release, and what a run may have spent.

    drawn: the number of runs, and what sets each apart  ->  paid for  ->  runs, none of which is released  ->  the best

A run makes at most the plan's steps, and nothing else with the data, but one Gaussian release of its score. The model
of the best run then tells the price of all runs, in place of its own steps, which that price contains.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.entries import Use
from tfdp_rec.core.claim.schemes import Sampling
from tfdp_rec.core.ground.refused import NotPrivate


@dataclasses.dataclass(frozen=True)
class BestRun:
    """The release of the best of several runs, each of `steps` steps of an event, and of a score."""

    sampling: Sampling
    step: DpEvent
    steps: int
    score_noise: float  # noise multiplier of the score's release
    mean: float  # number of runs
    shape: float
    id: str
    _made: set[str] = dataclasses.field(default_factory=set)  # entries of the runs so far

    def contain(self, trained: DpEvent) -> DpEvent:
        """The event of the release of the best run, from that of a run's steps."""
        run = ComposedDpEvent([trained, GaussianDpEvent(self.score_noise)])
        return RepeatAndSelectDpEvent(run, self.mean, self.shape)

    @property
    def use(self) -> Use:
        """The release as one use of the data."""
        event = self.contain(self.sampling.compose_history([(self.step, self.steps)]))
        return Use(event, "the best of several trainings", self.id)

    def release(self, model: Any) -> None:
        """Has the model of the best run tell the price of all runs."""
        model.privacy_history.tell_instead(self.use)

    def refuse_other(self, model: Any, accountant: Accountant) -> None:
        """Raises if a run, of which this is the model and the accountant, has spent anything but its steps."""
        accountant.follow(model)
        accountant.spending.refuse()
        entries, planned = accountant.spending.history, (self.step, self.sampling.get_state())
        others = [each for each in entries if (each.event, each.sampling) != planned or each.void or each.label]
        others += [each for id, each in entries.items() if id in self._made]
        self._made.update(id for id, _ in entries.items())
        if others or not 0 < entries.steps <= self.steps:
            spent = ", ".join(dict.fromkeys(each.label or each.void or f"{each.steps} steps" for each in entries))
            raise NotPrivate(
                f"A run must train a new model with its plan's optimizer on its plan's batches, for at most "
                f"{self.steps} steps, and use the data for nothing else; this model has spent: {spent or 'nothing'}."
            )
