"""PrivateRec on Flower: a client app whose mods guard what leaves, and a server app with FedAdam.

    message from the server -> [silence] -> [SecAgg+ mod] -> [guard] -> participant, and back the same way

The participant checks the round against the model's shapes and the node's own terms, pays for it in its ledger, and
only then computes the update. The guard lets messages of training through alone, and of the reply the new weights: no
loss, no metric, no count of examples (every client weighs 1, so counts tell nothing). Whatever fails, silence answers
with one constant sentence: the text of an error, which Flower would send to the server, may quote a click; it goes to
the node's own log. The update itself draws its noise, padding and labels from the operating system.

With SecAgg+ the server sees the sum of the updates only. That hides single updates from an honest-but-curious
server; the ε stated is the local one and does not rely on it.

Flower's telemetry is switched off when this module is imported. Flower itself is imported by the functions that
need it, so that the module can be read without it; to run them, `pip install tfdp-rec[federated]`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.federated import build
from tfdp_rec.federated.participant import Participant, Refused
from tfdp_rec.federated.settings import FederatedSettings

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.server import ServerApp
    from flwr.server.strategy import FedAdam

REFUSED = 1  # Flower's code for an error that the application raised
NO_ANSWER = "This client does not take part in this round."

_log = logging.getLogger(__name__)

Join: TypeAlias = "Callable[[Context], Participant]"


def client_app(join: Join, secure: Callable[[Context], bool] = lambda context: False) -> ClientApp:
    """The client app; `join` and `secure` read a node's context."""
    from flwr.client import NumPyClient
    from flwr.clientapp import ClientApp

    class Updater(NumPyClient):
        def __init__(self, participant: Participant) -> None:
            self.participant = participant

        def fit(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> tuple[Any, int, dict[str, Any]]:
            return self.participant.answer(parameters), 1, {}

    return ClientApp(
        client_fn=lambda context: Updater(join(context)).to_client(), mods=[silence, mask(secure), guard]
    )


def silence(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """The outermost client mod: whatever goes wrong, the server reads one constant sentence."""
    from flwr.app import Error, Message

    try:
        reply = call_next(message, context)
        problem = reply.error.reason if reply.has_error() else None
    except Exception as error:
        problem = repr(error)
    if problem is None:
        return reply
    if problem != NO_ANSWER:
        _log.warning("No answer in this round: %s", problem)
    return Message(Error(code=REFUSED, reason=NO_ANSWER), reply_to=message)


def mask(secure: Callable[[Context], bool]) -> Callable[[Message, Context, Callable], Message]:
    """SecAgg+'s client mod in the runs that ask for it: only a run's own configuration says so."""
    from flwr.client.mod import secaggplus_mod

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        return secaggplus_mod(message, context, call_next) if secure(context) else call_next(message, context)

    return mod


def guard(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """The innermost client mod: lets messages of training through alone, and strips the reply."""
    return silence(message, context, lambda message, context: _guard(message, context, call_next))


def _guard(message: Message, context: Context, call_next: Callable) -> Message:
    from flwr.app.message_type import MessageType

    if message.metadata.message_type != MessageType.TRAIN:
        raise Refused(f"The server asks for {message.metadata.message_type!r}, and this client only trains.")
    reply: Message = call_next(message, context)
    return reply if reply.has_error() else strip(reply)


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


def server_app(settings_of: Callable[[Context], FederatedSettings]) -> ServerApp:
    """The server app: FedAdam from the initial weights, under SecAgg+ if asked for; writes the trained ones."""
    from flwr.server import LegacyContext, ServerApp, ServerConfig
    from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Context) -> None:
        settings = settings_of(context)
        model, _ = build.world(settings)
        strategy = _fed_adam(settings, build.load(settings.initial, model))
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=settings.rounds), strategy=strategy)
        masked = SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.6, max_weight=1.0)
        DefaultWorkflow(fit_workflow=masked if settings.secure else None)(grid, legacy)
        build.save(settings.output, model, [np.asarray(w) for w in strategy.current_weights])

    return app


def _fed_adam(settings: FederatedSettings, weights: list[NDArray[Any]]) -> FedAdam:
    # with the constants of `simulation.FedAdam`
    from flwr.common import ndarrays_to_parameters
    from flwr.server.strategy import FedAdam

    return FedAdam(
        fraction_fit=settings.fraction,
        fraction_evaluate=0.0,
        min_fit_clients=min(2, settings.clients),
        min_evaluate_clients=0,
        min_available_clients=settings.clients,
        initial_parameters=ndarrays_to_parameters(weights),
        eta=settings.eta,
        eta_l=1.0,
        beta_1=0.9,
        beta_2=0.99,
        tau=1e-5,
    )
