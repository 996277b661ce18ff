"""Private sums: `SpectralRecommender` on the training users' histories. They are made once, and paid for before the log
is looked at for them; their noise is what the budget leaves over when items are found. A training upon sums has sums of
its own, in order and without features, and leaves a part of the budget to its steps.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tfdp_rec.core.claim.statement import Statement, round_up
from tfdp_rec.job.budget import LABELS, PRETRAINING_SUMS, SUMS, release_file
from tfdp_rec.job.evaluation import Scores
from tfdp_rec.job.recommenders.names import UPON_SUMS, spectral
from tfdp_rec.job.run_state import Job, MadeRecommender, Material, ReleasePayment
from tfdp_rec.job.users import subset_of
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.spectral.rules import MOST_HEAD

_EXACT_HEAD = 3000  # items that the peer without noise has rows for; dense algebra on more takes minutes
_HARDLY = 1e-3  # its noise


def file_bytes(items: int, features: int) -> int:
    """What a file of the sums takes at most: two square arrays of the head, and a few numbers an item and a feature."""
    return 8 * min(items, MOST_HEAD) ** 2 + 80 * items + 8 * features + 2**20


def release(
    job: Job, log: Any, users: Any, file: str, features: list[list[str]] | None,
    users_private: bool,
) -> SpectralRecommender:  # fmt: skip
    """The private sums of some users, made now or taken from their file: of spectral, or for a training upon them."""
    state, settings, is_pretraining = job.state, job.settings, file == PRETRAINING_SUMS
    order = True if is_pretraining else _does_order_count(job)
    readings = 2 if order is not None or state.earlier else 3
    whose = "users with a seat" if users_private else f"{len(job.users.train):,} users"
    what = "private sums to train upon," if is_pretraining else "private sums"
    job.show.begin(f"making {what} of {whose}: {readings} readings, then minutes of algebra for many items")
    before = state.earlier.release.faded(settings.keep) if state.earlier and state.earlier.release else None
    unfitted = SpectralRecommender(
        log.catalogue.ids, None, job.budget.delta, noise_multiplier=job.budget.noise(file), ordered=order,
        recency=settings.recency, before=before, features=None if is_pretraining else features,
        users_private=users_private,
    )  # fmt: skip
    subset = subset_of(log, users, functools.partial(job.show.count, "users read", readings * len(log)))

    def make(payment: ReleasePayment, opened: Any) -> None:
        payment.spend(unfitted.event, LABELS[file])
        # It would print how many items its head has, which depends on what it drew; until it is kept, nothing may.
        unfitted.release_sums(subset, verbose=0)
        unfitted.released = dataclasses.replace(unfitted.released, of_run=True)
        unfitted.write(opened)  # before minutes of algebra that hear no signal: `load` does it

    most = file_bytes(log.num_items, job.features.num_rows)
    payers = [name for name in (spectral.name, *UPON_SUMS) if release_file(name) == file]
    sums = state.release(file, payers, most, make, SpectralRecommender.load)
    job.show.note(f"pairs of {len(sums.released.head):,} items were counted: {sums.pairs_words}")
    return sums


def _does_order_count(job: Job) -> bool | None:
    """Whether order counts in private sums; None if they are to decide it."""
    return {"auto": None if job.log.ordered else False, "yes": True, "no": False}[job.settings.order]


def make_without_noise(job: Job, material: Material) -> MadeRecommender:
    """The same arithmetic on the same users, as good as exact: no privacy."""
    log, private = material.log, material.releases.get(SUMS)
    peer = SpectralRecommender(
        log.catalogue.ids, None, job.budget.delta, noise_multiplier=_HARDLY, head=min(_EXACT_HEAD, log.num_items),
        ordered=_does_order_count(job) if private is None else private.ordered, recency=job.settings.recency,
        features=material.features,
    )  # fmt: skip
    peer.fit(subset_of(log, job.users.train), verbose=0)
    return MadeRecommender(peer, scores_of(peer))


def make(job: Job, sums: SpectralRecommender, name: str = spectral.name) -> MadeRecommender:
    """The private recommender and what it cost, by its ledger."""
    spent, noise = job.state.ledgers[name].epsilon(job.budget.delta), job.budget.noise(str(release_file(name)))
    return MadeRecommender(sums, scores_of(sums), spent, statement(job, spent, sums), noise)


def scores_of(recommender: SpectralRecommender) -> Scores:
    """Scores for contexts of item numbers."""
    return lambda context: recommender.scores([items[items > 0] for items in context])


def statement(job: Job, spent: float, sums: SpectralRecommender) -> Statement:
    """The guarantee of all days so far."""
    budget, several = job.budget, job.budget.days > 1
    figures = ""
    if budget.metrics_noise is not None:
        figures = f"; and figures of held-out users with Gaussian noise of multiplier {budget.metrics_noise:.4g}"
    nearly = ", nearly" if sums.users_private else ""
    items = f"the {len(sums.catalogue)} items are a public list"
    if budget.items is not None:
        items = (
            f"which {len(sums.catalogue)} items many users have, by itself epsilon = {budget.items[0]:.4g} "
            f"and delta = {budget.items[1]:.3g}{' a day' * several}, in three rounds of a weighted Gaussian with a "
            "threshold"
        )
    return Statement({
        "Guarantee": f"(epsilon = {round_up(spent):g}, delta = {budget.delta:g})-differential privacy",
        **budget.days_field(sums.released.fits, is_trained=False),
        "Protected unit": f"one user of the log, with all of their rows{' of all days' * several}",
        "Adjacency": "zero-out: logs that differ by one user, which contributes nothing in one of them",
        "Mechanism": f"{items}; then {sums.counted_users}counts of these with Gaussian noise of multiplier "
        f"{sums.split.counts:.4g}, and pairs of the {len(sums.released.head)} that these put first, of "
        f"multiplier {sums.split.gram:.4g}, over {sums.num_users} users{nearly}{figures}",
        "Pairs": sums.pairs_words,
        "Public": budget.public_numbers(len(job.log)) + "; features of the items" * sums.has_features,
        "Covers": "the folder release/: servable/ and all that it answers, the list of items in it, released.npz, "
        "ledger.jsonl, card.md and this statement",
        "Does not cover": "the folder private/, with the names of the log's files and, of a run with --confidential, "
        "exact figures of users' data; another run on the same users, which costs as much again; people with several "
        "user ids; what is asked of the served model",
    })  # fmt: skip
