"""The server app of a run."""

from tfdp_rec.federated import flower
from tfdp_rec.federated.settings import FederatedSettings

app = flower.server_app(lambda context: FederatedSettings.from_run(context.run_config))
