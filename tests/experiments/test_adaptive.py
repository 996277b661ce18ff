"""The study of adaptive tables, in little."""

import json

import pytest

from experiments.adaptive import trainings
from experiments.adaptive.__main__ import main

SMALL = ["--examples", "400", "--test-examples", "300", "--largest-table", "20", "--batch-size", "32", "--steps", "3"]


@pytest.mark.slow
def test_each_contestant_is_tuned_then_judged_and_what_is_there_stays(tmp_path, monkeypatch, capsys):
    few = [c for c in trainings.CONTESTANTS if c.name in ("DPSGD, Adagrad", "AdaFEST, Adagrad")]
    monkeypatch.setattr(trainings, "CONTESTANTS", few)
    args = ["--out", str(tmp_path), *SMALL, "--seeds", "2", "--epsilons", "3"]
    assert main(args) == 0
    cells = sorted((tmp_path / "cells").iterdir())
    assert len(cells) == 2 * (4 + 2)
    for path in cells:
        found = json.loads(path.read_text())
        assert 2.5 < found["epsilon"] < 3.001 and 0 < found["test"] < 1
    page = (tmp_path / "report.md").read_text()
    assert "DPSGD, Adagrad" in page and "ε = 3" in page
    before = [path.stat().st_mtime_ns for path in cells]
    assert main(args) == 0
    assert [path.stat().st_mtime_ns for path in cells] == before
