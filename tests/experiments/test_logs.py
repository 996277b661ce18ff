"""The measurement of logs runs, and says a line for each thing."""

import pytest

from experiments.logs.__main__ import main


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
