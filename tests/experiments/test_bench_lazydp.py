"""The speed benchmark: contestants do the same work, turns are summed up rightly, workers answer, plots appear."""

import argparse
import dataclasses

import numpy as np
import pytest
import seeding

from experiments.bench import lazydp, measures
from experiments.bench.cases import Case
from experiments.bench.contestants import Contestant
from experiments.bench.plots import plot
from experiments.bench.workers import Worker

TINY = {"label": "tiny", "workload": "rmc1", "table_sizes": (7, 9), "batch_size": 4, "pooling": 2}


def contestant(name, **changes):
    seeding.seed(5)
    return Contestant(name, Case(**{**TINY, **changes}))


def weights(found):
    return found.model.get_weights()  # settled


@pytest.mark.parametrize("workload", [{}, {"workload": "two-tower", "table_sizes": (30,), "pooling": 5}])
def test_the_two_baselines_make_the_same_steps(workload):
    keras_sgd, sparse_sgd = contestant("keras-sgd", **workload), contestant("sparse-sgd", **workload)
    start = weights(keras_sgd)
    for found in (keras_sgd, sparse_sgd):
        found.step()
        found.step()
    for one, other, old in zip(weights(keras_sgd), weights(sparse_sgd), start):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
        assert np.any(one != old)


@pytest.mark.slow
def test_a_strategy_for_comparison_is_a_step_that_is_admitted():
    found = contestant("dp-sgd-f", table_sizes=(7,), pooling=1)
    found.step()  # refused, if the strategy had anything written beside the weights
    assert all(np.all(np.isfinite(w)) for w in weights(found))


@pytest.mark.slow
def test_every_contestant_steps_and_knows_its_memory():
    for name in ("dp-sgd-book", "dp-sgd-b", "eana", "lazy", "lazy-each-step"):
        found = contestant(name, table_sizes=(7,), pooling=1)
        start = weights(found)
        assert len(found.timed(2)) == 2
        assert all(np.any(a != b) for a, b in zip(weights(found), start))
        assert measures.memory(found)["peak_megabytes"] > 100


@pytest.mark.slow
def test_the_breakdown_adds_up_and_settling_settles():
    found = contestant("lazy")
    parts = measures.breakdown(found)
    total = sum(value for name, value in parts.items() if name != "step" and not name.startswith("alone"))
    assert total == pytest.approx(parts["step"])
    assert sum(name.startswith("alone") for name in parts) == 5
    assert measures.settle(found)["values"] == (7 + 9) * 32
    assert found.model.optimizer.releasable
    with pytest.raises(ValueError, match="nothing to settle"):
        measures.settle(contestant("eana", table_sizes=(7,), pooling=1))


@pytest.mark.slow
def test_workers_take_commands_and_say_when_they_die():
    with Worker("sparse-sgd", Case(**TINY)) as worker:
        assert "seconds" in worker.begin()
        assert len(worker.ask(steps=3)["times"]) == 3
        assert worker.ask(call="memory")["answer"]["table_megabytes"] == pytest.approx(16 * 32 * 4 / 2**20)
        with pytest.raises(OSError, match="sparse-sgd.*died"):
            worker.ask(call="no such call")


def test_ratios_are_taken_within_a_round():
    # The machine is three times as slow in the second round; the ratio is 2 all the same.
    reference = [[[1.0, 1.0], [1.0, 1.0]], [[3.0, 3.0], [3.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]]]
    own = [[[2 * wall, 4 * cpu] for wall, cpu in turn] for turn in reference]
    found = lazydp.summed_up(own, reference, apart=False)
    assert found["ratio"] == 2 and found["ratio_range"] == [2, 2] and found["processor_ratio"] == 4
    assert found["median_ms"] == 2 and found["spread_ms"] == [2, 6]
    assert "ratio" not in lazydp.summed_up(own, None, apart=False)
    assert lazydp.summed_up(own, reference, apart=True)["ratio"] == 2


def test_experiments_have_the_papers_cases():
    for experiment in lazydp.EXPERIMENTS:
        found = lazydp.cases(experiment, [96.0])
        assert found
    assert [c.batch_size for c in lazydp.cases("batch", [96.0])] == [1024, 2048, 4096]
    assert [c.pooling for c in lazydp.cases("pooling", [96.0])] == [1, 10, 20, 30]
    sizes = lazydp.cases("sizes", [96.0, 960.0])
    assert [sum(c.table_sizes) * 512 // 10**6 for c in sizes] == [95, 959]


@pytest.mark.slow
def test_the_command_from_end_to_end(tmp_path, monkeypatch, capsys):
    case = Case(**TINY, contestants=("sparse-sgd", "lazy"))
    monkeypatch.setattr(lazydp, "cases", lambda *_: [case])
    parser = argparse.ArgumentParser()
    lazydp.add_arguments(parser)
    options = ["sizes", "--rounds", "2", "--steps", "2", "--json", str(tmp_path / "a.json")]
    assert lazydp.run(parser.parse_args([*options, "--plot", str(tmp_path / "a.png")])) == 0
    assert "lazy" in capsys.readouterr().out
    assert (tmp_path / "a.json").stat().st_size > 500 and (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="rounds"):
        lazydp.run(parser.parse_args(["sizes", "--rounds", "0"]))


def test_plots_are_drawn(tmp_path):
    figures = {"median_ms": 2.0, "spread_ms": [1.0, 3.0]}
    case = dataclasses.asdict(lazydp.mlperf(96))
    plot("sizes", [{"case": case, "contestants": {"sparse-sgd": figures, "lazy": figures}}], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("changes", [{"contestants": ("lazy", "adam")}, {"workload": "resnet"}])
def test_unknown_names_are_refused(changes):
    with pytest.raises(ValueError, match="must be one of"):
        Case(**{**TINY, **changes})
