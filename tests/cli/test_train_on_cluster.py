"""`tfdp-rec train --local` and `--cluster`: the main job through real servers; what cannot be is refused at once."""

import json
import subprocess
import sys

import pytest

from tfdp_rec.cli import main

SMALL = "--users 600 --movies 150 --steps 4 --batch-size 60 --width 4 --hidden 3 --negatives 40 --quiet --epsilon 2"
SMALL = SMALL.split()


@pytest.mark.slow
def test_the_main_job_trains_on_local_servers_and_releases(tmp_path):
    folder = tmp_path / "run"
    command = ["train", *SMALL, "--mechanism", "lazydpsgd", "--local", "1", "2", "--out", str(folder)]
    # A process of its own: what TensorFlow connects to, it stays connected to.
    done = subprocess.run(
        [sys.executable, "-m", "tfdp_rec.cli", *command], capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Failed to remove" not in done.stderr, "pages about servers that are gone, as they should be"
    assert {p.name for p in folder.iterdir()} >= {"report.md", "servable", "model.keras", "results.json"}
    assert not (folder / "timelines").exists()
    results = {r["mechanism"]: r for r in json.loads((folder / "results.json").read_text())}
    assert results["lazydpsgd"]["steps"] == 4 and 0 < results["lazydpsgd"]["epsilon"] <= 2
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert "recall@10" in lines[-1] and lines[-1]["step"] == 4


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--local", "0", "2"], "at least one worker and one server"),
        (["--cluster", "{folder}/nowhere.json"], "No such file"),
        (["--cluster", "TF_CONFIG"], "this process is worker 0 of the cluster; start it with: tfdp-rec server"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, says, tmp_path, capsys, monkeypatch):
    jobs = {"worker": ["a:1"], "ps": ["a:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 0}}))
    given = [argument.format(folder=tmp_path) for argument in arguments]
    assert main(["train", *SMALL, *given, "--out", str(tmp_path / "run")]) == 2
    errors = capsys.readouterr().err
    assert says in errors and errors.count("\n") == 1 and not (tmp_path / "run").exists()
