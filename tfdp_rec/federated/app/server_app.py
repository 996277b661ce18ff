"""The server app of a run: FedAdam from the initial weights; the trained ones are written."""

from __future__ import annotations

from tfdp_rec.federated import build, flower
from tfdp_rec.federated.settings import FederatedSettings


def training_of(settings: FederatedSettings) -> flower.Training:
    """What the settings ask for."""
    model, _ = build.world(settings)
    return flower.Training(
        weights=build.load(settings.initial, model),
        rounds=settings.rounds,
        clients=settings.clients,
        fraction=settings.fraction,
        finish=lambda weights: build.save(settings.output, model, weights),
        eta=settings.eta,
        secure=settings.secure,
    )


app = flower.server_app(lambda context: training_of(FederatedSettings.of_run(context.run_config)))
