"""The news study at toy size: tables, plots, and a study that goes on where it stopped."""

import json

import pytest

from experiments.news import command, settings, trainings
from experiments.news.__main__ import main


@pytest.mark.slow
def test_the_study_runs_end_to_end_and_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "QUICK", settings.Sizes(users=60, news=80, dim=8, rounds=3, cohort=8, seeds=1))
    folder = tmp_path / "study"
    arguments = ["--quick", "--out", str(folder), "--encoders", "nrms"]
    assert main(arguments) == 0
    page = (folder / "report.md").read_text()
    assert all(title in page for title in ("Table 1", "Table 2", "figure_4.png", "figure_7.png"))
    rows = json.loads((folder / "table_1.json").read_text())
    assert len(rows) == 14 and all(0 <= row["AUC"] <= 100 for row in rows)
    bound = {row["method"]: row["all rounds"] for row in rows}
    assert bound["PrivateRec, published (claim does not hold)"] is None
    assert bound["PrivateRec, corrected, user encoder untrained"] >= 10 and bound["Untrained"] == 0
    assert bound["DP-FedRec"] >= 10 and bound["DP-FedRec, Gaussian"] >= 10
    limited = [row for row in rows if "at most 1 answers" in row["method"]]
    assert len(limited) == 2 and all(row["all rounds"] <= 8.01 for row in limited)
    for number in range(4, 8):
        assert (folder / f"figure_{number}.png").stat().st_size > 5000
    monkeypatch.setattr(trainings.Trainings, "measure", lambda *arguments: pytest.fail("a finished cell ran again"))
    assert main(arguments) == 0
    capsys.readouterr()
    assert main([*arguments, "--rounds", "4"]) == 2
    assert "other settings (rounds)" in capsys.readouterr().err
    assert main([*arguments, "--rounds", "0"]) == 2
