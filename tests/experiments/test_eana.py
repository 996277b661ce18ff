"""The studies at toy size: every cell runs, a stopped study goes on, the folder holds what was promised."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.eana import cells, kg, movielens
from experiments.eana.__main__ import main
from experiments.study import spent

MOVIES = movielens.Sizes(users=300, movies=120, width=4, batch_size=16, steps=12, per_repeat=1, references=64,
                         negatives=20, test_users=40, events_each=25)  # fmt: skip
ENTITIES = kg.Sizes(individuals=400, vocabulary=200, topics=5, width=4, batch_size=16, steps=12, per_repeat=1,
                    max_repeats=5, references=64, negatives=20, test_individuals=30,
                    speed_width=4, speed_steps=3)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(movielens, "QUICK", MOVIES)
    monkeypatch.setattr(kg, "QUICK", ENTITIES)


@pytest.mark.slow
def test_movielens_writes_its_folder_and_resumes(tiny, tmp_path, capsys, monkeypatch):
    out = tmp_path / "study"
    command = ["movielens", "--quick", "--out", str(out), "--noise", "0.01", "--epsilon", "0"]
    assert main([*command, "--mechanisms", "SGD"]) == 0
    before = {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    assert sorted(before) == ["SGD-0.json"]
    assert main([*command, "--mechanisms", "SGD", "LazyDPSGD"]) == 0
    after = {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    assert {name: after[name] for name in before} == before and "LazyDPSGD-0.01-0.json" in after
    results = {r["mechanism"]: r for r in json.loads((out / "results.json").read_text())}
    assert results["SGD"]["epsilon"] is None
    assert results["LazyDPSGD"]["epsilon"] > 0
    assert results["LazyDPSGD"]["noise_multiplier"] == pytest.approx(0.16)
    for result in results.values():
        assert result["steps"] == 12
        assert {f"precision@{k}" for k in (1, 5, 10, 20)} <= set(result["metrics"])
        assert list(result["exposure"]) == ["1", "2", "3", "4", "5", "10", "20", "50", "100"]
        assert max(max(v) for v in result["exposure"].values()) <= 6  # log2 of 64 references
    for figure in ("figure_4.png", "figure_5.png"):
        assert (out / figure).read_bytes()[:4] == b"\x89PNG"
    assert "| LazyDPSGD, 0.01 | 0.16 |" in (out / "report.md").read_text()
    assert set(json.loads((out / "table_3.json").read_text())["study"]) == {"SGD", "LazyDPSGD"}
    assert "LazyDPSGD" in capsys.readouterr().out


@pytest.mark.slow
def test_a_folder_with_other_settings_is_refused(tiny, tmp_path, capsys):
    out = ["--out", str(tmp_path / "study"), "--quick", "--mechanisms", "SGD"]
    assert main(["movielens", *out]) == 0
    assert main(["movielens", *out, "--steps", "5"]) == 2
    assert "steps" in capsys.readouterr().err


@pytest.mark.slow
def test_kg_measures_speed_and_exposure(tiny, tmp_path):
    out = tmp_path / "study"
    arguments = ["--noise", "0.01", "--epsilon", "0", "--mechanisms", "SGD", "LazyDPSGD", "--speed", "300"]
    assert main(["kg", "--quick", "--out", str(out), *arguments]) == 0
    table = json.loads((out / "table_3.json").read_text())
    assert set(table) == {"study", "300"}
    assert all(table["300"][name]["steps_per_second"] > 0 for name in kg.SPEED_WAYS)
    assert (out / "figure_6.png").exists() and (out / "figure_7.png").exists()
    results = json.loads((out / "results.json").read_text())
    assert list(results[0]["exposure"]) == ["1", "2", "3", "4", "5"]
    assert "Table 3" in (out / "report.md").read_text()


def test_kg_reads_files_with_public_vocabularies(tiny, tmp_path):
    from experiments.eana.timelines import named_timelines, write_timelines
    from experiments.generated.knowledge_graph import FEATURES, SyntheticKG

    made = SyntheticKG(300, 100, num_topics=5)
    data = write_timelines(named_timelines(made), tmp_path / "people.jsonl")
    for feature in FEATURES:
        (tmp_path / f"{feature}.txt").write_text("\n".join(f"{feature[0]}{n}" for n in range(1, 101)))
    task = kg.make_task(ENTITIES, str(data), str(tmp_path))
    assert task.canaries.features["unigrams"].shape == (5, 20, 8)
    batch = task.fetch(np.array([0, 200, task.sampling.num_units - 1]))
    assert batch["entities"].shape == (3, 20, 4) and task.negatives()["negatives"].shape == (20,)


def test_noise_of_a_budget_spends_it_and_no_more():
    task = movielens.make_task(MOVIES, None)
    (cell,) = cells.cells_of(task, ["DPSGD"], [], epsilon=2.0, seeds=1)
    assert cell.label == "ε = 2" and cell.name == "DPSGD-epsilon2-0"
    optimizer = cells.optimizer_of(task, cell)
    assert 1.9 < spent(optimizer, task.sampling, task.delta, task.steps) <= 2.0


def test_cells_of_all_seeds_and_noises():
    task = dataclasses.replace(movielens.make_task(MOVIES, None))
    found = cells.cells_of(task, ["SGD", "EANA"], [0.001, 0.01], epsilon=0, seeds=2)
    assert [cell.title for cell in found] == ["SGD", "EANA, 0.001", "EANA, 0.01"] * 2
    assert len({cell.name for cell in found}) == 6


@pytest.mark.parametrize("arguments, words", [
    (["movielens", "--noise", "-1"], "--noise"),
    (["movielens", "--seeds", "0"], "--seeds"),
    (["movielens", "--steps", "0"], "--steps"),
    (["movielens", "--learning-rate", "0"], "--learning-rate"),
    (["movielens", "--width", "0"], "--width"),
    (["movielens", "--epsilon", "-3"], "--epsilon"),
    (["movielens", "--noise", "--epsilon", "0"], "--noise or --epsilon"),
    (["kg", "--data", "x.jsonl"], "--vocabularies"),
    (["kg", "--quick", "--vocabulary", "20", "--speed"], "num_topics"),
    (["movielens", "--quick", "--data", "/nowhere"], "/nowhere"),
])  # fmt: skip
def test_wrong_arguments_are_answered_in_one_line(arguments, words, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
