"""`tfdp-rec federate`: arguments and the written app."""

import dataclasses
import importlib.util
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from experiments.generated.news_readers import SyntheticNews
from tfdp_rec.cli import federate, main
from tfdp_rec.core.claim.events import REPLACE, PureDpEvent
from tfdp_rec.core.claim.ledger import BrokenLedger, read
from tfdp_rec.federated import build
from tfdp_rec.federated.accounting import UNIT
from tfdp_rec.federated.participant import DATA
from tfdp_rec.federated.settings import FederatedSettings, Nodes
from tfdp_rec.privacy import Ledger


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers")
    SyntheticNews(num_users=30, num_news=60, num_days=3, candidates=6, history_length=6).write(folder)
    return folder


def test_the_total_is_that_of_the_ledgers_of_who_spent_most(tmp_path):
    nodes = Nodes(ledgers=str(tmp_path), budget_delta=1e-6).complete_from(FederatedSettings())
    assert "no client has answered" in federate.describe_spending(nodes)
    for client, rounds in enumerate((1, 3)):
        with Ledger(tmp_path / f"client-{client}.jsonl", UNIT, DATA, REPLACE) as ledger:
            for _ in range(rounds):
                ledger.pay(PureDpEvent(1.0))
    said = federate.describe_spending(nodes)
    assert re.match(r"epsilon = 3(\.00\d+)? at delta = 1e-06 for one click", said) and "2 ledgers" in said


@pytest.mark.parametrize("partition", (-1, 30, 0.5, "0"))
def test_a_partition_stands_for_one_user_by_one_number(partition, readers, tmp_path):
    """-1 was the last user once more, behind a second budget."""
    settings = FederatedSettings(data=str(readers))
    node = Nodes(ledgers=str(tmp_path)).complete_from(settings).config(settings, partition)
    with pytest.raises(ValueError, match="two budgets|one number"):
        build.participant(settings, node)


def test_a_ledger_is_of_one_user_whatever_number_the_user_has_in_todays_data(readers, tmp_path, capsys):
    """A new user before the others moved each to the next ledger: 19.6 was told of 29.2, under a budget of 20."""
    shutil.copytree(readers, tmp_path / "grown")
    behaviours = tmp_path / "grown" / "behaviors.tsv"
    first = behaviours.read_text().splitlines()[0].split("\t")
    behaviours.write_text(behaviours.read_text() + "\t".join([first[0], "A", *first[2:]]) + "\n")
    settings = FederatedSettings(data=str(readers), output=str(tmp_path / "out.npz"), dim=8)
    settings = dataclasses.replace(settings, epsilon=4.0, label_epsilon=4.0)
    nodes = Nodes(budget_epsilon=20.0).complete_from(settings)
    Path(nodes.ledgers).mkdir()
    for client in range(2):
        build.participant(settings, nodes.config(settings, client)).pay_round()
    told = federate.describe_spending(nodes)
    build.participant(settings, nodes.config(settings, 0)).pay_round()  # the same user again
    grown = dataclasses.replace(settings, data=str(tmp_path / "grown"))
    for client in range(2):
        with pytest.raises(BrokenLedger, match="another user"):
            build.participant(grown, nodes.config(grown, client)).pay_round()
    assert federate.describe_spending(nodes) != told and len(read(Path(nodes.ledgers) / "client-1.jsonl").paid) == 2
    asked = ["--data", grown.data, "--output", grown.output, "--dim", "8", "--budget-epsilon", "20"]
    assert main(["federate", "--simulate", "2", *asked]) == 2
    assert "of another user" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, complaint",
    (
        ("--simulate 2", "--data must be a folder"),
        ("--simulate 2 --data {readers} --output model.h5", "--output must end in .npz"),
        ("--simulate 2 --data {readers} --method best", "argument --method: invalid choice"),
        ("--simulate 2 --data {readers} --encoder bert", "argument --encoder: invalid choice"),
        ("--simulate 2 --data {readers} --method published", "argument --method: invalid choice"),
        ("--simulate 2 --data {readers} --budget-epsilon 0", "--budget-epsilon must be positive"),
        ("--simulate 2 --data {readers} --round-epsilon nan", "--round-epsilon must be positive"),
        ("--write-app app --data {readers} --budget-epsilon 3", "own node's configuration"),
        ("--simulate 31 --data {readers}", "two budgets"),
        ("--simulate 0 --data {readers}", "--simulate must be at least 1"),
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


@pytest.mark.parametrize("ledger, words", [("", "there is no ledger in"), ("client-0.jsonl", "tfdp-rec[federated]")])
def test_weights_whose_ledgers_are_gone_are_not_trained_over(readers, tmp_path, capsys, monkeypatch, ledger, words):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no training begins
    (tmp_path / "model.npz").touch()
    (tmp_path / "ledgers").mkdir()
    if ledger:
        (tmp_path / "ledgers" / ledger).touch()
    asked = ["--data", str(readers), "--output", str(tmp_path / "model.npz"), "--ledgers", str(tmp_path / "ledgers")]
    assert main(["federate", "--simulate", "2", *asked]) == 2
    assert words in capsys.readouterr().err and (tmp_path / "model.npz").exists()


def test_a_missing_flower_is_named(readers, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["federate", "--simulate", "2", "--data", str(readers)]) == 2
    assert "tfdp-rec[federated]" in capsys.readouterr().err


def test_settings_check_themselves_wherever_they_come_from():
    with pytest.raises(ValueError, match="--encoder must be one of nrms, naml, plm"):
        FederatedSettings(encoder="bert")
    assert FederatedSettings.from_run({"dim": 7, "of another app": 1}) == FederatedSettings(dim=7)


def test_a_written_app_holds_every_setting_and_its_initial_weights(readers, tmp_path):
    settings = FederatedSettings(data=str(readers), output=str(tmp_path / "out.npz"), secure=True, dim=8)
    federate.write_app(tmp_path / "app", settings)
    flower = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    carried = FederatedSettings.from_run(flower["config"])
    assert carried == dataclasses.replace(settings, initial=carried.initial)
    assert not {"budget_epsilon", "ledgers", "methods"} & set(flower["config"]), "terms are each node's own"
    assert flower["components"] == {
        "serverapp": "tfdp_rec.federated.app.server_app:app",
        "clientapp": "tfdp_rec.federated.app.client_app:app",
    }
    model, _ = build.world(settings)
    weights = build.load(carried.initial, model)
    assert [w.shape for w in weights] == [tuple(v.shape) for v in model.trainable_variables]
