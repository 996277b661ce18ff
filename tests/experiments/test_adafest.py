"""The AdaFEST study: equal budgets, resuming, reading files, the plots' numbers."""

import dataclasses
import json
import types

import numpy as np
import pytest

from experiments.adafest import command, criteo_files, problems, settings, speed, trainings
from experiments.adafest.__main__ import main
from experiments.adafest.report import best_reductions, merged, report
from experiments.adafest.sentences import SyntheticText
from experiments.adafest.sparsity import gradient_sparsity
from experiments.generated.clicks import CriteoExamples, SyntheticCriteo
from experiments.study import Study
from tfdp_rec.sparse import draws

TINY = settings.Sizes(
    examples=4000, test_examples=500, batch_size=200, steps=3, hidden=(8,), delta=1e-5, days=2
)  # fmt: skip
GRID = settings.Grid(
    epsilons=(8.0,), thresholds=(3.0, 6.0), rows=(5,), draws=(10,), tuned_threshold=6.0, table_rates=(1.0, 2.0),
    dense_rates=(0.01,),
)  # fmt: skip
LOGS = SyntheticCriteo(buckets=(300, 200, 50) + (10,) * 23, seed=1)
CLICKS = problems.clicks(LOGS, TINY.hidden)
TEXT = problems.sentences(SyntheticText(vocabulary_size=500, max_length=8), width=4)


def made(sizes, problem, folder):
    quiet = Study(folder, dataclasses.asdict(sizes), say=lambda line: None)
    return trainings.Trainings(sizes, problem, quiet, lambda line: None)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return made(TINY, CLICKS, tmp_path_factory.mktemp("cells"))


@pytest.mark.slow
def test_every_training_spends_the_same_epsilon_and_is_remembered(study):
    results = study.frontier(GRID)
    assert len(results) == len(trainings.cells(GRID)) == 2 + 2 + 2 + 1 + 2 + 1
    assert all(r["epsilon_spent"] == pytest.approx(8.0, rel=5e-3) for r in results)
    by = {(r["mechanism"], r["setting"]): r for r in results}
    values = sum(s * w for s, w in zip(LOGS.buckets, study.model().embedding_widths))
    assert by["DPSGD", 0]["reduction"] == 1 and by["frozen", 0]["reduction"] is None
    assert by["exponential", 10]["values_per_step"] < values / 10
    assert by["AdaFEST", 6.0]["reduction"] >= by["AdaFEST", 3.0]["reduction"] > 1
    widths = study.model().embedding_widths
    assert by["FEST", 5]["values_per_step"] == sum(w * min(5, s) for s, w in zip(LOGS.buckets, widths))
    assert study.frontier(GRID) == results
    assert len(list(study.study.folder.glob("cells/*.json"))) == len(results)


@pytest.mark.slow
def test_the_stream_follows_the_days(study):
    results = study.stream()
    assert [len(r["score_by_day"]) for r in results] == [2] * 6
    assert all(0.3 < r["score"] < 0.9 for r in results)


@pytest.mark.slow
def test_tuning_tries_all_rates_on_examples_of_its_own(study):
    results = study.tuning(dataclasses.replace(GRID, mechanisms=("frozen", "AdaFEST")))
    assert [r["mechanism"] for r in results] == ["AdaFEST"] * 2
    assert {r["sizes"]["learning_rate"] for r in results} == {1.0, 2.0}
    validation, test = (LOGS.examples(500, part=part) for part in ("validation", "test"))
    assert (validation.categorical != test.categorical).any()


@pytest.mark.slow
def test_sentences_are_learnt(tmp_path):
    study = made(TINY, TEXT, tmp_path)
    grid = dataclasses.replace(GRID, mechanisms=("AdaFEST", "FEST", "exponential"), thresholds=(6.0,))
    results = study.frontier(grid)
    assert all(r["epsilon_spent"] == pytest.approx(8.0, rel=5e-3) for r in results)
    assert all(0.0 < r["score"] < 1.0 for r in results)
    reductions = {r["mechanism"]: r["reduction"] for r in results}
    assert reductions["FEST"] == 500 / 5 and reductions["exponential"] == 500 / 10


@pytest.mark.slow
def test_a_model_of_sentences_begins_where_public_ones_left_it():
    begun = problems.sentences(TEXT.source, width=4, public=2000)
    first, second, untrained = begun.make_model(), begun.make_model(), TEXT.make_model()
    for one, other in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    tokens, labels = TEXT.source.examples(2000, part="public").fetch(slice(None))
    loss = [float(begun.loss(labels, model(tokens))) for model in (first, untrained)]
    assert loss[0] < loss[1] - 0.01


def test_gradient_sparsity_is_the_share_of_rows_that_no_example_reads(study):
    small = dataclasses.replace(study.sizes, examples=1100)
    (row,) = gradient_sparsity(trainings.Trainings(small, study.problem, study.study), batches=2)
    assert row["batch size"] == 1024 and len(row) == 7
    assert all(0 <= share < 1 for name, share in row.items() if name != "batch size")


@pytest.mark.slow
def test_every_way_to_train_is_timed(study):
    rows = {row["way"]: row for row in speed.step_times(study, repeats=2)}
    assert set(rows) == set(speed.WAYS) and rows["SGD"]["ratio_to_sgd"] == 1.0
    assert all(row["ms"] >= row["ms_lowest_tenth"] > 0 for row in rows.values())


def test_truth_on_rows_lies_between_the_numbers_alone_and_the_truth(study):
    train, test = LOGS.examples(4000), LOGS.examples(4000, part="test")
    shares = [0.0, 0.1, 0.5, 1.1]
    found = [study.truth_on(train, test, np.full(26, share)) for share in shares]
    assert found == sorted(found, reverse=True) and found[-1] < found[0] - 0.02


def test_file_logs_split_train_validation_and_test(tmp_path):
    for day in range(2):
        criteo_files.write(LOGS, tmp_path / f"day_{day}", 30, day)
    logs = problems.FileLogs(str(tmp_path), LOGS.buckets)
    parts = [logs.examples(10, 1, part) for part in ("train", "validation", "test")]
    whole = LOGS.examples(30, 1)
    np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), whole.labels)
    with pytest.raises(ValueError, match="2 days of logs"):
        logs.examples(5, 2)
    with pytest.raises(ValueError, match="has 30 examples; the study asks for 31"):
        logs.examples(31)


def cell(mechanism, score, reduction, seed=0, epsilon=1.0):
    return {"epsilon": epsilon, "mechanism": mechanism, "setting": 1.0, "score": score, "reduction": reduction,
            "seed": seed}  # fmt: skip


def test_best_reductions_are_those_within_the_loss():
    frontier = [cell("DPSGD", 0.70, 1.0), cell("A", 0.699, 50.0), cell("A", 0.696, 200.0), cell("A", 0.6, 1e6)]
    frontier.append(cell("A", 0.7, None))  # nothing survived: no table was trained, which is no reduction
    assert best_reductions(frontier, 0.005)[1.0, "A"] == 200.0
    assert best_reductions(frontier, 0.0005)[1.0, "A"] == 1.0


def test_seeds_are_averaged_and_a_difference_has_its_error():
    runs = [cell("DPSGD", 0.70, 1.0), cell("A", 0.69, 100.0)]
    runs += [cell("DPSGD", 0.72, 1.0, seed=1), cell("A", 0.69, 50.0, seed=1)]
    rows = merged(runs, "epsilon", "mechanism", "setting")
    assert [row["score"] for row in rows] == pytest.approx([0.71, 0.69])
    assert rows[1]["reduction"] == pytest.approx(2 / (0.01 + 0.02))  # of the mean number of values
    page = report({"data": "", "sizes": {}, "frontier": runs}, "AUC")
    assert "| 0.7100 ± 0.0141 (2) |  | 1 |" in page
    assert "| 0.6900 | -0.0200 ± 0.0100 | 66.7 |" in page


def arguments(**given):
    names = ("quick", "task", "data", "parts", "epsilons", "mechanisms", "seeds", "steps")
    return types.SimpleNamespace(**{**dict.fromkeys(names), "task": "clicks", **given})


def test_arguments_become_sizes_and_a_grid():
    sizes, grid = command.settings(arguments(quick=True, seeds=3, steps=7, epsilons=[2.0]))
    assert (sizes.steps, sizes.days, grid.seeds, grid.epsilons) == (7, 3, 3, (2.0,))
    assert command.parts(arguments()) == ["frontier", "stream", "speed"]
    assert command.parts(arguments(task="text")) == ["frontier", "speed"]


@pytest.mark.parametrize("wrong, words", [
    (["--task", "text", "--data", "x"], "x has no train.tsv"),
    (["--task", "text", "--parts", "stream"], "stream"),
    (["--steps", "0"], "--steps"),
    (["--mechanisms", "SGD"], "--mechanisms"),
])  # fmt: skip
def test_wrong_arguments_are_answered_in_one_line(wrong, words, tmp_path, capsys):
    try:
        code = main([*wrong, "--out", str(tmp_path)])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_command_writes_its_report(tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.adafest.command.defaults", lambda task, quick: (TINY, GRID))
    command = ["--steps", "2", "--out", str(tmp_path), "--parts", "frontier"]
    assert main([*command, "--mechanisms", "DPSGD"]) == 0
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    more = ["--mechanisms", "DPSGD", "AdaFEST", "--thresholds", "6", "--epsilons", "8", "4"]
    assert main([*command, *more]) == 0
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert {name: after[name] for name in before} == before and len(after) == 2 * 2
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["frontier"]) == 4 and results["sizes"]["steps"] == 2
    assert (tmp_path / "frontier.png").stat().st_size > 5000
    assert "| AdaFEST |" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("noise_multiplier", [0.5, 3.0, 40.0])
def test_an_epsilon_and_its_gaussian_are_each_others_inverse(noise_multiplier):
    epsilon = trainings.gumbel_epsilon(noise_multiplier, num_survivors=50)
    assert draws.gumbel_noise_multiplier(epsilon, num_survivors=50) == pytest.approx(noise_multiplier, rel=1e-6)
    assert round(draws.gumbel_noise_multiplier(0.01, num_survivors=100), 2) == 15.96


def test_days_come_in_the_order_of_their_numbers(tmp_path):
    for name in ("day_2", "day_10.gz", *(f"day_{d}.tsv" for d in range(3, 10)), "notes.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in criteo_files.day_files(tmp_path)][::4] == ["day_2", "day_6.tsv", "day_10.gz"]


def test_missing_and_doubled_days_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="day_0"):
        criteo_files.day_files(tmp_path)
    for name in ("day_0", "day_2"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="no file for day 1"):
        criteo_files.day_files(tmp_path)
    (tmp_path / "day_0.gz").touch()
    with pytest.raises(ValueError, match="day 0 has two files"):
        criteo_files.day_files(tmp_path)


def test_frequencies_count_every_bucket():
    categorical = np.stack([np.full(26, bucket) for bucket in (7, 7, 0)])
    examples = CriteoExamples(np.zeros(3), np.zeros([3, 13]), categorical)
    counts = problems.bucket_frequencies(examples, [50] * 26)
    assert len(counts) == 26 and all(
        len(c) == 50 and c.sum() == 3 and c[0] == 1 and c.max() == 2 for c in counts
    )
