"""Membership attacks on recommenders of MovieLens-100K: python -m experiments.membership u.data

Half of the 943 users are members. Each recommender is made of them, and eight shadows of random halves of all users. A
user's loss is the mean of ln(1 + rank) of ten of their items, each after up to twenty that the user had before it.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np

import tfdp_rec
from tfdp_rec.audit import attack_membership
from tfdp_rec.core.claim.events import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent
from tfdp_rec.data import PoissonSampling
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.next_item import NextItemExamples
from tfdp_rec.job.evaluation import HISTORY, KS, NewItemExamples
from tfdp_rec.job.users import UserSubset
from tfdp_rec.metrics import ranks
from tfdp_rec.models import TwoTower
from tfdp_rec.privacy import attack_limit, noise_of_one_release
from tfdp_rec.spectral import SpectralRecommender

_EPSILON, _DELTA, _BATCH, _STEPS, _WIDTH, _PLACES, _PRIOR_NOISE = 8.0, 1e-4, 128, 200, 32, 10, 5.0


class Study:
    """The users' log, the places at which each is asked about, and the recommenders, by what they are made of."""

    def __init__(self, path: str):
        rows = dict(zip(("user", "item", "stars", "time"), np.loadtxt(path, dtype=np.int64).T))
        del rows["stars"]
        self.log = Interactions.read(rows, user="user", item="item", time="time", items=np.unique(rows["item"]))
        asked = NewItemExamples(self.log, np.arange(len(self.log)))
        draws = np.random.default_rng(1).random((_PLACES, len(self.log)))
        self.asked = [asked.by_own_rows(each) for each in draws]

    def losses_of(self, scores: Any) -> Any:
        """The loss of each user by what gives scores to contexts of item numbers."""
        found = [np.log1p(ranks(np.array(scores(context)), label)) for context, label in self.asked]
        return np.mean(found, axis=0).__getitem__

    def train_two_tower(self, members: np.ndarray, is_private: bool = True, steps: int = _STEPS) -> Any:
        """The main job's two-tower: a popularity prior, then LazyDPSGD, or Adam with exact counts."""
        keras.utils.set_random_seed(0)
        catalogue, users = self.log.catalogue, UserSubset(self.log, members)
        prior = users.exact_counts(catalogue) + 1.0
        sampling = PoissonSampling(len(members), _BATCH, unit="user")
        if is_private:
            prior, paid = users.noisy_popularity(catalogue, _PRIOR_NOISE)
            plan = tfdp_rec.PrivatePlan(
                sampling=sampling, delta=_DELTA, steps=steps, epsilon=_EPSILON, spent=[(paid, "popularity")]
            )
            trained = sampling.compose(GaussianDpEvent(plan.noise_multiplier), steps)
            self.event: DpEvent = ComposedDpEvent([paid, trained])
            rate = 0.8 * _BATCH / (plan.noise_multiplier * (steps * _WIDTH) ** 0.5)
            optimizer: Any = tfdp_rec.LazyDPSGD(rate, plan=plan)
        else:
            optimizer = keras.optimizers.Adam(0.005)
        model: Any = TwoTower(np.arange(1, self.log.num_items + 1), _WIDTH, 64, prior, HISTORY, KS)
        model.compile(optimizer)
        examples = NextItemExamples(self.log, members, HISTORY, 500)
        batches = sampling.batches(examples.fetch, shared=examples.shared, present=examples.present)
        model.fit(batches, steps_per_epoch=steps, callbacks=[plan.budget()] if is_private else [], verbose=0)
        return self.losses_of(model)

    def make_sums(self, members: np.ndarray, noise: float | None = None) -> Any:
        """Private sums of the members, with this noise, or that of ε."""
        noise = noise or noise_of_one_release(_EPSILON, _DELTA)
        made = SpectralRecommender(self.log.catalogue.ids, delta=_DELTA, ordered=True, noise_multiplier=noise)
        made.fit(UserSubset(self.log, members), verbose=0)
        self.event = made.event
        return self.losses_of(lambda context: made.scores([items[items > 0] for items in context]))


def main() -> None:
    """Prints a row of the table for each recommender and attack."""
    parser = argparse.ArgumentParser(prog="python -m experiments.membership", description=__doc__)
    parser.add_argument("ratings", metavar="u.data", help="MovieLens-100K's ratings")
    study = Study(parser.parse_args().ratings)
    members, others = np.array_split(np.random.default_rng(0).permutation(len(study.log)), 2)
    made = {
        "two-tower, ε = 8": study.train_two_tower,
        "two-tower, Adam": lambda units: study.train_two_tower(units, is_private=False, steps=5 * _STEPS),
        "private sums, ε = 8": study.make_sums,
        "sums without noise": lambda units: study.make_sums(units, noise=1e-3),
    }
    for name, train in made.items():
        study.event = NonPrivateDpEvent()
        found = attack_membership(train(members), members, others, train=train, limit=attack_limit(study.event), seed=0)
        for attack, result in found.items():
            cells = [f"{each.value:.3f} ({each.low:.3f}–{each.high:.3f})" for each in result.true_positives.values()]
            most = [f"{each.most:.3f}" for each in (*result.true_positives.values(), result.auc)]
            auc = f"{result.auc.value:.3f} ({result.auc.low:.3f}–{result.auc.high:.3f})"
            print(f"| {name}: {attack} | {' | '.join(cells)} | {auc} | {', '.join(most)} |", flush=True)


if __name__ == "__main__":
    main()
