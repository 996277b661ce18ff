"""`--mechanism auto`: when it trains; users that no sum and no step has; a choice that is paid for, and made once."""

import dataclasses
import itertools
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from checker import checked
from job.conftest import COLUMNS, cut_at, results_of, table, train

from tfdp_rec.core.claim.ledger import Ledger, Snapshot, read
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.job.budget import COMPARED_SUMS, ITEMS, Budget
from tfdp_rec.job.evaluation import Evaluation, NewItemExamples
from tfdp_rec.job.recommenders import comparison
from tfdp_rec.job.run_state import MadeRecommender
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.users import split_users
from tfdp_rec.privacy import noise_of_one_release
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.sums.private_comparison import Comparison

AUTO = JobSettings(mechanism=("auto",), batch_size=10, user="u", item="i", time="t")
ITEMS_OF = 40


def log_of(users=120, seed=0, rows=6, changed=None):
    """A log of users with a few items each; of one user, `changed`, other items, or a single one."""
    rng = np.random.default_rng(seed)
    found = {"u": [], "i": [], "t": []}
    for user in range(users):
        items = 1 + rng.permutation(ITEMS_OF)[:rows]
        other = 1 + rng.permutation(ITEMS_OF)[:rows]
        for time, item in enumerate(other if (user, "other") == changed else items):
            if (user, "one") != changed or not time:
                found["u"].append(f"user-{user}"), found["i"].append(int(item)), found["t"].append(time)
    return Interactions.read(found, user="u", item="i", time="t", items=range(1, 1 + ITEMS_OF))


# Whether it trains, and on whom.


def test_it_trains_where_there_are_enough_users_for_the_noise_and_an_order():
    for epsilon in (1.0, 8.0):
        least = comparison._LEAST_USERS * noise_of_one_release(epsilon, 1e-6) / 0.8
        asked = dataclasses.replace(AUTO, epsilon=epsilon)
        assert comparison.resolve(asked, int(least) + 1, 1e-6, True) == asked
        for users, ordered, more in (
            (int(least) - 1, True, {}), (10**8, False, {}), (10**8, True, {"order": "no"}),
            (10**8, True, {"features": "features.csv"}),
        ):  # fmt: skip
            mechanism = ("auto", "adam", "spectral")
            found = comparison.resolve(dataclasses.replace(asked, mechanism=mechanism, export="auto", **more), users,
                                       1e-6, ordered)  # fmt: skip
            assert found.mechanism == ("spectral", "adam") and found.released_name == "spectral"
    assert AUTO.released_name == "auto"


def test_no_compared_user_is_in_another_part_and_a_user_stays_in_a_part():
    few, many = log_of(300), log_of(400)
    parts = [split_users(log, AUTO) for log in (few, many)]
    names = [
        {part: {log.unit_ids[int(n)].as_py() for n in getattr(users, part)} for part in ("train", "test", "compared")}
        for log, users in zip((few, many), parts)
    ]
    for log, found in zip((few, many), names):
        assert sum(map(len, found.values())) == len(log) == len(set.union(*found.values()))
        assert 0.02 * len(log) < len(found["compared"]) < 0.09 * len(log) < len(found["test"])
    assert all(names[0][part] <= names[1][part] for part in names[0])
    assert parts[0].sampling.num_units == len(parts[0].train)
    alone = split_users(few, dataclasses.replace(AUTO, mechanism=("upon-sums",)))
    assert not len(alone.compared) and set(alone.test) == {*parts[0].test, *parts[0].compared}
    assert np.array_equal(alone.train, parts[0].train)


def test_sums_lose_a_fiftieth_of_their_precision_and_the_choice_has_a_hundredth():
    budget = Budget(8.0, 1e-6)
    assert budget.noise(COMPARED_SUMS) ** -2 == pytest.approx(0.98 * budget.sums**-2)
    assert budget.comparison.noise_multiplier**-2 == pytest.approx(0.01 * budget.sums**-2)
    assert list(budget.releases(COMPARED_SUMS)) == [ITEMS, COMPARED_SUMS]


# The choice, of a job that has what it needs of one.


class Model:
    """Gives each item the same score in every context; a start is asked by `scores`, as sums are."""

    def __init__(self, best, seen=()):
        self.best, self.seen = best, seen

    def __call__(self, contexts):
        for each in self.seen:
            each()
        return np.tile(-np.abs(np.arange(1, 1 + ITEMS_OF) - self.best).astype(np.float32), (len(contexts), 1))

    scores = __call__


@pytest.fixture
def job(tmp_path):
    log = log_of()
    users = split_users(log, AUTO)
    users = dataclasses.replace(users, compared=users.train[:60], train=users.train[60:])
    with Ledger(tmp_path / "ledger.jsonl", "user", Snapshot(len(log), "user, item, time")) as ledger:
        state = types.SimpleNamespace(ledgers={"auto": ledger})
        yield types.SimpleNamespace(state=state, users=users, budget=Budget(8.0, 1e-6), settings=AUTO, log=log)


def choose(job, end, start=None, log=None):
    log = log or job.log
    tests = Evaluation(NewItemExamples(log, job.users.test), 0, 7)
    material = types.SimpleNamespace(log=log, users=job.users, tests=tests)
    made = MadeRecommender(end, end, steps=3)
    return comparison.choose(job, material, start or Model(1), made)


def noted(job):
    return [line["label"] for line in job.state.ledgers["auto"].lines if line["kind"] == "note"]


@pytest.mark.parametrize("better", [True, False])
def test_what_the_choice_says_leaves_and_it_is_kept(job, monkeypatch, better):
    monkeypatch.setattr(comparison, "private_comparison", lambda *_, **__: Comparison(better, 9.5, 6.8, None))
    end, start = Model(20), Model(1)
    for _ in range(2):
        found = choose(job, end, start)
        assert found.model is (end if better else start) and found.steps == 3
        assert np.array_equal(found.scores(np.zeros([1, 20], int)), (end if better else start)([[]]))
        monkeypatch.setattr(comparison, "private_comparison", lambda *_, **__: 1 / 0)  # never asked again
    said = comparison.words(job)
    assert "on 60 users" in said and "grew by 9.5" in said and said.endswith("trained model" if better else "paid for")


def test_it_is_paid_once_with_the_noise_that_is_drawn_and_begun_before_a_user_is_asked(job, monkeypatch):
    drawn, seen, ledger, whole = [], [], job.state.ledgers["auto"], comparison.private_comparison
    monkeypatch.setattr(comparison, "private_comparison", lambda *a, **k: drawn.append((a, k)) or whole(*a, **k))
    for _ in range(2):
        comparison.pay(job)
    assert [paid.event for paid in ledger.paid] == [job.budget.comparison]
    choose(job, Model(20, [lambda: seen.append(noted(job))]))
    assert seen and all(each == [comparison._BEGUN] for each in seen)
    assert noted(job) == [comparison._BEGUN, comparison.CHOICE]
    ((units, *_), given) = drawn[0]
    noise = job.budget.comparison.noise_multiplier
    deviation = (noise**2 + len(units) / 10) ** 0.5  # of the noise, and of the chance which users are compared
    assert given == {"noise_multiplier": noise, "threshold": pytest.approx(2 * deviation)}
    assert units is job.users.compared


def test_a_choice_that_was_cut_off_is_not_made_again_and_the_sums_leave(job):
    def killed():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        choose(job, Model(20, [killed]))
    start, asked = Model(1), []
    found = choose(job, Model(20, [lambda: asked.append(1)]), start)
    assert found.model is start and not asked and "cut off" in comparison.words(job)


@pytest.mark.parametrize("change", ["other", "one"])
def test_no_user_moves_the_value_of_another(job, monkeypatch, change):
    found = []

    def ask(units, start, end, **_):
        found.append(np.array([start(), end()]))
        return Comparison(False, 0.0, 0.0, None)

    monkeypatch.setattr(comparison, "private_comparison", ask)
    for user in [None, *(int(job.log.unit_ids[int(unit)].as_py()[5:]) for unit in job.users.compared[:20])]:
        notes = {}  # of a ledger of its own
        job.state.ledgers["auto"] = types.SimpleNamespace(
            notes=lambda label, notes=notes: notes.get(label, []),
            note=lambda label, said, notes=notes: notes.setdefault(label, []).append(said),
        )
        choose(job, Model(20), Model(1), log_of(changed=(user, change)))
    whole, *others = found
    assert 0.2 < whole.mean() < 0.8 and len(others) == 20
    moved = [np.flatnonzero((whole != other).any(axis=0)).tolist() for other in others]
    assert all(places in ([], [place]) for place, places in enumerate(moved)) and sum(map(len, moved)) > 3
    if change == "one":  # a user without an example
        assert not any(other[:, place].any() for place, other in enumerate(others))


# The command.


@pytest.mark.slow
@pytest.mark.parametrize("better", [True, False])
def test_a_run_pays_for_sums_a_choice_and_steps_and_one_of_two_leaves(tmp_path, monkeypatch, better):
    pa.parquet.write_table(table(users=800, rows=12_000), tmp_path / "log.parquet")
    monkeypatch.setattr(comparison, "_LEAST_USERS", 10)
    whole = comparison.private_comparison
    monkeypatch.setattr(
        comparison, "private_comparison", lambda *a, **k: whole(*a, **k)._replace(end_is_better=better)
    )
    small = ["--steps", "6", "--batch-size", "80", "--width", "4", "--mechanism", "auto", "--order", "yes"]
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        cut_at(patch, 4)
        assert train("--data", tmp_path / "log.parquet", *COLUMNS, *small, "--quiet", "--out", run) == 130
    assert train("--out", run, "--resume", "--quiet") == 0
    ledger = read(run / "release" / "ledger.jsonl")
    labels = [label for label, _ in itertools.groupby(paid.label for paid in ledger.paid)]
    assert labels == [
        "private vocabulary", "private sums to better by training", "metrics of held-out units",
        "comparison on held-out units", "training",
    ]  # fmt: skip
    spent = ledger.epsilon(1e-6)
    assert 7.9 < spent <= 8.0 and checked(run / "release" / "ledger.jsonl", 1e-6, tmp_path) == pytest.approx(
        spent, abs=1e-3
    )
    assert ledger.steps == 6 and results_of(run)["auto"]["epsilon"] == pytest.approx(spent)
    said = (run / "release" / "statement.txt").read_text()
    assert "Compared" in said and ("trained" in said.split("what leaves is")[1]) == better
    assert (run / "release" / "model.keras").exists() == better
    card = (run / "release" / "card.md").read_text()
    assert said in card and ("model.keras`" in card) == better
    assert SpectralRecommender.load(run / "release" / "released.npz").recommend([[]], k=3)[0].shape == (1, 3)


def test_a_log_of_few_users_has_private_sums_with_all_of_the_budget_and_is_told_why(tmp_path, capsys):
    pa.parquet.write_table(table(users=800, rows=12_000), tmp_path / "log.parquet")
    (tmp_path / "features.csv").write_text("sku,kind\nsku-1,red\nsku-2,red\n")
    asked = [*COLUMNS, "--features", tmp_path / "features.csv", "--mechanism", "auto", "--out", tmp_path / "run"]
    assert train("--data", tmp_path / "log.parquet", *asked) == 0
    assert comparison.WHY_SUMS in capsys.readouterr().out
    assert list(results_of(tmp_path / "run"))[-1] == "spectral"
    ledger = read(tmp_path / "run" / "release" / "ledger.jsonl")
    assert [paid.label for paid in ledger.paid] == [
        "private vocabulary", "private sums", "metrics of held-out units"
    ]  # fmt: skip
    assert comparison.WHY_SUMS in (tmp_path / "run" / "private" / "report.md").read_text()


@pytest.mark.parametrize("option", [["--days", "2"], ["--sampling", "shuffled"], ["--local", "1", "1"]])
def test_what_no_training_upon_sums_goes_with_is_refused_before_the_log_is_read(tmp_path, capsys, option):
    asked = ["--mechanism", "auto", *option, "--out", tmp_path / "run", "--quiet"]
    assert train("--users", 600, "--movies", 150, *asked) == 2
    said = capsys.readouterr().err
    assert option[0] in said and said.count("\n") == 1 and not (tmp_path / "run").exists()
