"""`tfdp-rec federate`: private federated training of a news recommender, over Flower."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from tfdp_rec.files import writing

HELP = """\
  tfdp-rec federate --simulate 8 --data FOLDER     all clients in Flower's simulation engine
  tfdp-rec federate --processes 2 --data FOLDER    a SuperLink and SuperNodes, real processes on loopback
  tfdp-rec federate --write-app APP --data FOLDER  a Flower app, to be run as docs/federated.md says

FOLDER holds MIND's news.tsv and behaviors.tsv. Epsilon is per round and per clicked item; rounds add up, and
--budget-epsilon makes clients refuse what goes beyond. Needs the extra  tfdp-rec[federated].
"""

_METHODS = ("private", "private+user", "published", "gradient")
_ENCODERS = ("nrms", "naml", "plm")
_SETTINGS: dict[str, tuple[Any, str]] = {
    "data": ("", "folder with news.tsv and behaviors.tsv; every user of it is a client"),
    "output": ("federated.npz", "where the trained weights go"),
    "initial": ("", "weights to start from, as such a run writes them; left out, new ones, kept beside the output"),
    "method": ("private", "private, private+user, published or gradient (DP-FedRec)"),
    "encoder": ("nrms", "nrms, naml or plm (a small transformer)"),
    "dim": (32, "width of a news vector"),
    "num_basis": (5, "basis vectors B"),
    "temperature": (0.1, "temperature of the attention"),
    "epsilon": (10.0, "privacy of one round's attention (or gradient); inf for none"),
    "delta": (1e-5, "failure probability of one round"),
    "padding": (0.2, "probability that a click is padded"),
    "label_epsilon": (10.0, "privacy of one label; inf for none"),
    "negatives": (4, "negatives with each label"),
    "history": (20, "clicks of history"),
    "samples": (4, "training clicks used of each client"),
    "l2_norm_clip": (0.05, "clip of noised gradients"),
    "rounds": (3, "rounds"),
    "clients": (4, "clients that must be there"),
    "fraction": (1.0, "share of them asked in a round"),
    "eta": (0.01, "server learning rate"),
    "secure": (False, "whether SecAgg+ masks what clients send"),
    "budget_epsilon": (math.inf, "the most a client will spend in all"),
    "ledgers": ("", "folder of the clients' training ledgers; empty keeps none"),
    "seed": (0, "seed of the initial weights (not of any noise)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--simulate", type=int, metavar="N", help="run N clients in Flower's simulation engine")
    how.add_argument("--processes", type=int, metavar="N", help="run N clients as real processes on loopback")
    how.add_argument("--write-app", type=Path, metavar="FOLDER", help="write a Flower app and stop")
    for name, (default, text) in _SETTINGS.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"{text} [{default}]")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    settings = {name: getattr(args, name) for name in _SETTINGS}
    _check(settings)
    for name in ("data", "output", "initial", "ledgers"):
        settings[name] = str(Path(settings[name]).resolve()) if settings[name] else ""
    if args.write_app is not None:
        write_app(args.write_app, settings)
        print(f"wrote a Flower app to {args.write_app}; docs/federated.md says how to run it")
        return 0
    flag, count = ("simulate", args.simulate) if args.simulate is not None else ("processes", args.processes)
    if count < 1:
        raise ValueError(f"--{flag} must be at least 1, got {count}")
    return (simulate if flag == "simulate" else over_processes)(count, settings | {"clients": count})


def _check(settings: dict[str, Any]) -> None:
    if not settings["data"] or not Path(settings["data"]).is_dir():
        raise ValueError(f"--data must be a folder with news.tsv and behaviors.tsv, got {settings['data']!r}")
    if not settings["output"].endswith(".npz"):
        raise ValueError(f"--output must end in .npz, got {settings['output']!r}")
    for name, known in (("method", _METHODS), ("encoder", _ENCODERS)):
        if settings[name] not in known:
            raise ValueError(f"--{name} must be one of {', '.join(known)}, got {settings[name]!r}")
    if settings["method"] == "published" and math.isfinite(settings["budget_epsilon"]):
        raise ValueError("--method published has no privacy bound, so no --budget-epsilon can hold; leave it out")
    if math.isfinite(settings["budget_epsilon"]) and not settings["ledgers"]:
        raise ValueError("--budget-epsilon needs --ledgers FOLDER: without ledgers nobody counts what is spent")
    if importlib.util.find_spec("flwr") is None:
        raise ValueError("Flower is missing; install it with  pip install 'tfdp-rec[federated]'")


def with_initial(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with a file of initial weights written if none was given.

    Keras draws initial weights from a state that all threads share, so a server app that drew its own would not
    repeat them.
    """
    if settings["initial"]:
        return settings
    path = str(Path(settings["output"]).with_suffix(".initial.npz"))
    model, _ = _world(json.dumps(settings))
    _save(path, model, [_array(variable) for variable in model.trainable_variables])
    return settings | {"initial": path}


def simulate(clients: int, settings: dict[str, Any]) -> int:
    """Run the apps in Flower's simulation engine and end its processes, whatever happens.

    Args:
        clients: How many.
        settings: As the command line gives them.
    """
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from flwr.simulation import run_simulation

    client, server = apps(with_initial(settings))
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    start = {"init_args": {"num_cpus": min(2, os.cpu_count() or 1), "include_dashboard": False}}
    try:
        run_simulation(server, client, clients, backend_config=resources | start)
    finally:
        import ray

        ray.shutdown()
    return 0


def over_processes(clients: int, settings: dict[str, Any]) -> int:
    """Run a SuperLink and SuperNodes on loopback until the weights are written; end them, whatever happens.

    Args:
        clients: How many SuperNodes.
        settings: As the command line gives them.
    """
    from tfdp_rec.federated.loopback import Loopback

    output = Path(settings["output"])
    output.unlink(missing_ok=True)
    folder = output.with_suffix(".run")
    write_app(folder / "app", settings)
    with Loopback(folder) as net:
        net.superlink()
        for client in range(clients):
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


def write_app(folder: Path, settings: dict[str, Any]) -> None:
    """Write the two files of a Flower app.

    Args:
        folder: Where to; made if missing.
        settings: As the command line gives them; they become the app's run configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = with_initial(settings)
    code = (
        '"""The apps of this run; their settings are in pyproject.toml."""\n\n'
        "from pathlib import Path\n\n"
        "from tfdp_rec.cli.federate import apps\n\n"
        "both = apps(app=Path(__file__).parent)\n"
        "client_app = both[0]\n"
        "server_app = both[1]\n"
    )
    (folder / "private_rec_app.py").write_text(code, encoding="utf-8")
    lines = [
        "[project]",
        'name = "private-rec-run"',
        'version = "1.0.0"',
        'license = "Apache-2.0"',
        "dependencies = []",
        "",
        "[build-system]",
        'requires = ["setuptools"]',
        'build-backend = "setuptools.build_meta"',
        "",
        "[tool.flwr.app]",
        'publisher = "local"',
        "",
        "[tool.flwr.app.components]",
        'serverapp = "private_rec_app:server_app"',
        'clientapp = "private_rec_app:client_app"',
        "",
        "[tool.flwr.app.config]",
        *(f"{name} = {_toml(value)}" for name, value in settings.items()),
        "",
    ]
    (folder / "pyproject.toml").write_text("\n".join(lines), encoding="utf-8")


def _toml(value: Any) -> str:
    return str(value) if isinstance(value, float) else json.dumps(value)


def apps(settings: dict[str, Any] | None = None, app: Path | None = None) -> tuple[Any, Any]:
    """The client app and the server app.

    Args:
        settings: As the command line gives them; None takes them from Flower's run configuration.
        app: Folder of a written app, which says whether SecAgg+ is on: that decides how the client app is put
            together, before there is a run.

    Raises:
        ValueError: If neither is given.
    """
    if settings is None and app is None:
        raise ValueError("give settings or app")
    from tfdp_rec.federated import flower

    def settings_of(context: Any) -> dict[str, Any]:
        return settings if settings is not None else dict(context.run_config)

    def join(context: Any) -> flower.Participant:
        return _participant(json.dumps(settings_of(context)), int(context.node_config["partition-id"]))

    def train(context: Any) -> flower.Training:
        chosen = settings_of(context)
        model, _ = _world(json.dumps(chosen))
        return flower.Training(
            weights=_load(chosen["initial"], model),
            rounds=chosen["rounds"],
            clients=chosen["clients"],
            fraction=chosen["fraction"],
            finish=lambda weights: _save(chosen["output"], model, weights),
            eta=chosen["eta"],
            secure=chosen["secure"],
        )

    secure = settings["secure"] if settings is not None else _written_secure(app)
    return flower.client_app(join, secure), flower.server_app(train)


def _written_secure(app: Path | None) -> bool:
    """SecAgg+ as the app's own pyproject.toml says."""
    assert app is not None
    config = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    return bool(config["tool"]["flwr"]["app"]["config"]["secure"])


@functools.cache
def _world(settings: str) -> tuple[Any, Any]:
    """Model and dataset, once a process."""
    import keras
    import numpy as np

    from tfdp_rec.datasets.mind import files as mind
    from tfdp_rec.models import news

    chosen = json.loads(settings)
    data = mind.read(chosen["data"], title_length=8, body_length=16)
    features, dim = data.catalogue.features, chosen["dim"]
    keras.utils.set_random_seed(chosen["seed"])
    words = len(data.catalogue.vocabulary)
    encoder: Any
    if chosen["encoder"] == "nrms":
        encoder = news.NRMSEncoder(words, dim, dim, 4, 16, name="news_encoder")
    elif chosen["encoder"] == "naml":
        sizes = len(data.catalogue.categories), len(data.catalogue.subcategories)
        encoder = news.NAMLEncoder(words, *sizes, dim, dim, 8, 3, 16, name="news_encoder")
    else:
        encoder = news.PLMEncoder(news.tiny_transformer(words, 8, dim), dim, 16, name="news_encoder")
    model = news.NewsRecommender(
        encoder,
        news.user_encoder(chosen["encoder"], dim, 4, 16),
        chosen["num_basis"],
        temperature=chosen["temperature"],
    )
    few = {name: value[:2] for name, value in features.items()}
    model({"news": few, "history": np.zeros((1, 2), "int32"), "candidates": np.zeros((1, 2), "int32")})
    return model, data


@functools.cache
def _update(settings: str) -> Any:
    from tfdp_rec.federated import (
        AnalyticGaussian,
        AttentionMechanism,
        LabelPermutation,
        PublishedGaussian,
        PublishedLabelPermutation,
        local,
    )
    from tfdp_rec.federated.vector import VectorMechanism

    chosen = json.loads(settings)
    model, data = _world(settings)
    method = chosen["method"]
    calibration = PublishedGaussian() if method == "published" else AnalyticGaussian()
    padding = 0.0 if method == "gradient" else chosen["padding"]
    epsilon = math.inf if method == "gradient" else chosen["epsilon"]
    mechanism = AttentionMechanism(
        chosen["num_basis"],
        epsilon,
        chosen["delta"],
        padding=padding,
        activation="relu",
        calibration=calibration,
    )
    permute = PublishedLabelPermutation if method == "published" else LabelPermutation
    labels = permute(math.inf if method == "gradient" else chosen["label_epsilon"], chosen["negatives"])
    common = (model, data.catalogue.features, mechanism, labels, chosen["history"], chosen["samples"])
    noise = VectorMechanism(chosen["l2_norm_clip"], chosen["epsilon"], chosen["delta"])
    if method == "gradient":
        return local.GradientUpdate(*common, noise=noise)
    if method == "published":
        return local.PublishedUpdate(*common)
    return local.PrivateUpdate(*common, user_gradient=noise if method == "private+user" else None)


@functools.cache
def _participant(settings: str, partition: int) -> Any:
    from tfdp_rec.federated import flower
    from tfdp_rec.federated.cohort import client_of

    chosen = json.loads(settings)
    _, data = _world(settings)
    users = sorted(data.by_user().items())
    _, impressions = users[partition % len(users)]
    ledger = Path(chosen["ledgers"]) / f"client-{partition}.json" if chosen["ledgers"] else None
    if ledger is not None:
        ledger.parent.mkdir(parents=True, exist_ok=True)
    return flower.Participant(
        _update(settings), client_of(impressions), ledger, chosen["budget_epsilon"], chosen["delta"]
    )


def _array(variable: Any) -> Any:
    import numpy as np

    return np.array(variable)


def _load(path: str, model: Any) -> list[Any]:
    import numpy as np

    stored = np.load(path)
    return [stored[variable.path.partition("/")[2]] for variable in model.trainable_variables]


def _save(output: str, model: Any, weights: list[Any]) -> None:
    import numpy as np

    names = [variable.path.partition("/")[2] for variable in model.trainable_variables]
    with writing(output, "wb") as file:
        np.savez(file, **dict(zip(names, weights)))
