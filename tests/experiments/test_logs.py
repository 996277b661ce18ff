"""The measurement of logs runs, and says a line for each thing."""

import pytest

from experiments.logs.__main__ import main
from experiments.logs.stream import Stream
from tfdp_rec.core.claim.ledger import read


@pytest.mark.slow
def test_a_small_log_from_files_to_batches(tmp_path, capsys):
    log, into = str(tmp_path / "log"), str(tmp_path / "prepared")
    assert main(["generate", "--rows", "2e4", "--items", "200", "--out", log]) == 0
    assert (
        main(["size", log, "--into", into, "--batch-size", "64", "--batches", "2", "--steps", "2", "--epsilon", "8"])
        == 0
    )
    said = capsys.readouterr().out
    for line in ("20000 rows read", "grouped by user", "found again", "private vocabulary", "training steps"):
        assert line in said, line


@pytest.mark.slow
def test_answers_are_timed(capsys):
    assert main(["latency", "--items", "500", "--head", "40", "--times", "2", "--batch", "2"]) == 0
    said = capsys.readouterr().out
    for line in ("500 items", "SavedModel", "every item scored", "HTTP"):
        assert line in said, said


@pytest.mark.slow
def test_days_are_added_up_and_compared(tmp_path, capsys):
    small = ["--days", "3", "--every", "3", "--users", "4000", "--seeds", "2", "--out", str(tmp_path / "days")]
    assert main(["days", *small]) == 0
    said = capsys.readouterr().out
    for line in ("added up, keep 0.9", "today alone", "from scratch", "frozen", "no privacy", "mean of 1 days"):
        assert line in said, said
    ledger = read(tmp_path / "days" / "ledger-1.jsonl")
    assert len(ledger.paid) == 6 and 7.99 < ledger.epsilon(1e-6) <= 8.0


def test_a_stream_is_the_same_for_the_same_seed_and_drifts():
    one, other = (list(Stream(users=400, seed=3).days(40)) for _ in range(2))
    assert all(day.equals(again) for day, again in zip(one, other))
    first, last = (set(one[day]["item"].to_pylist()) for day in (0, 39))
    assert len(first & last) < 0.7 * len(first)
    assert 0.2 < len(set(one[0]["user"].to_pylist())) / 400 < 0.4
