"""Federated training in one process: cohorts, FedAdam, a ledger per client.

FedAdam as Flower computes it (so that a run over Flower can be compared number for number): the server takes the
mean of the clients' new weights minus its own as d_t,

    m_t = b1 m + (1 - b1) d,   v_t = b2 v + (1 - b2) d^2,
    w_t = w + η √(1 - b2^(t+1)) / (1 - b1^(t+1)) * m_t / (√(v_t) + τ),      t = 1, 2, ...

A client takes one step w - η_l g, so d = -η_l * mean gradient.

Reference:
    Reddi et al., "Adaptive Federated Optimization", ICLR 2021.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.ground.refused import refuse_below
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated import accounting
from tfdp_rec.federated.cohort import Client
from tfdp_rec.federated.local import LocalUpdate


@dataclasses.dataclass
class FedAdam:
    """The server's optimizer.

    Args:
        eta: Server learning rate.
        eta_l: Client learning rate.
        beta_1: Decay of the mean.
        beta_2: Decay of the square.
        tau: Number added to the root of the square.

    Example:
        >>> import numpy as np
        >>> weights = FedAdam(eta=0.1, tau=1e-3).apply([np.zeros(1)], [np.ones(1)], 1)
        >>> bool(-0.2 < weights[0][0] < 0)
        True
    """

    eta: float = 1e-2
    eta_l: float = 1.0
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        self._mean: list[NDArray[Any]] = []
        self._square: list[NDArray[Any]] = []

    def apply(
        self, weights: Sequence[NDArray[Any]], gradients: Sequence[NDArray[Any]], server_round: int
    ) -> list[NDArray[Any]]:
        """The server's weights after a round.

        Args:
            weights: Weights before the round.
            gradients: The cohort's mean gradients.
            server_round: Number of the round, counted from 1.
        """
        moves = [-self.eta_l * gradient for gradient in gradients]
        if not self._mean:
            self._mean = [np.zeros_like(move) for move in moves]
            self._square = [np.zeros_like(move) for move in moves]
        self._mean = [self.beta_1 * m + (1 - self.beta_1) * d for m, d in zip(self._mean, moves)]
        self._square = [self.beta_2 * v + (1 - self.beta_2) * d * d for v, d in zip(self._square, moves)]
        corrected = math.sqrt(1 - self.beta_2 ** (server_round + 1)) / (1 - self.beta_1 ** (server_round + 1))
        return [
            w + self.eta * corrected * m / (np.sqrt(v) + self.tau) for w, m, v in zip(weights, self._mean, self._square)
        ]


@dataclasses.dataclass
class Simulation:
    """Rounds of local updates and FedAdam over a set of clients.

    Args:
        update: Local update of a client.
        clients: All clients.
        cohort_size: Number of clients that answer in a round.
        optimizer: Optimizer of the server.
        source: Randomness of the clients' mechanisms.
        seed: Seed of the server's choice of clients (public: it protects no client).
        most_answers: Number of answers after which a client gives no more, as devices whose budget is spent do; None
            for no limit.

    Raises:
        ValueError: There are fewer clients than a cohort needs, also in a later round, of those that still answer; or
            most_answers is below 1.
    """

    update: LocalUpdate
    clients: Sequence[Client]
    cohort_size: int
    optimizer: FedAdam = dataclasses.field(default_factory=FedAdam)
    source: words.WordSource = words.os_entropy
    seed: int = 0
    most_answers: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.cohort_size <= len(self.clients):
            raise ValueError(f"cohort_size must be in [1, {len(self.clients)}], got {self.cohort_size}.")
        refuse_below(1, most_answers=1 if self.most_answers is None else self.most_answers)
        self._order = np.random.default_rng(self.seed)
        self._rounds_done = 0
        self.answers: np.ndarray[Any, Any] = np.zeros(len(self.clients), dtype=np.int64)
        self.losses: list[float] = []

    def run(self, rounds: int) -> None:
        """Train for some rounds; may be called again to go on."""
        for _ in range(rounds):
            self.round()

    def round(self) -> float:
        """One round; returns the cohort's loss."""
        chosen = self._choose_clients()
        self.answers[chosen] += 1  # before anything of them comes into the weights
        draws = self.update.draw([self.clients[i] for i in chosen], self.source)
        gradients, loss = self.update.gradients(draws, self.source)
        variables = self.update.model.trainable_variables
        self._rounds_done += 1
        weights = self.optimizer.apply([np.array(v) for v in variables], gradients, self._rounds_done)
        for variable, value in zip(variables, weights):
            variable.assign(value)
        self.losses.append(loss)
        return loss

    def _choose_clients(self) -> NDArray[np.int64]:
        """The clients of the next cohort."""
        if self.most_answers is None:
            return self._order.choice(len(self.clients), self.cohort_size, replace=False)
        left = np.flatnonzero(self.answers < self.most_answers)
        if len(left) < self.cohort_size:
            raise ValueError(
                f"{len(left)} of {len(self.clients)} clients have answered fewer than {self.most_answers} times, and a "
                f"cohort has {self.cohort_size}: let clients answer more often, or make fewer rounds."
            )
        return self._order.choice(left, self.cohort_size, replace=False)

    def client_epsilon(self, index: int, delta: float) -> float:
        """What the client at an index has spent so far, at `delta`."""
        accountant = accounting.ClientAccountant()
        self.update.charge(self.clients[index], accountant, int(self.answers[index]))
        spent = accountant.epsilon(delta, disjoint=True)  # histories are fixed before the training clicks
        # Noise of words other than the operating system's can be drawn again, and subtracted.
        return math.inf if spent and self.source is not words.os_entropy else spent

    def worst_epsilon(self, delta: float) -> float:
        """The most any client has spent."""
        # What an answer costs depends on a client's kind: of each, the one that answered most often has spent most.
        most: dict[Any, int] = {}
        for i, client in enumerate(self.clients):
            kind = client.spends_on_history, client.spends_on_labels, client.label_epsilon
            if kind not in most or self.answers[i] > self.answers[most[kind]]:
                most[kind] = i
        return max(self.client_epsilon(i, delta) for i in most.values())
