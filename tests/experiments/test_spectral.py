"""The study of private sums: forms of files, splits, and a run from files to the report."""

import numpy as np
import pytest

from experiments.spectral import data, generated
from experiments.spectral.__main__ import main


@pytest.fixture
def events(tmp_path):
    """Two tastes of 30 items; 90 users of eight events."""
    rng = np.random.default_rng(0)
    users = [rng.choice(30, 8, replace=False) + 30 * (user % 2) + 101 for user in range(90)]
    pairs, lines = tmp_path / "pairs.txt", tmp_path / "lines.txt"
    pairs.write_text("".join(f"{user} {item}\n" for user, items in enumerate(users) for item in items))
    lines.write_text("".join(f"{user} {' '.join(map(str, items))}\n" for user, items in enumerate(users)))
    rated = tmp_path / "rated.inter"
    rows = [f"{user}\t{item}\t5\t{8 - at}" for user, items in enumerate(users) for at, item in enumerate(items)]
    rated.write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "\n".join(rows) + "\n")
    return {"pairs": pairs, "lines": lines, "rated": rated}


def test_every_form_of_file_tells_the_same(events):
    _, pairs, items = data.read(str(events["pairs"]))
    _, lines, _ = data.read(str(events["lines"]))
    _, rated, _ = data.read(str(events["rated"]))
    assert items == 60 and len(pairs) == 90
    assert all((a == b).all() and (a == c[::-1]).all() for a, b, c in zip(pairs, lines, rated))


def test_users_apart_shares_no_user_and_no_item_of_an_answer(events):
    split = data.users_apart(str(events["pairs"]))
    assert (len(split.counted), len(split.given)) == (72, 18)
    assert all(len(given) == 6 and len(hidden) == 2 for given, hidden in zip(split.given, split.relevant))
    assert not any(set(given) & set(hidden) for given, hidden in zip(split.given, split.relevant))


def test_leave_two_out_counts_neither(events):
    test = data.leave_two_out(str(events["pairs"]))
    validation = data.leave_two_out(str(events["pairs"]), for_test=False)
    for counted, given, last, told, before in zip(
        test.counted, test.given, test.relevant, validation.given, validation.relevant
    ):
        assert (len(counted), len(given), len(told)) == (6, 7, 6)
        assert given[-1] == before[0] and last[0] not in given and (told == counted).all()


def test_generated_histories_have_their_shape():
    shape = generated.Shape(2000, 3000, 9, 1.0, 4, 20, 1.0, 8, 30, 0.4, 0.3)
    made = generated.histories(shape, seed=1)
    lengths = np.diff(made.offsets)
    assert len(made) == 2000 and made.numbers.min() >= 1 and made.numbers.max() <= 3000
    assert 5 <= np.median(lengths) <= 10
    assert all(len(set(items)) == len(items) for items in np.split(made.numbers, made.offsets[1:-1]))


@pytest.mark.slow
def test_a_run_writes_its_table(events, tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    arguments = ["quality", "--data", str(events["pairs"]), "--epsilon", "20", "--seeds", "1", *out]
    assert main(arguments) == 0
    page = (tmp_path / "run" / "report.md").read_text()
    rows = {line.split(" | ")[1]: line.split(" | ")[3] for line in page.splitlines() if line.startswith("| pairs")}
    private = {"DP popularity", "spectral cut", "ridge filter", "alternating", "spectral"}
    assert set(rows) == {"popularity", *private, "EASE"}
    assert float(rows["spectral"].split()[0]) > float(rows["popularity"].split()[0])
    capsys.readouterr()
    assert main(arguments) == 0 and "0 of" not in capsys.readouterr().out  # nothing is done twice


def test_a_size_is_measured(tmp_path, capsys):
    sizes = ["--users", "3000", "--items", "500", "--mean", "5", "--out", str(tmp_path)]
    assert main(["size", *sizes]) == 0
    assert "3000 users, 500 items" in capsys.readouterr().out


def test_alternating_minimisation_finds_groups_without_noise():
    from scipy import sparse

    from experiments.spectral.alternating import Alternating

    rng = np.random.default_rng(0)
    groups = rng.integers(2, size=400)
    has = (rng.random([400, 20]) < np.where((np.arange(20) < 10) == groups[:, None], 0.5, 0.02)).astype(float)
    settings = Alternating(width=3, rounds=4)
    items = settings.fit(sparse.csr_matrix(has), has.sum(axis=0), 1e-6, np.random.default_rng(1))
    users = settings.users(sparse.csr_matrix(has), items)
    scores = users @ items.T
    assert (scores[:, :10].mean(axis=1) > scores[:, 10:].mean(axis=1))[groups == 1].mean() > 0.97
    assert (scores[:, :10].mean(axis=1) < scores[:, 10:].mean(axis=1))[groups == 0].mean() > 0.97


@pytest.mark.slow
def test_heads_are_compared_on_the_same_counts(events, tmp_path, capsys):
    out = ["--out", str(tmp_path / "run"), "--sizes", "wide", "1", "2"]
    assert main(["heads", "--data", str(events["pairs"]), "--epsilon", "20", "--seeds", "2", *out]) == 0
    row = (tmp_path / "run" / "report.md").read_text().splitlines()[-1].split(" | ")
    sizes = [int(cell.split(":")[0].strip("| ")) for cell in row[2:]]
    assert 16 <= sizes[1] <= sizes[0] <= sizes[2] <= 60 and sizes[2] in (2 * sizes[1], 60)
    assert row[3].count("(+0.0% ± 0.0%)") == 2  # beside itself
