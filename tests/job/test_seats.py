"""On how many days a user's rows count: never more than k, by a list that cannot be older than the ledger."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from checker import checked
from dp_accounting import NoOpDpEvent
from job.conftest import COLUMNS, table, train

from tfdp_rec.data import Interactions
from tfdp_rec.datasets.log import Catalogue
from tfdp_rec.job import pipeline
from tfdp_rec.job.budget import LABELS, SUMS, Budget
from tfdp_rec.job.seats import DaySeats, allowed
from tfdp_rec.privacy import Ledger, Snapshot
from tfdp_rec.spending.ledger import read

BUDGET = Budget(8.0, 1e-6, days=6, public=True, days_per_user=3)


class Stream:
    """Days of a run without its sums: seats are taken, and the day is paid for unless it is cut off."""

    def __init__(self, folder, budget=BUDGET):
        self.folder, self.budget, self.seated = folder, budget, list[set]()
        folder.mkdir(exist_ok=True)

    def ledger(self):
        ledger = Ledger(self.folder / "ledger.jsonl", "user", Snapshot(10, "rows"), data_changed=True)
        self.budget.decided(ledger)
        return ledger

    def take(self, users, mine="", pay=True):
        log = Interactions.read({"u": users, "i": [1] * len(users)}, user="u", item="i")
        with self.ledger() as ledger:
            seats = DaySeats.taken(self.folder, ledger, self.budget, log, mine)
            if pay:
                event = self.budget.releases(SUMS)[SUMS]
                ledger.pay(self.budget.due(ledger, event, LABELS[SUMS]), label=LABELS[SUMS])
        taken = set(np.array(log.unit_ids.to_pylist(), object)[seats.of_users])
        if pay and not mine:
            self.seated.append(taken)
        return taken, seats.id


def slow_allowed(budget, day, phase):
    steps = (budget.days_per_user - 1) * (day - 1) / (budget.days - 1) if budget.days > 1 else 0
    return min(budget.days_per_user, 1 + int(np.floor(steps + phase)))


# What a user can have.


@pytest.mark.parametrize("days, most", [(1, 1), (2, 1), (6, 3), (30, 8), (30, 30), (7, 6)])
def test_seats_come_one_by_one_and_never_more_than_there_are(days, most):
    budget = Budget(8.0, 1e-6, days=days, public=True, days_per_user=most)
    phases = np.array([0.0, 0.3, 0.8, np.nextafter(1, 0)])
    found = [allowed(budget, day, phases) for day in range(1, days + 1)]
    for day, each in enumerate(found, 1):
        assert each.tolist()[:3] == [slow_allowed(budget, day, phase) for phase in phases[:3]]
    assert (found[0] == 1).all() and (found[-1] == most).all() and np.max(found) == most
    assert (np.diff(found, axis=0) >= 0).all()


def test_no_user_counts_on_more_days_than_the_bound(tmp_path):
    """Random days with cuts, resumptions and lost lists: what was paid for never holds a user more than k times."""
    rng = np.random.default_rng(5)
    for trial in range(6):
        stream = Stream(tmp_path / str(trial))
        while len(stream.seated) < BUDGET.days:
            users = rng.choice(12, rng.integers(1, 12), replace=False).tolist()
            cut = rng.random()
            if cut < 0.3:  # before anything is paid for
                taken, seats = stream.take(users, pay=False)
                if cut < 0.15:  # and resumed
                    assert stream.take(users, mine=seats, pay=False)[0] == taken
            else:
                stream.take(users)
        counted = [user for seated in stream.seated for user in seated]
        assert max(map(counted.count, set(counted))) == BUDGET.days_per_user
        with pytest.raises(ValueError, match="all of the 6 days that the first one decided on"):
            stream.take([1])
        paid = read(stream.folder / "ledger.jsonl").paid
        assert [each.event == NoOpDpEvent() for each in paid] == 3 * [False] + 3 * [True]


def test_a_users_first_day_counts_whenever_it_is(tmp_path):
    stream = Stream(tmp_path / "run")
    for day in range(BUDGET.days):
        assert stream.take([7, 100 + day])[0] >= {100 + day}
    assert sum(7 in seated for seated in stream.seated) == BUDGET.days_per_user


def test_one_user_changes_no_other_users_seats(tmp_path):
    """Neighbours by brute force: each user of a stream left out on all days, in turn."""
    rng = np.random.default_rng(1)
    days = [rng.choice(8, 6, replace=False).tolist() for _ in range(BUDGET.days)]
    whole = Stream(tmp_path / "whole")
    for users in days:
        whole.take(users)
    for gone in range(8):
        less = Stream(tmp_path / f"less-{gone}")
        for users in days:
            less.take([user for user in users if user != gone] + [99])  # no day without a user
        assert [seated - {99} for seated in less.seated] == [seated - {gone} for seated in whole.seated]


# The list.


def test_a_day_that_paid_for_nothing_takes_no_seats(tmp_path):
    stream = Stream(tmp_path / "run")
    for _ in range(9):
        assert stream.take([1, 2], pay=False)[0] == {1, 2}
    assert [stream.take([1])[0] for _ in range(BUDGET.days)].count({1}) == BUDGET.days_per_user


def test_a_list_that_was_written_and_not_noted_is_the_one_before(tmp_path):
    stream, path = Stream(tmp_path / "run"), tmp_path / "run" / "seats.parquet"
    _, seats = stream.take([1, 2])
    ledger = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    stream.take([3], pay=False)
    (tmp_path / "run" / "ledger.jsonl").write_bytes(ledger)  # as if killed between the two
    assert stream.take([1, 2], mine=seats)[0] == {1, 2}
    assert pa.parquet.read_table(path)["user"].to_pylist() == [1, 2, 3]
    assert stream.take([3, 4])[0] == {3, 4}
    assert sorted(pa.parquet.read_table(path)["user"].to_pylist()) == [1, 2, 3, 4]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("harm", ["gone", "older", "another", "torn"])
def test_a_list_that_is_not_the_ledgers_last_is_refused(tmp_path, harm):
    stream, other = Stream(tmp_path / "run"), Stream(tmp_path / "other")
    path = tmp_path / "run" / "seats.parquet"
    stream.take([1, 2])
    older = path.read_bytes()
    stream.take([1, 2])
    stream.take([1, 2])
    other.take([1])
    if harm == "gone":
        path.unlink()
    else:
        found = {"older": older, "another": (tmp_path / "other" / path.name).read_bytes(), "torn": older[:90]}
        path.write_bytes(found[harm])
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    with pytest.raises(ValueError, match="not known on which days users' rows counted"):
        stream.take([1])
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before


def test_a_day_is_not_resumed_after_another_has_taken_seats(tmp_path):
    stream = Stream(tmp_path / "run")
    _, first = stream.take([1], pay=False)
    stream.take([1, 2])
    with pytest.raises(ValueError, match="Another day has taken seats"):
        stream.take([1], mine=first)


def test_users_who_would_not_be_known_again_are_refused(tmp_path):
    stream = Stream(tmp_path / "run")
    stream.take([1, 2])
    with pytest.raises(ValueError, match="the ids of users were whole numbers on the days before, and are text here"):
        stream.take(["1", "two"])


# The price.


@pytest.mark.parametrize("public", [True, False])
def test_noise_is_that_of_a_users_days(public):
    few, all_days = (Budget(8.0, 1e-6, days, public, days_per_user=k) for days, k in ((30, 5), (5, None)))
    assert few.sums == all_days.sums and few.items == all_days.items
    assert few.sums < 0.5 * Budget(8.0, 1e-6, 30, public).sums


def test_without_seats_no_day_is_free(tmp_path):
    budget = Budget(8.0, 1e-6, days=2, public=True)
    event = budget.releases(SUMS)[SUMS]
    with Ledger(tmp_path / "ledger.jsonl", "user", Snapshot(10, "rows")) as ledger:
        for _ in range(4):
            assert budget.due(ledger, event, LABELS[SUMS]) == event
            ledger.pay(event, label=LABELS[SUMS])


# The job.


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Four days of a run in which a user's rows count on two."""
    root = tmp_path_factory.mktemp("seats")
    for number in range(4):
        pa.parquet.write_table(table(users=2500, rows=30_000, seed=number), root / f"{number}.parquet")
    seen, made, find, asked = [], pipeline.private_sums.released, pipeline.private_items, []

    def released(run, users):
        inside = [run.log.unit_ids[int(user)].as_py() for user in np.flatnonzero(users._inside)]
        found = made(run, users)
        seen.append((set(inside), asked[-1] - run.seats.sum(), found))
        return found

    def items(log, **options):
        asked.append(sum(part.num_users for part in log.found()[0].parts(Catalogue(range(1, 10_000)))))
        return find(log, **options)

    pipeline.private_sums.released, pipeline.private_items = released, items
    options = ["--days", 4, "--days-per-user", 2, "--quiet"]
    try:
        assert train("--data", root / "0.parquet", *COLUMNS, "--out", root / "run", *options) == 0
        for number in (1, 2, 3):
            assert train("--continue", root / "run", "--data", root / f"{number}.parquet", "--quiet") == 0
    finally:
        pipeline.private_sums.released, pipeline.private_items = made, find
    return root, seen


def test_days_beyond_those_of_a_user_cost_nothing_more(stream, tmp_path):
    root, seen = stream
    ledger = root / "run" / "release" / "ledger.jsonl"
    paid = read(ledger).paid
    free = [each.event == NoOpDpEvent() for each in paid]
    assert [each.label for each in paid] == 4 * ["private vocabulary", "private sums"]
    assert free == 4 * [False] + 4 * [True]
    spent = read(ledger).epsilon(1e-6)
    assert 7.99 < spent <= 8 and checked(ledger, 1e-6, tmp_path) == pytest.approx(spent, abs=1e-3)
    said = " ".join((root / "run" / "release" / "statement.txt").read_text().split())
    assert "4 so far, of at most 4, of which a user's rows count on 2 at most" in said and "nearly" in said
    assert train("--continue", root / "run", "--data", root / "0.parquet", "--quiet") == 2


def test_sums_are_of_users_with_seats_and_their_number_is_noisy(stream):
    root, seen = stream
    counted = list(itertools.chain.from_iterable(users for users, _, _ in seen))
    assert max(map(counted.count, set(counted))) == 2 and len(seen) == 4
    for users, others, made in seen:
        assert not others  # items, too, are found among users with seats
        assert made.users_private and 0 < abs(made.num_users - len(users)) < 6 * 10 * made.noise_multiplier
        assert made.split.counts**-2 + made.split.gram**-2 == pytest.approx(0.99 * made.noise_multiplier**-2)
    assert len(seen[0][0]) > 1500 > len(seen[2][0])  # all are new on the first day


def test_what_is_released_knows_neither_seats_nor_their_number(stream):
    root, seen = stream
    number = str(len(seen[-1][0]))
    for path in (root / "run" / "release").rglob("*"):
        assert path.name != "seats.parquet"
    for name in ("statement.txt", "card.md"):
        assert number not in (root / "run" / "release" / name).read_text()
    notes = [json.loads(line) for line in (root / "run" / "release" / "ledger.jsonl").read_text().splitlines()]
    notes = [line["settings"] for line in notes if line.get("label") == "seats of a day"]
    assert [note["day"] for note in notes] == [1, 2, 3, 4] and all(set(note) == {"day", "list"} for note in notes)
    assert len(pa.parquet.read_table(root / "run" / "private" / "seats.parquet")) > 2000


@pytest.mark.parametrize(
    "options, says",
    [
        (["--days-per-user", 3, "--days", 2], "--days-per-user must be at most --days, 2, got 3"),
        (["--days-per-user", 2, "--days", 3, "--mechanism", "spectral", "lazydpsgd"], "--days-per-user is of spectral"),
        (["--days-per-user", 0, "--days", 3], "--days-per-user must be positive"),
    ],
)
def test_settings_that_mean_nothing_are_refused_in_one_line(log, tmp_path, capsys, options, says):
    assert train("--data", log, *COLUMNS, "--out", tmp_path / "run", *options) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "run").exists()
