"""`tfdp-rec federate`: private federated training of a news recommender, over Flower."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from tfdp_rec.federated.settings import Settings
from tfdp_rec.settings import add_options, chosen

HELP = """\
  tfdp-rec federate --simulate 8 --data FOLDER     all clients in Flower's simulation engine
  tfdp-rec federate --processes 2 --data FOLDER    a SuperLink and SuperNodes, real processes on loopback
  tfdp-rec federate --write-app APP --data FOLDER  a Flower app, to be run as docs/federated.md says

FOLDER holds MIND's news.tsv and behaviors.tsv. Epsilon is per round and per clicked item; rounds add up, and
--budget-epsilon makes clients refuse what goes beyond. Needs the extra  tfdp-rec[federated].
"""

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
    how.add_argument("--processes", type=int, metavar="N", help="run N clients as real processes on loopback")
    how.add_argument("--write-app", type=Path, metavar="FOLDER", help="write a Flower app and stop")
    add_options(parser, Settings)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    settings = _whole_paths(_checked(chosen(args, Settings())))
    if args.write_app is not None:
        write_app(args.write_app, settings)
        print(f"wrote a Flower app to {args.write_app}; docs/federated.md says how to run it")
        return 0
    flag, count = ("simulate", args.simulate) if args.simulate is not None else ("processes", args.processes)
    if count < 1:
        raise ValueError(f"--{flag} must be at least 1, got {count}.")
    settings = dataclasses.replace(settings, clients=count)
    return simulate(settings) if flag == "simulate" else over_processes(settings)


def _checked(settings: Settings) -> Settings:
    if not Path(settings.data).is_dir() or not settings.data:
        raise ValueError(f"--data must be a folder with news.tsv and behaviors.tsv, got {settings.data!r}.")
    if importlib.util.find_spec("flwr") is None:
        raise ValueError("Flower is missing; install it with  pip install 'tfdp-rec[federated]'.")
    return settings


def _whole_paths(settings: Settings) -> Settings:
    """Flower's processes run in folders of their own."""
    whole = {name: getattr(settings, name) for name in ("data", "output", "initial", "ledgers")}
    changes: dict[str, Any] = {name: str(Path(path).resolve()) for name, path in whole.items() if path}
    return dataclasses.replace(settings, **changes)


def simulate(settings: Settings) -> int:
    """Run the apps in Flower's simulation engine and end its processes, whatever happens."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from flwr.simulation import run_simulation

    from tfdp_rec.federated import build, flower
    from tfdp_rec.federated.app import client_app, server_app

    settings = build.with_initial(settings)
    client = flower.client_app(lambda context: client_app.join(context, settings), lambda context: settings.secure)
    server = flower.server_app(lambda context: server_app.training_of(settings))
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    start = {"init_args": {"num_cpus": min(2, os.cpu_count() or 1), "include_dashboard": False}}
    try:
        run_simulation(server, client, settings.clients, backend_config=resources | start)
    finally:
        import ray

        ray.shutdown()
    return 0


def over_processes(settings: Settings) -> int:
    """Run a SuperLink and SuperNodes on loopback until the weights are written; end them, whatever happens."""
    from tfdp_rec.federated.loopback import Loopback

    output = Path(settings.output)
    output.unlink(missing_ok=True)
    folder = output.with_suffix(".run")
    write_app(folder / "app", settings)
    with Loopback(folder) as net:
        net.superlink()
        for client in range(settings.clients):
            net.supernode(f"client-{client}", client)
        run = net.run(folder / "app")
        while not output.exists() and not net.failed() and run.poll() is None:
            time.sleep(0.5)
        run.poll()
    if not output.exists():
        print(f"tfdp-rec federate: the run failed; its logs are in {folder}", file=sys.stderr)
        return 1
    print(f"trained weights in {output}; logs in {folder}")
    return 0


def write_app(folder: Path, settings: Settings) -> None:
    """Write a Flower app: a pyproject.toml that names this package's two apps and holds the settings.

    Args:
        folder: Where to; made if missing.
        settings: They become the app's run configuration.
    """
    from tfdp_rec.federated.build import with_initial

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(APP + with_initial(settings).as_toml(), encoding="utf-8")
