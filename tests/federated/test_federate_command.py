"""`tfdp-rec federate`: arguments and the written app."""

import importlib.util
import json
import math
import tomllib

import pytest

from tfdp_rec.cli import federate, main
from tfdp_rec.datasets.mind.generated import SyntheticNews


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers")
    SyntheticNews(num_users=30, num_news=60, num_days=3, candidates=6, history_length=6).write(folder)
    return folder


@pytest.mark.parametrize(
    "arguments, complaint",
    (
        ("--simulate 2", "--data must be a folder"),
        ("--simulate 2 --data {readers} --output model.h5", "--output must end in .npz"),
        ("--simulate 2 --data {readers} --method best", "--method must be one of"),
        ("--simulate 2 --data {readers} --encoder bert", "--encoder must be one of"),
        ("--simulate 2 --data {readers} --method published --budget-epsilon 3", "no privacy bound"),
        ("--simulate 2 --data {readers} --budget-epsilon 3", "--budget-epsilon needs --ledgers"),
        ("--simulate 0 --data {readers}", "--simulate must be at least 1|Flower is missing"),
        ("--data {readers}", "one of the arguments"),
    ),
)
def test_wrong_arguments_exit_with_two_and_one_line(arguments, complaint, readers, capsys):
    try:
        code = main(["federate", *arguments.format(readers=readers).split()])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and len(error.strip().splitlines()) == 1
    assert any(part in error for part in complaint.split("|")), error


def test_a_missing_flower_is_named(readers, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tfdp-rec\\[federated\\]"):
        federate._check({name: value for name, (value, _) in federate._SETTINGS.items()} | {"data": str(readers)})


def test_a_written_app_holds_every_setting_and_its_initial_weights(readers, tmp_path):
    settings = {name: value for name, (value, _) in federate._SETTINGS.items()}
    settings |= {"data": str(readers), "output": str(tmp_path / "out.npz"), "secure": True, "dim": 8}
    federate.write_app(tmp_path / "app", settings)
    flower = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert set(flower["config"]) == set(settings) and flower["config"]["budget_epsilon"] == math.inf
    assert federate._written_secure(tmp_path / "app") is True
    code = (tmp_path / "app" / "private_rec_app.py").read_text()
    assert all(f"{name} = both" in code for name in ("client_app", "server_app"))
    compile(code, "private_rec_app.py", "exec")
    model, _ = federate._world(json.dumps(settings))
    weights = federate._load(flower["config"]["initial"], model)
    assert [w.shape for w in weights] == [tuple(v.shape) for v in model.trainable_variables]
