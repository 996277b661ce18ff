"""`python -m experiments.bench clipping`: figures for every contestant, and contestants that compute the same step."""

import json

import numpy as np
import pytest

from experiments.bench import clipping
from experiments.bench.__main__ import main


@pytest.mark.slow
def test_figures_are_printed_and_written(tmp_path, capsys):
    path = tmp_path / "figures.json"
    command = f"clipping dlrm --repeats 2 --batch-size 4 --rows 10 --contestants bookkeeping --json {path}"
    assert main(command.split()) == 0
    printed, found = capsys.readouterr().out, json.loads(path.read_text())
    assert set(found) == {"sparse-sgd", "bookkeeping"} and found["sparse-sgd"]["ratio"] == 1.0
    assert "bookkeeping" in printed and all(np.isfinite(v) for row in found.values() for v in row.values())


def test_wrong_contestants(capsys):
    assert main("clipping dlrm --contestants sgd".split()) == 2
    assert "--contestants must be among" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main("clipping dlrm --repeats 0".split())


def test_a_ratio_is_taken_within_a_round():
    own, reference = [(20.0, 2.0), (40.0, 4.0), (90.0, 3.0)], [(10.0, 1.0), (20.0, 4.0), (30.0, 1.0)]
    found = clipping.summed_up(own, reference)
    assert found["ratio"] == 2.0 and found["CPU ratio"] == 2.0 and found["median ms"] == 40.0
