"""PrivateRec on Flower: a client app whose mod guards what leaves, and a server app with FedAdam.

    message from the server -> [SecAgg+ mod] -> guard mod -> local update -> guard mod -> [SecAgg+ mod] -> server

The guard mod opens the client's training ledger, refuses a round that the budget does not cover, and writes the
round down *before* the update is computed. Of the reply it lets through the new weights alone: no loss, no
metric, no count of examples (every client weighs 1, so counts tell nothing). The update itself draws its noise,
padding and labels from the operating system.

With SecAgg+ the server sees the sum of the updates only. That hides single updates from an honest-but-curious
server; the ε stated is the local one and does not rely on it.

Flower's telemetry is switched off when this module is imported. Flower itself is imported by the functions that
need it, so that the module can be read without it; to run them, `pip install tfdp-rec[federated]`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.federated import accounting
from tfdp_rec.federated.cohort import Client, with_private_labels
from tfdp_rec.federated.labels import LabelPermutation
from tfdp_rec.federated.ledger import BudgetSpent, Ledger, State
from tfdp_rec.federated.local import LocalUpdate

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.server import ServerApp
    from flwr.server.strategy import FedAdam

REFUSED = 1  # Flower's code for an error that the application raised


@dataclasses.dataclass
class Participant:
    """One client as the apps see it.

    Args:
        update: What it computes.
        data: Its private data.
        ledger: Path of its training ledger, or None to keep none (simulations; labels are then drawn, and paid
            for, every round).
        budget_epsilon: The most it will spend in training.
        budget_delta: Failure probability at which that is measured.
        client_rate: Client learning rate.

    Raises:
        ValueError: If there is a budget and no ledger to hold it to.
    """

    update: LocalUpdate
    data: Client
    ledger: Path | None = None
    budget_epsilon: float = float("inf")
    budget_delta: float = 1e-5
    client_rate: float = 1.0

    def __post_init__(self) -> None:
        if self.ledger is None and self.budget_epsilon < float("inf"):
            raise ValueError("budget_epsilon needs a ledger: without one nobody counts what is spent.")

    def charge_round(self) -> None:
        """Write one more round down, and with the first the private labels, drawn once.

        Raises:
            BudgetSpent: If the budget does not cover it; nothing is written then.
        """
        if self.ledger is None:
            return
        with Ledger(self.ledger) as ledger:
            state = ledger.load()
            self._keep_labels(state)
            state.add({"round of": type(self.update).__name__})
            total = self.epsilon(sum(count for _, count in state.releases))
            if total > self.budget_epsilon:
                raise BudgetSpent(
                    f"another round would bring epsilon to {total:.3g}, above the budget of {self.budget_epsilon:.3g}."
                )
            ledger.save(state)

    def _keep_labels(self, state: State) -> None:
        """Use the ledger's private labels; draw those that it lacks."""
        if not isinstance(self.update.labels, LabelPermutation):
            return
        if self.data.label_epsilon is None:
            fresh = with_private_labels(self.data, self.update.labels)
            known = [int(position) for position in state.draw]
            positions = [*known, *(click for _, click in fresh.clicks[len(known) :])]
            clicks = tuple((shown, click) for (shown, _), click in zip(fresh.clicks, positions))
            self.data = dataclasses.replace(fresh, clicks=clicks)
        state.draw, state.draw_key = [float(click) for _, click in self.data.clicks], "labels"

    def epsilon(self, rounds: int) -> float:
        """What this many rounds cost this client."""
        accountant = accounting.ClientAccountant()
        if rounds:
            self.update.charge_once(self.data, accountant)
        for _ in range(rounds):
            self.update.charge(self.data, accountant)
        return accountant.epsilon(self.budget_delta, disjoint=True)

    def step(self, weights: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """One local update: the server's weights in, this client's out."""
        variables = self.update.model.trainable_variables
        for variable, value in zip(variables, weights):
            variable.assign(value)
        gradients, _ = self.update.gradients(self.update.draw([self.data]))
        return [w - self.client_rate * g for w, g in zip(weights, gradients)]


Join: TypeAlias = "Callable[[Context], Participant]"


def client_app(join: Join, secure: Callable[[Context], bool] = lambda context: False) -> ClientApp:
    """The client app.

    Args:
        join: From a node's context to its participant.
        secure: From a node's context to whether SecAgg+ masks what the client sends.
    """
    from flwr.client import NumPyClient
    from flwr.clientapp import ClientApp

    class Updater(NumPyClient):
        def __init__(self, participant: Participant) -> None:
            self.participant = participant

        def fit(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> tuple[Any, int, dict[str, Any]]:
            return self.participant.step(parameters), 1, {}

    return ClientApp(
        client_fn=lambda context: Updater(join(context)).to_client(), mods=[masked(secure), guard(join)]
    )


def masked(secure: Callable[[Context], bool]) -> Callable[[Message, Context, Callable], Message]:
    """SecAgg+'s client mod in the runs that ask for it: only a run's own configuration says so.

    Args:
        secure: From a node's context to whether its run does.
    """
    from flwr.client.mod import secaggplus_mod

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        return secaggplus_mod(message, context, call_next) if secure(context) else call_next(message, context)

    return mod


def guard(join: Join) -> Callable[[Message, Context, Callable[[Message, Context], Message]], Message]:
    """The client mod that charges a round and strips the reply.

    Args:
        join: From a node's context to its participant.
    """
    from flwr.app import Error, Message
    from flwr.app.message_type import MessageType

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return call_next(message, context)
        try:
            join(context).charge_round()
        except BudgetSpent as refusal:
            return Message(Error(code=REFUSED, reason=str(refusal)), reply_to=message)
        reply = call_next(message, context)
        return reply if reply.has_error() else strip(reply)

    return mod


def strip(reply: Message) -> Message:
    """Keep the weights and Flower's status; set the count of examples to 1; drop every metric."""
    content = reply.content
    for name in list(content.metric_records):
        content.metric_records[name].clear()
        if name == "fitres.num_examples":
            content.metric_records[name]["num_examples"] = 1
    for name in list(content.config_records):
        if name != "fitres.status":
            content.config_records[name].clear()
    return reply


@dataclasses.dataclass
class Training:
    """What the server app needs to know.

    Args:
        weights: The model's initial trainable weights.
        rounds: How many rounds.
        clients: How many clients must be there before a round starts.
        fraction: Share of the clients that is asked in a round.
        eta: Server learning rate.
        tau: Added to the root of the square.
        secure: Whether clients mask what they send (SecAgg+).
        finish: Called with the trained weights.
    """

    weights: list[NDArray[Any]]
    rounds: int
    clients: int
    fraction: float
    finish: Callable[[list[NDArray[Any]]], None]
    eta: float = 1e-2
    tau: float = 1e-5
    secure: bool = False


def server_app(train: Callable[[Context], Training]) -> ServerApp:
    """The server app: Flower's FedAdam, under SecAgg+ if asked for.

    Args:
        train: From the run's context to what is to be trained.
    """
    from flwr.server import LegacyContext, ServerApp, ServerConfig
    from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Context) -> None:
        training = train(context)
        strategy = fed_adam(training)
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=training.rounds), strategy=strategy)
        masked = SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.6, max_weight=1.0)
        DefaultWorkflow(fit_workflow=masked if training.secure else None)(grid, legacy)
        training.finish([np.asarray(w) for w in strategy.current_weights])

    return app


def fed_adam(training: Training) -> FedAdam:
    """Flower's FedAdam with the constants of `simulation.FedAdam`."""
    from flwr.common import ndarrays_to_parameters
    from flwr.server.strategy import FedAdam

    return FedAdam(
        fraction_fit=training.fraction,
        fraction_evaluate=0.0,
        min_fit_clients=min(2, training.clients),
        min_evaluate_clients=0,
        min_available_clients=training.clients,
        initial_parameters=ndarrays_to_parameters(training.weights),
        eta=training.eta,
        eta_l=1.0,
        beta_1=0.9,
        beta_2=0.99,
        tau=training.tau,
    )
