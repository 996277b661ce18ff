"""The cells of the news study: train one model one way, measure it served in several ways, keep one JSON file.

A cell's ε is per round and click, as in the paper; the file also says what the client that answered most
often has spent in all. Noise is Laplace (δ 0), as in the paper's tables; Gaussian cells (δ 1e-5) are there
because DP-FedRec does better with them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from experiments.generated.news_readers import SyntheticNews
from experiments.news import ranking
from experiments.news.published import PublishedGaussian, PublishedLabelPermutation, PublishedLaplace
from experiments.news.settings import METHODS, Sizes
from tfdp_rec.core.ground.files import replace_atomically
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.data import mind
from tfdp_rec.federated import (
    AnalyticGaussian,
    AttentionMechanism,
    LabelPermutation,
    PureLaplace,
    build,
    cohort,
    local,
)
from tfdp_rec.federated.mechanism import Activation
from tfdp_rec.federated.public import pseudo_readers
from tfdp_rec.federated.simulation import FedAdam, Simulation
from tfdp_rec.federated.vector import ClippedVector, PureVectorMechanism, VectorMechanism

DELTA = 1e-5
HISTORY, SAMPLES, NEGATIVES = 20, 4, 4
TEMPERATURE = 0.1
CENTRAL_RATE, PATIENCE = 0.01, 3
PADDING = 0.2
SERVING_EPSILONS = (0.001, 0.01, 0.1, 1.0, 10.0)
PADDINGS = (0.0, 0.2, 0.5, 0.8)
VARIED = ("dp-fedrec", "published", "corrected+public")
LIMITED = ("dp-fedrec", "corrected+public")
CALIBRATIONS = {"laplace": (PublishedLaplace, PureLaplace), "gaussian": (PublishedGaussian, AnalyticGaussian)}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training.

    Args:
        encoder: nrms, naml or plm.
        method: of `METHODS`.
        epsilon: Per round and click.
        num_basis: B.
        noise: laplace or gaussian.
        seed: Of the initial weights and of the draws.
        most: Answers that a client gives at most; 0 for no limit.
    """

    encoder: str
    method: str
    epsilon: float = 10.0
    num_basis: int = 5
    noise: str = "laplace"
    seed: int = 0
    most: int = 0

    @property
    def name(self) -> str:
        """File name."""
        limit = f"-most{self.most}" * bool(self.most)
        return f"{self.encoder}-{self.method}-{self.noise}-eps{self.epsilon:g}-B{self.num_basis}{limit}-{self.seed}"

    @property
    def delta(self) -> float:
        """Of one release."""
        return 0.0 if self.noise == "laplace" else DELTA


def cells_of(sizes: Sizes) -> list[Cell]:
    """Every method with every encoder, some with Gaussian noise and limited; then ε and B with the first encoder."""
    cells = []
    for seed in range(sizes.seeds):
        cells += [Cell(encoder, method, seed=seed) for encoder in sizes.encoders for method in METHODS]
        cells += [Cell(e, method, noise="gaussian", seed=seed) for e in sizes.encoders for method in VARIED]
        cells += [
            Cell(e, method, sizes.limited_epsilon, noise="gaussian", seed=seed, most=sizes.most_answers)
            for e in sizes.encoders
            for method in LIMITED
        ]
    first = sizes.encoders[0]
    cells += [Cell(first, method, epsilon) for method in VARIED for epsilon in sizes.epsilons]
    cells += [Cell(first, method, num_basis=b) for method in VARIED[1:] for b in sizes.bases]
    return [c for c in cells if not (c.method == "dp-fedrec" and math.isinf(c.epsilon))]


class Trainings:
    """The readers that all cells share, and how a cell is trained and measured.

    Args:
        sizes: of the study.
        data: folder of MIND files, or None to generate readers.
        folder: where generated readers are kept.
    """

    def __init__(self, sizes: Sizes, data: str | None, folder: Path) -> None:
        self.sizes = sizes
        self.data = self._read(data, folder / "readers")
        users = [shown for shown in self.data.by_user().values() if len(shown) > 1 and shown[-1].clicks]
        self.clients = [cohort.client_of(shown[:-1]) for shown in users]
        self.tests = [shown[-1] for shown in users]
        self.validation = [shown[-2] for shown in users]

    def _read(self, data: str | None, folder: Path) -> mind.NewsDataset:
        if data is not None:
            return mind.read(data)
        if not folder.exists():
            with replace_atomically(folder) as made:
                SyntheticNews(num_users=self.sizes.users, num_news=self.sizes.news).write(made)
        return mind.read(folder, title_length=8, body_length=16)

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Train a cell and measure it."""
        start = time.monotonic()
        model = self.make_model(cell)
        spent = self.train(cell, model)
        ranked = Ranked(model, self.data, self.tests, direct=is_direct(cell))
        result: dict[str, Any] = {**dataclasses.asdict(cell), "client_epsilon": spent, "train": ranked.plain()}
        result["no history"] = ranked.without_history()
        result["served"] = ranked.served(serving_of(cell, 10.0, PADDING))
        if cell == Cell("nrms", cell.method):
            result["by serving epsilon"] = {
                f"{epsilon:g}": ranked.served(serving_of(cell, epsilon, PADDING)) for epsilon in SERVING_EPSILONS
            }
            result["by padding"] = {
                f"{epsilon:g} {padding:g}": ranked.served(serving_of(cell, epsilon, padding))
                for epsilon in (0.1, 1.0, 10.0)
                for padding in PADDINGS
            }
        return {**result, "seconds": time.monotonic() - start}

    def make_model(self, cell: Cell) -> Any:
        """An untrained model."""
        return build.news_model(
            self.data.catalogue, cell.encoder, self.sizes.dim, cell.num_basis, TEMPERATURE, cell.seed
        )

    def train(self, cell: Cell, model: Any) -> float | None:
        """Train a model as the cell says; what the busiest client spent in all (None: no bound)."""
        clients, rounds = self.clients, self.sizes.rounds
        if cell.method == "untrained":
            return 0.0
        if cell.method == "centralized":
            self._centralized(cell, model)
            return None
        if cell.method == "corrected+public":
            readers = pseudo_readers(self.data.catalogue, len(clients), seed=cell.seed)
            self._prepare(cell, model, readers)
        if cell.method == "corrected+consented":
            count = int(self.sizes.consented * len(clients))
            self._prepare(cell, model, clients[:count])
            clients = clients[count:]
        if cell.method.startswith("corrected"):
            labels, source = LabelPermutation(cell.epsilon, NEGATIVES), words.os_entropy
            clients = [cohort.with_private_labels(client, labels, source) for client in clients]
        update = self.update_of(cell, model)
        # a user encoder that was prepared is followed, not overrun: half the rate
        rate = 0.005 if cell.method in ("corrected+public", "corrected+consented") else 0.01
        simulation = self._simulation(cell, update, clients, rate)
        simulation.run(rounds)
        spent = simulation.worst_epsilon(DELTA)
        return spent if math.isfinite(spent) else None

    def _simulation(self, cell: Cell, update: Any, clients: Any, rate: float) -> Simulation:
        source = words.os_entropy  # what a seed draws has no price
        size = min(self.sizes.cohort, len(clients))
        return Simulation(
            update, clients, size, FedAdam(rate, tau=1e-5), source, cell.seed, most_answers=cell.most or None
        )

    def _prepare(self, cell: Cell, model: Any, clients: Any) -> None:
        """Train everything, gradient through the noise and all, on clients who need no protection.

        First without noise, so that the basis vectors part; then with the noise of the private rounds, so that
        the attention learns to stand out of it. (Noise from the start left all weights equal for one seed.)
        """
        silent = int(0.4 * self.sizes.rounds)
        noisy = attention_of(cell, cell.epsilon, PADDING, "relu")
        plain = dataclasses.replace(noisy, epsilon=math.inf, padding=0.0)
        cell = dataclasses.replace(cell, most=0)  # these clients are public
        for mechanism, rounds in ((plain, silent), (noisy, self.sizes.rounds - silent)):
            exact = LabelPermutation(math.inf, NEGATIVES)
            update = local.PublishedUpdate(model, self.data.catalogue, mechanism, exact, HISTORY, SAMPLES)
            self._simulation(cell, update, clients, 0.01).run(rounds)

    def update_of(self, cell: Cell, model: Any) -> local.LocalUpdate:
        """The local update of a federated cell."""
        noise: ClippedVector | None = None
        method, attention = "private", attention_of(cell, cell.epsilon, PADDING, "relu")
        if cell.method == "published":
            labels = PublishedLabelPermutation(cell.epsilon, NEGATIVES)
            return local.PublishedUpdate(model, self.data.catalogue, attention, labels, HISTORY, SAMPLES)
        if cell.method == "corrected+user":
            method, noise = "private+user", VectorMechanism(0.05, cell.epsilon, DELTA)
        elif cell.method in ("fedrec", "dp-fedrec"):
            method = "gradient"
            noise = vector_of(cell, 0.005, math.inf if cell.method == "fedrec" else cell.epsilon)
        return build.local_update(
            method, model, self.data.catalogue, attention, cell.epsilon, negatives=NEGATIVES, history=HISTORY,
            samples=SAMPLES, noise=noise,
        )  # fmt: skip

    def _centralized(self, cell: Cell, model: Any) -> None:
        """Adam on pooled clicks, stopped early by a tenth of the readers, whose last training click is held out."""
        held = [i for i in range(0, len(self.clients), 10) if self.validation[i].clicks]
        shown = [self.validation[i] for i in held]
        clients = [client for i, client in enumerate(self.clients) if i not in set(held)]
        update = self.update_of(dataclasses.replace(cell, method="fedrec"), model)
        adam = keras.optimizers.Adam(CENTRAL_RATE)
        order, source = np.random.default_rng(cell.seed), words.seeded(cell.seed)
        best, weights, checks = 0.0, model.get_weights(), 0
        every = max(1, self.sizes.rounds // 8)
        while checks < PATIENCE:
            for _ in range(every):
                chosen = order.choice(len(clients), min(self.sizes.cohort, len(clients)), replace=False)
                gradients, _ = update.gradients(update.draw([clients[i] for i in chosen], source))
                adam.apply([tf.constant(g) for g in gradients], model.trainable_variables)
            found = Ranked(model, self.data, shown, direct=True).plain()["AUC"]
            checks = 0 if found > best else checks + 1
            if found > best:
                best, weights = found, model.get_weights()
        model.set_weights(weights)


def is_direct(cell: Cell) -> bool:
    """Whether the model is scored by the user embedding itself."""
    return cell.method in ("untrained", "centralized", "fedrec", "dp-fedrec")


def vector_of(cell: Cell, clip: float, epsilon: float) -> ClippedVector:
    """DP-FedRec's mechanism with a cell's noise."""
    return PureVectorMechanism(clip, epsilon) if cell.noise == "laplace" else VectorMechanism(clip, epsilon, DELTA)


def attention_of(cell: Cell, epsilon: float, padding: float, activation: Activation) -> AttentionMechanism:
    """PrivateRec's mechanism with a cell's noise, as published or corrected."""
    published, corrected = CALIBRATIONS[cell.noise]
    calibration = published() if cell.method == "published" else corrected()
    return AttentionMechanism(
        cell.num_basis, epsilon, cell.delta, padding=padding, activation=activation, calibration=calibration
    )


def serving_of(cell: Cell, epsilon: float, padding: float) -> AttentionMechanism | ClippedVector:
    """The serving mechanism that belongs to a method."""
    if is_direct(cell):
        return vector_of(cell, 0.001, epsilon)
    return attention_of(cell, epsilon, padding, "softplus")


class Ranked:
    """A trained model on everybody's last impression.

    Args:
        model: The model.
        data: For its catalogue.
        tests: One impression a user.
        direct: Whether to score by the user embedding itself.
    """

    def __init__(self, model: Any, data: mind.NewsDataset, tests: Sequence[mind.Impression], direct: bool) -> None:
        self.model, self.tests, self.direct, self.rows = model, tests, direct, data.catalogue.rows
        self.news = model.catalogue_vectors(data.catalogue.features)
        self.history = cohort.histories([shown.history for shown in tests], HISTORY, data.catalogue.rows)
        self.basis = np.array(model.private_attention.basis)

    def _encode(self, padded: Any = None) -> tuple[Any, Any]:
        return self.model.encode_history(tf.constant(self.news), self.history, padded)

    def _metrics(self, users: Any) -> dict[str, float]:
        scores = [self.news[self.rows(s.candidates)] @ users[i] for i, s in enumerate(self.tests)]
        return ranking.average_metrics(scores, [shown.clicks for shown in self.tests])

    def plain(self) -> dict[str, float]:
        """Without noise in serving."""
        weights, users = self._encode()
        return self._metrics(np.array(users) if self.direct else np.array(weights) @ self.basis)

    def without_history(self) -> dict[str, float]:
        """The same model when it learns nothing of the reader: everybody gets the mean user."""
        weights, users = (np.array(values) for values in self._encode())
        mean = users.mean(0) if self.direct else weights.mean(0) @ self.basis
        return self._metrics(np.tile(mean, (len(self.tests), 1)))

    def served(self, mechanism: AttentionMechanism | ClippedVector) -> dict[str, float]:
        """With the client's mechanism in serving."""
        source = words.seeded(7)
        if isinstance(mechanism, ClippedVector):
            return self._metrics(mechanism.release(np.array(self._encode()[1]), source))
        padded = mechanism.padding_mask(self.history.shape, source) & (self.history != 0)
        released = mechanism.release(np.array(self._encode(padded)[0]), source)
        return self._metrics(released @ self.basis)
