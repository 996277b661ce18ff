"""Poisson sampling and random allocation, side by side: the least noise for an ε, and what a click model learns."""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np

import tfdp_rec
from experiments.generated.clicks import auc
from experiments.rehearsals import model_of, movielens
from tfdp_rec.core.claim.calibration import calibrate_noise
from tfdp_rec.core.mechanism.noise_walk import first_dense_optimizer, first_rate
from tfdp_rec.data import PoissonSampling, RandomAllocation

_DELTA, _BATCHES, _EPOCHS, _SEEDS = 1e-6, 10, 20, 3
_EPSILONS = (1.0, 3.0, 8.0)


def compare_noise() -> None:
    """Prints the least noise multipliers."""
    print("| steps an epoch | epochs | " + " | ".join(f"ε = {epsilon:g}" for epsilon in _EPSILONS) + " |")
    print("|---" * (2 + len(_EPSILONS)) + "|")
    for steps in (10, 100, 1000):
        for epochs in (1, 10, 100):
            cells = []
            for epsilon in _EPSILONS:
                poisson, allocation = (
                    calibrate_noise(epsilon, _DELTA, sampling, steps * epochs)
                    for sampling in (PoissonSampling(steps * 1000, 1000), RandomAllocation(steps * 1000, steps))
                )
                cells.append(f"{poisson:.3f} / {allocation:.3f}")
            print(f"| {steps:,} | {epochs} | " + " | ".join(cells) + " |", flush=True)


def compare_models(path: str) -> None:
    """Prints the AUC on held-out ratings of two click models, with the standard error over seeds."""
    users, items, clicked = movielens(path)
    print("| model | sampling | " + " | ".join(f"ε = {epsilon:g}" for epsilon in _EPSILONS) + " |")
    print("|---" * (2 + len(_EPSILONS)) + "|")
    for name in ("product and biases", "dense"):
        for kind in (PoissonSampling, RandomAllocation):
            cells = []
            for epsilon in _EPSILONS:
                found = [_train(name, kind, epsilon, seed, users, items, clicked) for seed in range(_SEEDS)]
                cells.append(f"{np.mean(found):.4f} ± {np.std(found, ddof=1) / _SEEDS**0.5:.4f}")
            print(f"| {name} | {kind.__name__} | " + " | ".join(cells) + " |", flush=True)


def _train(name: str, kind: Any, epsilon: float, seed: int, *columns: np.ndarray) -> float:
    keras.utils.set_random_seed(seed)
    order = np.random.default_rng(seed).permutation(len(columns[0]))
    user, item, clicked = (column[order] for column in columns)
    known = len(order) * 4 // 5
    sampling = kind(known, known / _BATCHES if kind is PoissonSampling else _BATCHES, unit="row")
    plan = tfdp_rec.PrivatePlan(sampling=sampling, epsilon=epsilon, delta=_DELTA, steps=_BATCHES * _EPOCHS)
    layers = model_of(name, int(columns[0].max()) + 1, int(columns[1].max()) + 1)
    model = tfdp_rec.PrivateModel(layers.inputs, layers.outputs)
    optimizer = tfdp_rec.LazyDPSGD(1e-3, plan=plan, dense_optimizer=first_dense_optimizer(plan.steps, 0.0))
    model.compile(optimizer, "binary_crossentropy")
    batches = plan.batches(lambda rows: ((user[rows], item[rows]), clicked[rows].astype("float32")[:, None]))
    model.prepare(batches.element_spec)
    model.optimizer.learning_rate = first_rate(model.optimizer, plan.steps)
    model.fit(batches, epochs=_EPOCHS, steps_per_epoch=_BATCHES, callbacks=[plan.budget()], verbose=0)
    predicted = model.predict((user[known:], item[known:]), batch_size=4096, verbose=0)[:, 0]
    return auc(clicked[known:].astype("float32"), predicted)


def main() -> None:
    """Prints a table of docs/privacy-allocation.md."""
    parser = argparse.ArgumentParser(prog="python -m experiments.allocation", description=__doc__)
    parser.add_argument("ratings", nargs="?", metavar="u.data", help="MovieLens-100K's ratings; else noise is compared")
    path = parser.parse_args().ratings
    compare_models(path) if path else compare_noise()


if __name__ == "__main__":
    main()
