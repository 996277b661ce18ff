"""`tfdp-rec federate`: private federated training of a news recommender, over Flower.

  tfdp-rec federate --simulate 8 --data FOLDER     in Flower's simulation engine
  tfdp-rec federate --write-app APP --data FOLDER  an app for docs/federated.md

FOLDER holds MIND's news.tsv and behaviors.tsv. ε is per round and per clicked item; rounds add up, every client
keeps a ledger, and the total is printed at the end. --budget-epsilon makes the clients that this command starts
refuse what goes beyond; clients of a written app have terms of their own (docs/federated.md). Needs the extra
tfdp-rec[federated].
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from tfdp_rec.core.claim import ledger
from tfdp_rec.core.claim.statement import round_up
from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.datasets.mind import files as mind
from tfdp_rec.federated import accounting
from tfdp_rec.federated.settings import FederatedSettings, Nodes, refuse_more_than
from tfdp_rec.settings import add_options, choose

APP = """\
[project]
name = "private-rec-run"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[tool.flwr.app]
publisher = "local"

[tool.flwr.app.components]
serverapp = "tfdp_rec.federated.app.server_app:app"
clientapp = "tfdp_rec.federated.app.client_app:app"

[tool.flwr.app.config]
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--simulate", type=int, metavar="N", help="run N clients in Flower's simulation engine")
    how.add_argument("--write-app", type=Path, metavar="FOLDER", help="write a Flower app and stop")
    add_options(parser, FederatedSettings)
    add_options(parser, Nodes)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    settings, nodes = choose(args, FederatedSettings()), choose(args, Nodes())
    if not settings.data or not Path(settings.data).is_dir():
        raise ValueError(f"--data must be a folder with news.tsv and behaviors.tsv, got {settings.data!r}.")
    # Flower's processes run in folders of their own.
    paths = {name: getattr(settings, name) for name in ("data", "output", "initial")}
    whole: dict[str, Any] = {name: str(Path(path).resolve()) for name, path in paths.items() if path}
    settings = dataclasses.replace(settings, **whole)
    if args.write_app is not None:
        if nodes != Nodes():
            raise ValueError(
                "What a client allows is its own node's configuration, and is in no app that is written: leave out "
                "--budget-epsilon, --round-epsilon, --methods and --ledgers, and give them as --node-config."
            )
        write_app(args.write_app, settings)
        print(f"wrote a Flower app to {args.write_app}; docs/federated.md says how to run it")
        return 0
    if args.simulate < 1:
        raise ValueError(f"--simulate must be at least 1, got {args.simulate}.")
    settings, nodes = dataclasses.replace(settings, clients=args.simulate), nodes.complete_from(settings)
    _refuse_other_ledgers(settings, nodes)
    optional("flwr", "federated")
    simulate(settings, nodes)
    print(describe_spending(nodes))
    return 0


def _refuse_other_ledgers(settings: FederatedSettings, nodes: Nodes) -> None:
    """Refuses weights without the ledgers that paid for them, and ledgers of users whose clients would not answer."""
    if Path(settings.output).exists() and not list(Path(nodes.ledgers).glob("*.jsonl")):
        raise ValueError(
            f"{settings.output} holds weights that clients have paid for, and there is no ledger in {nodes.ledgers}: "
            "put the ledgers back, or give another --output for a training of clients that have spent nothing."
        )
    users = sorted(mind.read(settings.data, title_length=8, body_length=16).by_user())
    refuse_more_than(len(users), settings.clients)
    for partition, user in enumerate(users[: settings.clients]):
        path = Path(nodes.config(settings, partition)["ledger"])
        if path.exists() and path.stat().st_size:
            accounting.refuse_another(ledger.read(path), user)


def describe_spending(nodes: Nodes) -> str:
    """What the client that spent most has spent, from the ledgers alone."""
    chains = [ledger.read(path) for path in sorted(Path(nodes.ledgers).glob("*.jsonl"))]
    if not chains:
        return f"no client has answered: there is no ledger in {nodes.ledgers}"
    most = max(chain.epsilon(nodes.budget_delta) for chain in chains)
    return (
        f"epsilon = {round_up(most):g} at delta = {nodes.budget_delta:g} for one click of the client that spent "
        f"most, in all the rounds that the {len(chains)} ledgers in {nodes.ledgers} hold"
    )


def simulate(settings: FederatedSettings, nodes: Nodes) -> None:
    """Run the apps in Flower's simulation engine and end its processes, whatever happens."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from flwr.simulation import run_simulation

    from tfdp_rec.federated import build, flower

    settings = build.write_initial(settings)
    Path(nodes.ledgers).mkdir(parents=True, exist_ok=True)

    def join(context: Any) -> Any:
        return build.participant(settings, nodes.config(settings, int(context.node_config["partition-id"])))

    client = flower.client_app(join, lambda context: settings.secure)
    server = flower.server_app(lambda context: settings)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    start = {"init_args": {"num_cpus": min(2, os.cpu_count() or 1), "include_dashboard": False}}
    try:
        run_simulation(server, client, settings.clients, backend_config=resources | start)
    finally:
        import ray

        ray.shutdown()


def write_app(folder: Path, settings: FederatedSettings) -> None:
    """Writes a Flower app: a pyproject.toml that names this package's two apps and holds the settings."""
    from tfdp_rec.federated.build import write_initial

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(APP + write_initial(settings).as_toml(), encoding="utf-8")
