"""One-run audits beyond one table in one process: python -m experiments.audits [--runs 20] [NAME ...]

    sums       SpectralRecommender: a user's two items are no other user's; counts and their pair tell together
    clicks     ClickModel: a row is a click on an item of its own
    ftrl       LazyDPFTRL, a canary in one step of four, with the weights released after each step
    rounds     PrivateRec, a simulation: each client answers once, and the server tells its click from another
    cluster    LazyDPSGD on a worker and two parameter servers in processes of their own
    towers, towers-dpsgd, towers-sampled, towers-dpsgd-sampled
               canaries as data: users of a two-tower model who watched one movie, often, and then one of their own;
               all that is asked is how the released model scores these movies after that one

Canaries move what is released as much as the clip lets them. A row has the claim, medians of bounds over the claim, and
runs above the claim.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from scipy import linalg

import tfdp_rec
from tfdp_rec import mechanisms
from tfdp_rec.audit import OneRunAudit, flip_coins, one_run_audit
from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent
from tfdp_rec.data import FixedOrder, PoissonSampling
from tfdp_rec.datasets.mind.files import NewsCatalogue
from tfdp_rec.distribute import LocalCluster, ParameterServerTrainer
from tfdp_rec.federated import AttentionMechanism, LabelPermutation
from tfdp_rec.federated.cohort import Client
from tfdp_rec.federated.local import PrivateUpdate
from tfdp_rec.federated.simulation import Simulation
from tfdp_rec.models.canary_table import AuditPlan, CanaryTable
from tfdp_rec.models.news import NewsRecommender
from tfdp_rec.models.two_tower import TwoTower
from tfdp_rec.privacy import optimised_correlation
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.sums import ClickModel, clicks

WHOLE = AuditPlan(20_000, num_guesses=200, confidence=0.95)
SAMPLED = AuditPlan(20_000, num_guesses=200, steps=4, confidence=0.95, sampling_rate=0.25)


def sums(coins: np.ndarray) -> np.ndarray:
    """Both releases of private sums, each by what it tells."""
    made = SpectralRecommender(np.arange(2 * coins.size), noise_multiplier=1.0, head=2 * coins.size)
    made.release_sums([[2 * i, 2 * i + 1] if coin else [] for i, coin in enumerate(coins)], verbose=0)
    one, other = np.argsort(made.released.head).reshape(-1, 2).T
    counted = made.released.counts.reshape(-1, 2).sum(axis=1) / 2**0.5
    return counted / made.split.counts**2 + made.released.pairs[one, other] / made.split.gram**2


def click_sums(coins: np.ndarray) -> np.ndarray:
    """The sums as they leave the mechanism, of which the model is made."""
    seen, rows, release = list[np.ndarray](), np.flatnonzero(coins), clicks.release_sums

    def keep(*given: Any) -> np.ndarray:
        seen.append(release(*given))
        return seen[-1]

    with mock.patch.object(clicks, "release_sums", keep):
        ClickModel({"item": coins.size}, noise_multiplier=1.0).fit({"item": rows}, np.ones(len(rows)))
    return seen[0] @ [3.0, 2.0]


def ftrl(coins: np.ndarray) -> np.ndarray:
    """What moved in each step, with the noise made independent again."""
    plan, each = optimised_correlation(steps=4, separation=4), coins.size // 4
    model, moved = CanaryTable(coins.size), [np.zeros(coins.size)]
    model.compile(tfdp_rec.LazyDPFTRL(
        1.0, correlation=plan, l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=coins.size / 8
    ))  # fmt: skip
    for step in range(4):
        here = np.flatnonzero(coins[step * each : (step + 1) * each]) + step * each
        model.fit(tf.data.Dataset.from_tensors(here), verbose=0)
        moved.append(model.distances())
    strategy = np.tril(linalg.toeplitz(plan.strategy.coefficients(4)))
    own = np.repeat(strategy / np.linalg.norm(strategy, axis=0), each, axis=1)
    return np.sum(own * (strategy @ np.diff(moved, axis=0)), axis=0)


ATTENTION = AttentionMechanism(2, 5.0, 1e-6, activation="relu")


def rounds(coins: np.ndarray, attention: AttentionMechanism = ATTENTION) -> np.ndarray:
    """The share of the first basis vector in what each client sends."""
    titles, word = {"title": np.arange(3, dtype="int32")[:, None]}, keras.Input((1,), dtype="int32", name="title")
    table = keras.layers.Embedding(3, 2)
    news: Any = keras.Model({"title": word}, keras.layers.Flatten()(table(word)))
    news.dim, news.reads = 2, ("title",)
    table.set_weights([np.eye(3)[:, 1:]])  # two news at right angles to each other, and the anonymous one
    model = NewsRecommender(news, keras.layers.GlobalAveragePooling1D(), 2, temperature=1e-4)
    model({"news": titles, "history": np.ones((1, 1), "int32"), "candidates": np.ones((1, 2), "int32")})
    model.private_attention.basis.assign(0.1 * np.eye(2))  # on one of which all attention is
    place = [variable is model.private_attention.basis for variable in model.trainable_variables].index(True)
    labels, catalogue = LabelPermutation(float("inf"), 1), NewsCatalogue(("", "A", "B"), titles, (), ("",), ("",))
    update = PrivateUpdate(model, catalogue, attention, labels, 1, 1)
    clients = [Client(("A" if coin else "B",), ((("A", "B"), 0),)) for coin in coins]
    scores, answered = np.zeros(coins.size), np.zeros(coins.size, np.int64)
    server = mock.Mock()
    server.apply.side_effect = lambda weights, gradients, number: weights
    simulation = Simulation(update, clients, 1, server, most_answers=1)
    for _ in range(coins.size):
        simulation.round()
        shares = np.linalg.norm(server.apply.call_args.args[1][place], axis=1)
        server.reset_mock()  # keeps what it does
        scores[simulation.answers > answered] = shares[0] / shares.sum()
        answered[:] = simulation.answers
    return scores


def cluster(coins: np.ndarray, rate: float = SAMPLED.sampling_rate) -> np.ndarray:
    """The released table of a training by Poisson draws of the workers."""
    included = np.flatnonzero(coins)
    sampling = PoissonSampling(len(included), rate * len(included))
    with LocalCluster(workers=1, servers=2) as running:
        trainer = ParameterServerTrainer(
            lambda: CanaryTable(coins.size), lambda: tfdp_rec.LazyDPSGD(
                1.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=sampling.expected_batch_size
            ),
            lambda: sampling.graph_batches(lambda units: tf.gather(tf.constant(included), units)),
            running.resolver(), sampling=sampling, min_shard_bytes=400,
        )  # fmt: skip
        with trainer:
            trainer.fit(SAMPLED.steps, verbose=0)
            return trainer.model().distances()


def towers(coins: np.ndarray, mechanism: Any, plan: AuditPlan, noise: float) -> np.ndarray:
    """What the released model, asked with the canaries' history, answers for the movie of each."""
    included, negatives = np.flatnonzero(coins), coins.size + 1 + np.arange(256)
    watched = np.ones([1, 20], np.int64) * coins.size + 257  # one movie over and over: a long query
    model = TwoTower(np.arange(coins.size + 257), width=8, hidden=8, ks=())
    users, size = len(included), plan.sampling_rate * len(included)
    model.compile(mechanism(1.0, l2_norm_clip=1.0, noise_multiplier=noise, expected_batch_size=size))
    sampling = PoissonSampling(users, size) if plan.sampling_rate < 1 else FixedOrder(users, users)
    batches = sampling.batches(
        lambda units: {"context": watched.repeat(len(units), axis=0), "label": included[units] + 1},
        shared=lambda: {"negatives": negatives},
    )
    model.fit(batches, steps_per_epoch=plan.steps, verbose=0)
    return model(watched).numpy()[0, : coins.size]


def _plan(canaries: int) -> AuditPlan:
    return AuditPlan(canaries, canaries // 20, steps=1, confidence=0.95)


CASES: dict[str, tuple[Callable[..., np.ndarray], AuditPlan, DpEvent]] = {
    "sums": (sums, _plan(2000), GaussianDpEvent(1.0)),
    "clicks": (click_sums, _plan(20_000), GaussianDpEvent(1.0)),
    "ftrl": (ftrl, _plan(100_000), optimised_correlation(steps=4, separation=4).dp_event(2.0)),
    "rounds": (rounds, _plan(4000), ATTENTION.event),
    "cluster": (cluster, SAMPLED, GaussianDpEvent(1.0)),
}
_TOWERS: dict[str, Any] = {"towers": mechanisms.lazy_dp_sgd.kind, "towers-dpsgd": mechanisms.dp_sgd.kind}
for name, mechanism in _TOWERS.items():
    for end, plan, noise in (("", WHOLE, 2**0.5), ("-sampled", SAMPLED, 1.0)):
        release = functools.partial(towers, mechanism=mechanism, plan=plan, noise=noise)
        CASES[name + end] = release, plan, GaussianDpEvent(noise)


def claim_of(name: str) -> float:
    """The ε that a case claims for one canary."""
    _, plan, event = CASES[name]
    return plan.epsilon_claim(event)


def audit(name: str, coins: np.ndarray, scores: np.ndarray) -> OneRunAudit:
    """The bounds of a case, from the scores of its releases by these coins."""
    plan = CASES[name][1]
    return one_run_audit(
        scores, coins, num_guesses=coins.size * plan.num_guesses // plan.num_canaries, delta=plan.delta,
        confidence=plan.confidence, share_included=1.0 if plan.sampling_rate < 1 else 0.5, family=plan.family,
    )  # fmt: skip


def main() -> None:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(prog="python -m experiments.audits", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    for name in args.names or CASES:
        (release, plan, _), found = CASES[name], []
        for run in range(args.runs):
            coins = flip_coins(plan.num_canaries, run)
            bounds = audit(name, coins, release(coins))
            found.append((bounds.epsilon, bounds.curve_epsilon, bounds.independent_epsilon))
        claim, above = claim_of(name), np.sum(np.array(found) > claim_of(name), axis=0)
        shares = map("{:.2f}".format, np.median(found, axis=0) / claim)
        print(f"| {name} | {claim:.2f} | {' | '.join(shares)} | {above} of {args.runs} |", flush=True)


if __name__ == "__main__":
    main()
