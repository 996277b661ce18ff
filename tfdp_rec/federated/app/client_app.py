"""The client app of a run: each node holds one reader, on that node's own terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdp_rec.federated import build, flower
from tfdp_rec.federated.participant import Participant
from tfdp_rec.federated.settings import FederatedSettings

if TYPE_CHECKING:
    from flwr.app import Context


def join(context: Context) -> Participant:
    """The participant that a node stands for: the run says what to compute, the node whether, and at what cost."""
    return build.participant(FederatedSettings.from_run(context.run_config), context.node_config)


app = flower.client_app(join, secure=lambda context: FederatedSettings.from_run(context.run_config).secure)
