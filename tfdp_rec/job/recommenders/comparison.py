"""`--mechanism auto`: private sums, or a model that was trained upon them, as held-out users choose.

    public numbers say that training cannot gain  →  private sums with the whole budget, and nothing else
    otherwise   sums with 0.98 of σ⁻²  →  steps upon them  →  the choice, which was paid for before the steps
                the trained model leaves if recall@10, added up over m compared users, grew by 2√(σ² + m/10)

The compared users are a quarter of those held out, by a hash of their ids: no sum and no step has them, and no test.
So the sums are of as many users as alone, and their noise is 1% larger: that is what a training that does not gain has
cost. The growth depends on which users happen to be compared, too: by that its variance is m/10, if the models differ
on a tenth of them. An example is chosen by its user's own rows and a hash of the own id: no user moves another's value.

**After a kill.** The ledger has a note before the users are asked, and another with the choice before anything depends
on it. If it has the first and not the second, the sums are released, and no user is asked again.

**When training can gain** (`_LEAST_USERS`): what it learns grows with n/σ, n the users and σ the noise of one release
of the whole budget. docs/sequences.md has what was measured.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.job.evaluation import Evaluation, NewItemExamples, users_at_once
from tfdp_rec.job.recommenders import names, private_sums
from tfdp_rec.job.run_state import Job, MadeRecommender, Material
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.users import TRAIN
from tfdp_rec.sums.private_comparison import LABEL, private_comparison

CHOICE, _BEGUN = "choice of held-out units", "held-out units about to be compared"
WHY_SUMS = (
    "Nothing was trained: by its public numbers (too few users for this ε, no order, or features of items) the log is "
    "one on which training upon sums gained nothing, and the sums have the whole budget."
)
_LEAST_USERS = 10_000  # for σ = 1
_K = 10
_DIFFER = 0.1  # share of users on whom the two may differ


def resolve(settings: JobSettings, users: int, delta: float, ordered: bool) -> JobSettings:
    """The settings, with private sums in place of auto where public numbers say that training cannot gain."""
    few = TRAIN * users < _LEAST_USERS * noise_of_one_release(settings.epsilon, delta)
    if not few and ordered and settings.order != "no" and not settings.features:
        return settings
    chosen = (names.spectral.name if name == names.auto.name else name for name in settings.mechanism)
    export = names.spectral.name if settings.export == names.auto.name else settings.export
    return dataclasses.replace(settings, mechanism=tuple(dict.fromkeys(chosen)), export=export)


def pay(job: Job) -> None:
    """Pays for the choice, once."""
    if LABEL not in [paid.label for paid in job.state.ledgers[names.auto.name].paid]:
        job.state.ledgers[names.auto.name].pay(job.budget.comparison, label=LABEL, settings={"sampling": None})


def choose(job: Job, material: Material, sums: Any, trained: MadeRecommender) -> MadeRecommender:
    """What leaves: the trained model, or the sums that it began with."""
    ledger, users = job.state.ledgers[names.auto.name], material.users.compared
    start = dataclasses.replace(trained, model=sums, scores=private_sums.scores_of(sums))
    if not ledger.notes(CHOICE) and ledger.notes(_BEGUN) or not len(users):
        ledger.note(CHOICE, {"end_is_better": False})
    if not ledger.notes(CHOICE):
        ledger.note(_BEGUN, {})
        tests = Evaluation(_ByOwnRows(material.log, users), job.settings.seed, users_at_once(material.log.num_items))
        noise = job.budget.comparison.noise_multiplier
        found = private_comparison(
            users, lambda: tests.ranks(start.scores) < _K, lambda: tests.ranks(trained.scores) < _K,
            noise_multiplier=noise, threshold=2.0 * math.hypot(noise, (_DIFFER * len(users)) ** 0.5),
        )  # fmt: skip
        ledger.note(CHOICE, {name: value for name, value in found._asdict().items() if name != "event"})
    return trained if ledger.notes(CHOICE)[0]["end_is_better"] else start


def words(job: Job) -> str:
    """What was compared, on whom, and what leaves."""
    choice, users = job.state.ledgers[names.auto.name].notes(CHOICE)[0], len(job.users.compared)
    asked = f"{users} users by a hash of their ids, of whom no sum and no step is"
    left = "the trained model" if choice["end_is_better"] else "the private sums alone; the steps stay paid for"
    if "gain" not in choice:
        return f"nothing, as the choice was cut off or had no users: what leaves is {left}"
    return (
        f"private sums, and the model trained upon them, on {asked}: recall@{_K} added up over them grew by "
        f"{choice['gain']:.1f}, with Gaussian noise of multiplier {job.budget.comparison.noise_multiplier:.4g}, and "
        f"had to by more than {choice['threshold']:.4g}: what leaves is {left}"
    )


class _ByOwnRows(NewItemExamples):
    """Examples of which no user moves another's; one without an example has a label that is never found."""

    def __init__(self, log: Any, users: NDArray[np.int64]):
        super().__init__(log, users)
        self._draws_of = log.uniforms

    def fixed(self, seed: int = 0) -> dict[str, NDArray[np.int32]]:
        context, label = self.by_own_rows(self._draws_of(f"tfdp-rec compare example {seed}"))
        return {"context": context, "label": np.maximum(label, 0).astype(np.int32)}
