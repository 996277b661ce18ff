"""The sequence study at toy size; generated users follow the transitions of real ones."""

import json

import numpy as np
import pytest

from experiments.generated.walks import Walks
from experiments.sequences.__main__ import main
from experiments.sequences.report import _difference
from experiments.sequences.settings import Grid, Sizes
from experiments.sequences.trainings import Trainings, cells_of, packed, unpacked

RNG = np.random.default_rng(0)
RING = [(RNG.integers(0, 20) + np.arange(RNG.integers(5, 15))) % 20 + 1 for _ in range(200)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ring.txt"
    path.write_text("".join(f"{user} {item}\n" for user, items in enumerate(RING, 1) for item in items))
    return path


def test_walks_follow_real_transitions_and_repeat_nothing():
    found = Walks(RING, longest=8).users(2000, seed=3)
    assert all(len(set(user)) == len(user) <= 8 for user in found)
    steps = np.concatenate([np.diff(user) % 20 for user in found])
    assert np.mean(steps == 1) > 0.85 and np.mean(steps == 1) < 1.0


@pytest.mark.slow
def test_walks_of_a_seed_are_the_same_for_every_count():
    few, many = (Walks(RING, longest=8).users(count, seed=3) for count in (10, 50_010))
    assert all(np.array_equal(one, other) for one, other in zip(few, many))
    other = Walks(RING, longest=8).users(10, seed=4)
    assert not all(np.array_equal(one, two) for one, two in zip(few, other))
    assert not np.array_equal(many[0], many[50_000])


def test_what_is_asked_is_neither_told_nor_counted():
    for validate in (False, True):
        protocol = Trainings(Sizes(asked=50), RING, 20, own=True, validate=validate)._asked(200)
        assert len(protocol.counted) == 200 and len(protocol.told) == 50
        for user in range(50):
            whole = RING[user].tolist()
            back = 2 if validate else 1
            assert protocol.target[user] == whole[-back] and protocol.told[user].tolist() == whole[:-back]
            assert protocol.counted[user].tolist() == whole[: -back - 1]


def test_differences_are_of_the_same_users():
    """Two seeds of a method that finds what the sums find, and one user more of eight."""
    hits = np.array([1.0, 0, 1, 0, 0, 1, 0, 1])
    base = {"epsilon": 8.0, "users": 8, "asked": 8}
    results = [{**base, "method": "sums", "hits": packed(hits)}]
    results += [{**base, "method": "SASRec", "hits": packed(np.maximum(hits, np.eye(8)[1]))} for _ in range(2)]
    assert np.array_equal(unpacked(packed(hits), 8), hits)
    assert _difference(results, "SASRec", 8.0, 8) == "+0.1250 ± 0.1250"
    assert _difference(results, "recent items", 8.0, 8) == ""


def test_cells_without_privacy_stand_once():
    cells = cells_of(Grid(users=(100, 10), epsilons=(1.0, 8.0), seeds=2))
    assert [cell.users for cell in cells] == sorted(cell.users for cell in cells)
    ten = [(cell.method, cell.epsilon, cell.seed) for cell in cells if cell.users == 10]
    assert len(ten) == len(set(ten)) == 2 * 5 * 2 + 1 + 1 + 2
    assert ("popularity", 0.0, 0) in ten and ("SASRec", 0.0, 1) in ten and ("sums", 0.0, 1) not in ten


@pytest.mark.slow
def test_the_study_runs_spends_its_epsilon_and_goes_on(file, tmp_path, capsys):
    arguments = [str(file), "--real", "--epsilons", "8", "--out", str(tmp_path / "study"), "--steps", "4"]
    arguments += ["--width", "4", "--history", "4", "--adam-steps", "200", "--negatives", "10"]
    assert main(arguments) == 0
    results = json.loads((tmp_path / "study" / "results.json").read_text())
    assert len(results) == 8 and all(0 <= result["HR@10"] <= 1 for result in results)
    spent = [result["epsilon spent"] for result in results if "epsilon spent" in result]
    assert len(spent) == 4 and all(7.9 < epsilon <= 8.0 for epsilon in spent)
    by = {(result["method"], result["epsilon"]): result["HR@10"] for result in results}
    assert by["SASRec", 0.0] > by["popularity", 0.0] + 0.1  # of 20 items, most are in the history
    assert (tmp_path / "study" / "users.png").stat().st_size > 5000
    assert "| 8 | SASRec upon sums | " in (tmp_path / "study" / "report.md").read_text()
    capsys.readouterr()
    assert main(arguments) == 0
    assert "1 of" not in capsys.readouterr().out
    assert main([*arguments, "--width", "8"]) == 2
    assert "other settings (width)" in capsys.readouterr().err
