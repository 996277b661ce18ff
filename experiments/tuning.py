"""What tuning within ε brings beside the first values: python -m experiments.tuning u.data

A click model on MovieLens-100K's ratings (four stars or five), rows as units, 200 steps of 8,000 of 80,000. Untuned:
all of ε for one training at the first rate. Tuned: `tfdp_rec.tune`, ten runs on average, of rates from 0.3 to 10 times
the first one and of three clips; a run's score is one minus the squared error of 10,000 held-out rows. Others judge.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np

import tfdp_rec
from experiments.generated.clicks import auc
from experiments.rehearsals import model_of, movielens
from tfdp_rec.core.mechanism.noise_walk import first_dense_optimizer, first_rate
from tfdp_rec.data import PoissonSampling

_STEPS, _BATCH, _DELTA, _MODEL = 200, 8_000, 1e-6, "product and biases"
_SPACE = {"times": [0.3, 1.0, 3.0, 10.0], "clip": [0.3, 1.0, 3.0]}


class Study:
    """The rows of a seed: to train on, to score by, and to judge by."""

    def __init__(self, path: str, seed: int):
        users, items, clicked = movielens(path)
        order = np.random.default_rng(seed).permutation(len(users))
        self.sizes = int(users.max()) + 1, int(items.max()) + 1
        rows = users[order], items[order], clicked[order].astype("float32")[:, None]
        self.known, self.scoring, self.judging = ([each[a:b] for each in rows] for a, b in self._parts(len(order)))
        self.sampling = PoissonSampling(len(self.known[0]), _BATCH, unit="row")

    @staticmethod
    def _parts(rows: int) -> list[tuple[int, int]]:
        return [(0, rows * 8 // 10), (rows * 8 // 10, rows * 9 // 10), (rows * 9 // 10, rows)]

    def train(self, plan: Any, times: float = 1.0, clip: float = 1.0) -> Any:
        """A model, at so many times the first rate."""
        layers = model_of(_MODEL, *self.sizes)
        model = tfdp_rec.PrivateModel(layers.inputs, layers.outputs)
        dense = first_dense_optimizer(_STEPS)
        model.compile(
            tfdp_rec.LazyDPSGD(1e-3, plan=plan, l2_norm_clip=clip, dense_optimizer=dense), "binary_crossentropy"
        )
        user, item, clicked = self.known
        batches = plan.batches(lambda rows: ((user[rows], item[rows]), clicked[rows]))
        model.prepare(batches.element_spec)
        model.optimizer.learning_rate = times * first_rate(model.optimizer, _STEPS)
        model.fit(batches, steps_per_epoch=_STEPS, callbacks=[plan.budget()], verbose=0)
        return model

    def score(self, model: Any) -> np.ndarray:
        """One minus the squared error of each row that is scored."""
        return 1.0 - np.square(self._predict(model, self.scoring) - self.scoring[2][:, 0])

    def judge(self, model: Any) -> float:
        """AUC."""
        return auc(self.judging[2][:, 0], self._predict(model, self.judging))

    def _predict(self, model: Any, rows: Any) -> np.ndarray:
        return model.predict(tuple(rows[:2]), batch_size=4096, verbose=0)[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.tuning", description=__doc__)
    parser.add_argument("ratings", metavar="u.data", help="MovieLens-100K's ratings")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    for epsilon in (1.0, 3.0, 8.0):
        for seed in range(given.seeds):
            keras.utils.set_random_seed(seed)
            study = Study(given.ratings, seed)
            settings: dict[str, Any] = {"sampling": study.sampling, "delta": _DELTA, "steps": _STEPS}
            settings["epsilon"] = epsilon
            untuned = study.judge(study.train(tfdp_rec.PrivatePlan(**settings)))
            found = tfdp_rec.tune(
                study.train, _SPACE, score=study.score, held_out=len(study.scoring[0]), verbose=0, **settings
            )
            print(
                f"epsilon = {epsilon:g}, seed {seed}: untuned {untuned:.4f}, tuned {study.judge(found.model):.4f} "
                f"by {dict(found.settings)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
