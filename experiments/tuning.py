"""What tuning within ε brings beside the first values: python -m experiments.tuning u.data

A click model on MovieLens-100K's ratings (four stars or five), rows as units, 200 steps of 8,000 of 80,000. Untuned:
one training at the first rate, with all of ε. Tuned: each of twelve settings, rates from 0.3 to 10 times the first one
and three clips, is trained with the noise that `tfdp_rec.tune` leaves a run of ten on average; then many searches among
them are drawn. A run's score is one minus the squared error of 10,000 held-out rows, with noise. Others judge, by AUC.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np

import tfdp_rec
from experiments.generated.clicks import auc
from experiments.rehearsals import model_of, movielens
from tfdp_rec.core.claim.best_run import BestRun
from tfdp_rec.core.claim.calibration import least_noise
from tfdp_rec.core.claim.events import GaussianDpEvent
from tfdp_rec.core.claim.secret_draws import number_of_runs
from tfdp_rec.core.claim.selection import chance_to_end
from tfdp_rec.core.mechanism.noise_walk import first_dense_optimizer, first_rate
from tfdp_rec.data import PoissonSampling
from tfdp_rec.training.tuning import SHAPES

_STEPS, _BATCH, _DELTA, _RUNS, _SCORED, _SEARCHES = 200, 8_000, 1e-6, 10.0, 10_000, 4_000
_SETTINGS = [(times, clip) for times in (0.3, 1.0, 3.0, 10.0) for clip in (0.3, 1.0, 3.0)]


class Study:
    """Rows to train on, to score by, and to judge by."""

    def __init__(self, path: str):
        users, items, clicked = movielens(path)
        order = np.random.default_rng(0).permutation(len(users))
        self.sizes = int(users.max()) + 1, int(items.max()) + 1
        rows = users[order], items[order], clicked[order].astype("float32")[:, None]
        ends = 0, len(order) - 2 * _SCORED, len(order) - _SCORED, len(order)
        self.known, self.scored, self.judged = ([each[a:b] for each in rows] for a, b in zip(ends, ends[1:]))
        self.sampling = PoissonSampling(len(self.known[0]), _BATCH, unit="row")

    def train(self, noise: float, times: float = 1.0, clip: float = 1.0) -> tuple[float, float]:
        """Score and AUC of a training at so many times the first rate."""
        plan = tfdp_rec.PrivatePlan(sampling=self.sampling, delta=_DELTA, steps=_STEPS, noise_multiplier=noise)
        layers = model_of("product and biases", *self.sizes)
        model: Any = tfdp_rec.PrivateModel(layers.inputs, layers.outputs)
        dense = first_dense_optimizer(_STEPS)
        optimizer = tfdp_rec.LazyDPSGD(1e-3, plan=plan, l2_norm_clip=clip, dense_optimizer=dense)
        model.compile(optimizer, "binary_crossentropy")
        user, item, clicked = self.known
        batches = plan.batches(lambda rows: ((user[rows], item[rows]), clicked[rows]))
        model.prepare(batches.element_spec)
        optimizer.learning_rate = times * first_rate(optimizer, _STEPS)
        model.fit(batches, steps_per_epoch=_STEPS, callbacks=[plan.budget()], verbose=0)
        scored, judged = (
            model.predict(tuple(rows[:2]), batch_size=4096, verbose=0)[:, 0] for rows in (self.scored, self.judged)
        )
        score = 1.0 - np.mean(np.square(scored - self.scored[2][:, 0]))
        return float(score), auc(self.judged[2][:, 0], judged)

    def search(self, epsilon: float, shape: float) -> tuple[float, list[tuple[float, float]], np.ndarray]:
        """Noise of a run, score and AUC of each setting with it, and the AUC of what many searches would release."""
        score_noise = _SCORED**0.5 / 4
        release = BestRun(self.sampling, GaussianDpEvent(1.0), _STEPS, score_noise, _RUNS, shape, "study")
        noise = least_noise(
            epsilon, _DELTA, self.sampling, _STEPS, "pld", GaussianDpEvent, [], None, contain=release.contain
        )
        found = [self.train(noise, *each) for each in _SETTINGS]
        rng, scores, aucs = np.random.default_rng(0), *np.array(found).T
        best = []
        for _ in range(_SEARCHES):
            drawn = rng.integers(len(found), size=number_of_runs(chance_to_end(_RUNS, shape), shape))
            best.append(aucs[drawn[np.argmax(scores[drawn] + rng.normal(0, score_noise / _SCORED, len(drawn)))]])
        return noise, found, np.array(best)


def main() -> None:
    """Prints a line for each ε and each way to draw the number of runs."""
    parser = argparse.ArgumentParser(prog="python -m experiments.tuning", description=__doc__)
    parser.add_argument("ratings", metavar="u.data", help="MovieLens-100K's ratings")
    study = Study(parser.parse_args().ratings)
    keras.utils.set_random_seed(0)
    for epsilon in (1.0, 3.0, 8.0):
        plan = tfdp_rec.PrivatePlan(sampling=study.sampling, delta=_DELTA, steps=_STEPS, epsilon=epsilon)
        print(f"epsilon = {epsilon:g}: untuned {study.train(plan.noise_multiplier)[1]:.4f}", flush=True)
        for name, shape in SHAPES.items():
            noise, found, best = study.search(epsilon, shape)
            low, high = np.quantile(best, [0.1, 0.9])
            top = int(np.argmax([each[1] for each in found]))
            print(
                f"    {name}: noise {noise:.3f} for {plan.noise_multiplier:.3f}; released {best.mean():.4f} on average,"
                f" {low:.4f} to {high:.4f} in 8 of 10; best setting {_SETTINGS[top]}: {found[top][1]:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
