"""`tfdp-rec track`: what a run promises goes to MLflow, and nothing else unless it is asked for."""

import importlib.util
import json
import sys

import pytest

from tfdp_rec.cli import main

SAID = "Guarantee:      (epsilon = 7.25, delta = 1e-06)-differential privacy.\nProtected unit: one user.\n"


@pytest.fixture
def run(tmp_path):
    """A run folder, as `tfdp-rec train` leaves it."""
    for name in ("release/servable/variables", "private"):
        (tmp_path / "spring" / name).mkdir(parents=True)
    files = {"statement.txt": SAID, "ledger.jsonl": "{}\n", "card.md": "# A card\n", "released.npz": "sums"}
    files |= {"servable/saved_model.pb": "a graph", "servable/variables/variables.index": "weights"}
    for name, text in files.items():
        (tmp_path / "spring" / "release" / name).write_text(text)
    for name in ("report.html", "results.json", "config.json"):
        (tmp_path / "spring" / "private" / name).write_text("recall of users")
    return tmp_path / "spring"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """MLflow's file store, and what is in it: metrics and artifacts of each run by the run's name."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()

    def found(experiment):
        client = mlflow.MlflowClient(uri)
        (kept,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
        files = {each.path: client.download_artifacts(kept.info.run_id, each.path) for each in
                 client.list_artifacts(kept.info.run_id)}  # fmt: skip
        return kept, {name: open(path).read() for name, path in files.items()}

    yield uri, found
    mlflow.set_tracking_uri("")


@pytest.mark.slow
def test_the_promise_is_tracked_and_the_report_stays(run, store, capsys):
    uri, found = store
    assert main(["track", str(run), "--uri", uri, "--experiment", "clicks"]) == 0
    kept, files = found("clicks")
    assert kept.data.metrics == {"epsilon": 7.25, "delta": 1e-6} and not kept.data.params
    assert files == {"statement.txt": SAID, "ledger.jsonl": "{}\n", "card.md": "# A card\n"}
    assert kept.info.run_name == "spring" and kept.info.run_id in capsys.readouterr().out
    assert "recall" not in json.dumps(kept.data.to_dictionary())


@pytest.mark.slow
def test_the_report_is_tracked_where_it_is_asked_for_and_no_promise_is_no_number(run, store):
    uri, found = store
    (run / "release" / "statement.txt").write_text("Guarantee:      none: this is not private.\n")
    assert main(["track", str(run), "--uri", uri, "--report"]) == 0
    kept, files = found("tfdp-rec")
    assert kept.data.metrics == {} and set(files) == {"statement.txt", "ledger.jsonl", "card.md", "report.html"}


@pytest.mark.slow
def test_what_mlflow_refuses_is_one_line(run, store, capsys, monkeypatch):
    uri, _ = store
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    assert main(["track", str(run), "--uri", uri + "2"]) == 2
    assert "error: MLflow refuses: " in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["release/statement.txt", "release/ledger.jsonl", "private/report.html"])
def test_a_run_that_has_not_ended_is_not_tracked(run, missing, capsys):
    (run / missing).unlink()
    assert main(["track", str(run), "--report"]) == 2
    assert f"{run / missing} is not there: give the folder of a run that has ended." in capsys.readouterr().err


def test_the_extra_that_is_missing_is_named(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["track", str(run)]) == 2
    assert "tfdp-rec[mlflow]" in capsys.readouterr().err
