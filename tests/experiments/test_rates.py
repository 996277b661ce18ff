"""The study of rates, in little."""

import json

import pytest

from experiments.rates import trainings
from experiments.rates.__main__ import main

SMALL = "--users 300 --movies 200 --width 4 --steps 8 --seeds 1 --epsilons 8 --clips 1 --batches 40 --lengths 0.3 30"


@pytest.mark.slow
def test_rates_are_made_of_lengths_and_what_is_there_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "ClickModel", trainings.Towers)
    args = ["--out", str(tmp_path), *SMALL.split()]
    assert main(args) == 0
    short, long = (json.loads(path.read_text()) for path in sorted((tmp_path / "cells").iterdir()))
    assert long["rate"] / short["rate"] == pytest.approx(100) and long["loss"] > short["loss"]
    before = [path.stat().st_mtime_ns for path in sorted((tmp_path / "cells").iterdir())]
    assert main(args) == 0
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "cells").iterdir())] == before
    assert "two-tower, recall@10" in (tmp_path / "report.md").read_text()
