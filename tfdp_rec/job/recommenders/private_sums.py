"""Private sums: `SpectralRecommender` on the training users' histories. They are made once, and paid for before the log
is looked at for them; their noise is what the budget leaves over when items are found. A training upon sums has sums of
its own, in order and without features, and leaves a part of the budget to its steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp_rec.core.claim.statement import Statement, rounded_up
from tfdp_rec.job.budget import LABELS, SUMS, UPON
from tfdp_rec.job.checkpoint import ReleasePayment
from tfdp_rec.job.evaluation import Scores
from tfdp_rec.job.recommenders.names import spectral, upon_sums
from tfdp_rec.job.run import MadeRecommender, Run, UserSubset
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.spectral.rules import MOST_HEAD

_EXACT_HEAD = 3000  # items that the peer without noise has rows for; dense algebra on more takes minutes
_HARDLY = 1e-3  # its noise


def file_bytes(items: int, features: int) -> int:
    """What a file of the sums takes at most: two square arrays of the head, and a few numbers an item and a feature."""
    return 8 * min(items, MOST_HEAD) ** 2 + 80 * items + 8 * features + 2**20


def released(run: Run, users: UserSubset, upon: bool = False) -> SpectralRecommender:
    """The private sums of the training users, made now or taken from their file; `upon` for a training upon them."""
    file_name, payer = (UPON, upon_sums.name) if upon else (SUMS, spectral.name)
    noise, features = (run.budget.sums_upon, None) if upon else (run.budget.sums, run.item_features)
    earlier = run.checkpoint.earlier
    before = earlier.release.faded(run.settings.keep) if earlier and earlier.release else None
    unfitted = SpectralRecommender(
        run.log.catalogue.ids, None, run.delta, noise_multiplier=noise, ordered=True if upon else run.order,
        recency=run.settings.recency, before=before, features=features,
        users_private=run.seats is not None,
    )  # fmt: skip

    def make(payment: ReleasePayment, file: Any) -> None:
        payment.spend(unfitted.event, LABELS[file_name])
        # It would print how many items its head has, which depends on what it drew; until it is kept, nothing may.
        unfitted.release_sums(users, verbose=0)
        unfitted.released = dataclasses.replace(unfitted.released, of_run=True)
        unfitted.write(file)  # before minutes of algebra that hear no signal: `load` does it

    most = file_bytes(run.log.num_items, run.features.num_rows)
    return run.checkpoint.release(file_name, [payer], most, make, SpectralRecommender.load)


def without_noise(run: Run, private: SpectralRecommender | None) -> MadeRecommender:
    """The same arithmetic on the same users, as good as exact: no privacy."""
    head = min(_EXACT_HEAD, run.log.num_items)
    ordered = run.order if private is None else private.ordered
    peer = SpectralRecommender(
        run.log.catalogue.ids, None, run.delta, noise_multiplier=_HARDLY, head=head, ordered=ordered,
        recency=run.settings.recency, features=run.item_features,
    )  # fmt: skip
    peer.fit(UserSubset(run.log, run.users.train), verbose=0)
    return MadeRecommender(peer, scores(peer))


def made(run: Run, recommender: SpectralRecommender) -> MadeRecommender:
    """The private recommender and what it cost, by its ledger."""
    spent = run.ledger(spectral.name).epsilon(run.delta)
    return MadeRecommender(recommender, scores(recommender), spent, statement(run, spent, recommender), run.budget.sums)


def scores(recommender: SpectralRecommender) -> Scores:
    """Scores for contexts of item numbers."""
    return lambda context: recommender.scores([items[items > 0] for items in context])


def statement(run: Run, spent: float, recommender: SpectralRecommender) -> Statement:
    """The guarantee of all days so far."""
    budget, several = run.budget, run.budget.days > 1
    nearly = ", nearly" if recommender.users_private else ""
    day, items = recommender.released.fits, f"the {len(recommender.catalogue)} items are a public list"
    if budget.items is not None:
        items = (
            f"which {len(recommender.catalogue)} items many users have, by itself epsilon = {budget.items[0]:.4g} "
            f"and delta = {budget.items[1]:.3g}{' a day' * several}, in three rounds of a weighted Gaussian with a "
            "threshold"
        )
    return Statement({
        "Guarantee": f"(epsilon = {rounded_up(spent):g}, delta = {run.delta:g})-differential privacy",
        **run.days_field(day),
        "Protected unit": f"one user of the log, with all of their rows{' of all days' * several}",
        "Adjacency": "zero-out: logs that differ by one user, which contributes nothing in one of them",
        "Mechanism": f"{items}; then {recommender.counted_users}counts of these with Gaussian noise of multiplier "
        f"{recommender.split.counts:.4g}, and pairs of the {len(recommender.released.head)} that these put first, of "
        f"multiplier {recommender.split.gram:.4g}, over {recommender.num_users} users{nearly}",
        "Pairs": recommender.pairs_words,
        "Public": run.public_numbers + "; features of the items" * (run.item_features is not None),
        "Covers": "the folder release/: servable/ and all that it answers, the list of items in it, released.npz, "
        "ledger.jsonl, card.md and this statement",
        "Does not cover": "the folder private/: the report and results, whose tests look at users' data, and the names "
        "of the log's files; another run on the same users, which costs as much again; people with several user ids; "
        "what is asked of the served model",
    })  # fmt: skip
