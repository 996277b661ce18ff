"""The measurements of `python -m experiments.sequences`: one method, one number of users, one budget.

All methods are told the same histories and are asked for the same items. What a private method releases before its
training (sums, counts of popularity) is paid from the same ε: the training's noise is calibrated to what is left. Noise
is the operating system's, as in the product: seeds are of weights and batches.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

import tfdp_rec
from experiments.anchors import Protocol, Scores, popularity
from experiments.generated.walks import Walks
from experiments.sequences.settings import POPULARITY, RECENT, SASREC, SASREC_UPON, SUMS, UPON, Grid, Sizes
from experiments.study import train
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.data import NextItemExamples, PoissonSampling, Timelines
from tfdp_rec.datasets.log import Catalogue
from tfdp_rec.models import SASRec
from tfdp_rec.privacy import private_counts
from tfdp_rec.spectral import SpectralRecommender

DELTA = 1e-7
ADAM_BATCH = 512
COUNTS_NOISE = 10.0  # times that of one release at ε: a hundredth of the budget
UNBOUNDED = 1e4  # ε of sums that stand for sums without noise
USERS_SEED = 1


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measurement; `epsilon` is 0 without privacy."""

    method: str
    users: int
    epsilon: float
    seed: int = 0

    @property
    def name(self) -> str:
        """Of the cell's file."""
        return f"{self.method.replace(' ', '-')}-{self.users}-epsilon{self.epsilon:g}-seed{self.seed}"


def cells_of(grid: Grid) -> list[Cell]:
    """All measurements, those of few users first; without privacy one seed of popularity and sums, which draw none."""
    found = []
    for users, seed, method, epsilon in itertools.product(
        sorted(grid.users), range(grid.seeds), grid.methods, (0.0, *grid.epsilons)
    ):
        if epsilon and method == POPULARITY:
            continue
        if epsilon == 0.0 and (method in (RECENT, UPON, SASREC_UPON) or (seed and method != SASREC)):
            continue
        found.append(Cell(method, users, epsilon, seed))
    return found


def packed(hits: NDArray[np.float64]) -> str:
    """Whether each user's item was found, as text."""
    return np.packbits(hits > 0).tobytes().hex()


def unpacked(text: str, count: int) -> NDArray[np.float64]:
    """The inverse of `packed`."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8))[:count].astype(float)


class Trainings:
    """The users of a study and what is made of them.

    Args:
        sizes: Sizes that all trainings share.
        real: Histories of real users, the oldest item first.
        items: Number of items of the catalogue, whose ids are 1 to that.
        own: Whether the real users themselves are counted, instead of users generated after them.
        validate: Whether the item before the last is asked for, instead of the last.
    """

    def __init__(self, sizes: Sizes, real: Sequence[NDArray[np.integer]], items: int, own: bool, validate: bool):
        self.sizes, self.items, self._real, self._own, self._validate = sizes, items, real, own, validate
        self._asked = functools.lru_cache(1)(self._protocol)

    def measure(self, cell: Cell) -> dict[str, Any]:
        """HR@10 of a cell with its error over the users asked, its ε and its seconds."""
        protocol, start = self._asked(cell.users), time.perf_counter()
        own = {POPULARITY: self._popularity, SUMS: self._sums, UPON: self._upon, SASREC_UPON: self._upon}
        make = own.get(cell.method, self._alone)
        scores, more = make(protocol, cell)
        seconds = time.perf_counter() - start
        hits = protocol.measured(scores)
        error = float(hits.std(ddof=1) / math.sqrt(len(hits)))
        return {
            **dataclasses.asdict(cell), "HR@10": float(hits.mean()), "error": error, "asked": len(hits),
            "counted": len(protocol.counted), "seconds": seconds, "hits": packed(hits), **more,
        }  # fmt: skip

    def _protocol(self, count: int) -> Protocol:
        """The users, and what is asked of the first of them."""
        users: Sequence[NDArray[Any]] = self._real
        if not self._own:
            users = Walks(self._real, self.sizes.longest).users(count, USERS_SEED + self._validate)
        back = 2 if self._validate else 1
        users = [user for user in users if len(user) > back + 1]
        counted = [user[: max(1, len(user) - 1 - back)] for user in users]
        asked = users[: self.sizes.asked]
        told = [user[:-back] for user in asked]
        target = np.array([user[-back] for user in asked])
        return Protocol("sequences", self.items, counted, told, told, target, DELTA, "HR@10")

    def _popularity(self, protocol: Protocol, cell: Cell) -> tuple[Scores, dict[str, Any]]:
        return popularity(protocol), {}

    def _sums(self, protocol: Protocol, cell: Cell) -> tuple[Scores, dict[str, Any]]:
        return self._counted(protocol, cell.epsilon or UNBOUNDED).scores, {}

    def _counted(self, protocol: Protocol, epsilon: float) -> SpectralRecommender:
        made = SpectralRecommender(np.arange(1, self.items + 1), epsilon, DELTA, ordered=True)
        return made.fit(protocol.counted, verbose=0)

    def _alone(self, protocol: Protocol, cell: Cell) -> tuple[Scores, dict[str, Any]]:
        """From random weights, with a private prior; or by Adam."""
        keras.utils.set_random_seed(cell.seed)
        log = self._log(protocol)
        blocks = self.sizes.blocks if cell.method == SASREC else 0
        if not cell.epsilon:
            prior = np.bincount(log.numbers, minlength=self.items + 1)[1:] + 1.0
            return self._by_adam(self._model(blocks, prior=prior), self._examples(log))
        noise = COUNTS_NOISE * noise_of_one_release(cell.epsilon, DELTA)
        counted = private_counts(log, Catalogue(np.arange(1, self.items + 1)), noise_multiplier=noise)
        model = self._model(blocks, prior=np.maximum(counted.values, noise))
        examples = self._examples(log, counted.values)
        return self._privately(model, examples, cell, [(counted.event, "counts")], self.sizes.alone_length)

    def _upon(self, protocol: Protocol, cell: Cell) -> tuple[Scores, dict[str, Any]]:
        """From released sums, with what they leave of ε."""
        keras.utils.set_random_seed(cell.seed)
        sums = self._counted(protocol, self.sizes.sums_share * cell.epsilon)
        begun = float(protocol.measured(sums.scores).mean())
        blocks = self.sizes.blocks if cell.method == SASREC_UPON else 0
        model, examples = self._model(blocks, sums), self._examples(self._log(protocol), sums.popularity)
        scores, more = self._privately(model, examples, cell, sums.uses, self.sizes.upon_length)
        return scores, {**more, "HR@10 of its sums": begun}

    def _model(self, blocks: int, sums: Any = None, **arguments: Any) -> SASRec:
        sizes = self.sizes
        arguments |= {"width": sizes.width, "history_length": sizes.history, "num_blocks": blocks}
        return SASRec(np.arange(1, self.items + 1), **arguments) if sums is None else SASRec.upon(sums, **arguments)

    def _log(self, protocol: Protocol) -> Timelines:
        offsets = np.concatenate([[0], np.cumsum([len(history) for history in protocol.counted])])
        titles = [str(item) for item in range(1, self.items + 1)]
        return Timelines(
            np.concatenate(protocol.counted), offsets, np.arange(len(protocol.counted)), np.arange(1, self.items + 1),
            titles,
        )  # fmt: skip

    def _by_adam(self, model: SASRec, examples: NextItemExamples) -> tuple[Scores, dict[str, Any]]:
        batch = min(ADAM_BATCH, len(examples))
        steps = min(self.sizes.adam_epochs * math.ceil(len(examples) / batch), self.sizes.adam_steps)
        rate = keras.optimizers.schedules.CosineDecay(self.sizes.adam_rate, steps)
        sampling = PoissonSampling(len(examples), batch, unit="user")
        batches = sampling.batches(examples.fetch, shared=examples.shared)
        train(model, keras.optimizers.Adam(rate), batches, steps, sampling, DELTA)
        return self._scores(model), {"steps": steps}

    def _privately(
        self, model: SASRec, examples: NextItemExamples, cell: Cell, spent: list[Any], length: float
    ) -> tuple[Scores, dict[str, Any]]:
        sizes, batch = self.sizes, self.sizes.batch(len(examples))
        sampling = PoissonSampling(len(examples), batch, unit="user")
        plan = tfdp_rec.PrivatePlan(
            sampling=sampling, delta=DELTA, steps=sizes.steps, epsilon=cell.epsilon, spent=spent,
            l2_norm_clip=sizes.clip,
        )  # fmt: skip
        # The rate with which the noise of all steps moves a row by so much; of many users' sums it would be too large.
        of_noise = length * batch / (plan.noise_multiplier * math.sqrt(sizes.steps * sizes.width))
        rate = min(of_noise, sizes.largest_rate) / sizes.clip
        dense = keras.optimizers.Adam(sizes.dense_rate)
        model.compile(tfdp_rec.LazyDPSGD(rate, plan=plan, dense_optimizer=dense))
        batches = plan.batches(examples.fetch, shared=examples.shared)
        model.fit(batches, steps_per_epoch=sizes.steps, verbose=0, shuffle=False, callbacks=[plan.budget()])
        spent_at_last = plan.accountant.epsilon()
        return self._scores(model), {
            "noise": plan.noise_multiplier, "rate": rate, "batch": batch, "epsilon spent": spent_at_last,
        }  # fmt: skip

    def _examples(self, log: Timelines, counts: Any = None) -> NextItemExamples:
        return NextItemExamples(
            log, history=self.sizes.history, negatives=min(self.sizes.negatives, self.items), every_place=True,
            released_counts=counts,
        )  # fmt: skip

    def _scores(self, model: SASRec) -> Scores:
        places = self.sizes.history

        def scores(told: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
            context = np.zeros((len(told), places), np.int32)
            for row, history in zip(context, told):
                row[: len(history[-places:])] = history[-places:]
            return np.asarray(model(context), np.float32)

        return scores
