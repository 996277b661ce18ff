"""The client app of a run: each node holds one reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdp_rec.federated import build, flower
from tfdp_rec.federated.settings import Settings

if TYPE_CHECKING:
    from flwr.app import Context


def join(context: Context, settings: Settings) -> flower.Participant:
    """The participant that a node stands for."""
    return build.participant(settings, int(context.node_config["partition-id"]))


def settings_of(context: Context) -> Settings:
    """What the run is told."""
    return Settings.of_run(context.run_config)


app = flower.client_app(
    lambda context: join(context, settings_of(context)), secure=lambda context: settings_of(context).secure
)
