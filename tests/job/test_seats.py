"""On how many days a user's rows count: never more than k, by a list that cannot be older than the ledger."""

import functools
import itertools
import json
import re

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from checker import checked
from dp_accounting import NoOpDpEvent
from job.conftest import COLUMNS, table, train

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.claim.schemes import PoissonSampling, Sampling
from tfdp_rec.data import Interactions
from tfdp_rec.datasets.log import Catalogue
from tfdp_rec.job import pipeline
from tfdp_rec.job import seats as module
from tfdp_rec.job.budget import ITEMS, LABELS, PRETRAINING_SUMS, PRIOR, SUMS, Budget
from tfdp_rec.job.run_state import WarmStart
from tfdp_rec.job.seats import most_seats, take_seats
from tfdp_rec.privacy import Ledger, Snapshot

BUDGET = Budget(8.0, 1e-6, days=6, public=True, days_per_user=3)
BOTH = Budget(8.0, 1e-6, days=6, days_per_user=2)  # items are found, too
FEW = ["--days", 3, "--days-per-user", 2]


@functools.cache
def log_of(users):
    return Interactions.read({"u": users, "i": [1] * len(users)}, user="u", item="i")


class Stream:
    """Days of a run without its sums: seats are taken, and the day is paid for unless it is cut off."""

    def __init__(self, folder, budget=BUDGET):
        self.folder, self.budget, self.seated = folder, budget, list[set]()
        folder.mkdir(exist_ok=True)

    def ledger(self):
        ledger = Ledger(self.folder / "ledger.jsonl", "user", Snapshot(10, "rows"), data_changed=True)
        self.budget.decide(ledger)
        return ledger

    def take(self, users, mine="", pay=True):
        log = log_of(tuple(sorted(users)))
        with self.ledger() as ledger:
            seated, list_id = take_seats(self.folder, ledger, self.budget, log, mine)
            if pay:
                event = self.budget.releases(SUMS)[SUMS]
                ledger.pay(self.budget.event_due(ledger, event, LABELS[SUMS]), label=LABELS[SUMS])
        taken = set(np.array(log.unit_ids.to_pylist(), object)[seated])
        if pay and not mine:
            self.seated.append(taken)
        return taken, list_id


def slow_allowed(budget, day, phase):
    steps = (budget.days_per_user - 1) * (day - 1) / (budget.days - 1) if budget.days > 1 else 0
    return min(budget.days_per_user, 1 + int(np.floor(steps + phase)))


# What a user can have.


@pytest.mark.parametrize("days, most", [(1, 1), (2, 1), (6, 3), (30, 8), (30, 30), (7, 6)])
def test_seats_come_one_by_one_and_never_more_than_there_are(days, most):
    budget = Budget(8.0, 1e-6, days=days, public=True, days_per_user=most)
    phases = np.array([0.0, 0.3, 0.8, np.nextafter(1, 0)])
    found = [most_seats(budget, day, phases) for day in range(1, days + 1)]
    for day, each in enumerate(found, 1):
        assert each.tolist()[:3] == [slow_allowed(budget, day, phase) for phase in phases[:3]]
    assert (found[0] == 1).all() and (found[-1] == most).all() and np.max(found) == most
    assert (np.diff(found, axis=0) >= 0).all()


def killed(monkeypatch, owner, name):
    """Where a process is killed: it gets no further than a call of this."""
    monkeypatch.setattr(owner, name, lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))


class Cut(Exception):
    """The end of a process."""


class Attempts:
    """Attempts at days of one run, some of them beside each other, which end anywhere and are resumed or not."""

    def __init__(self, folder, rng):
        self.stream, self.rng, self.live = Stream(folder, BOTH), rng, []
        self.counted = {ITEMS: [], SUMS: []}  # the users of each release that was drawn

    def end(self, share):
        if self.rng.random() < share:
            raise Cut

    def go_on(self, monkeypatch):
        """Begins an attempt or resumes one, until it is cut off or done."""
        if self.live and self.rng.random() < 0.5:
            attempt = self.live[self.rng.integers(len(self.live))]
        else:
            users = self.rng.choice(7, self.rng.integers(1, 7), replace=False).tolist()
            attempt = {"users": users, "mine": "", "made": []}
            self.live.append(attempt)
        try:
            with monkeypatch.context() as patch:
                if (stop := self.rng.random()) < 0.2:
                    killed(patch, *((Ledger, "note") if stop < 0.1 else (module, "_name")))
                seated, mine = self.stream.take(attempt["users"], attempt["mine"], pay=False)
            self.end(0.1)
            attempt["mine"] = mine
            for name in (ITEMS, SUMS):
                self.end(0.1)
                if name not in attempt["made"]:
                    self.release(name, seated, attempt)
            self.live = []  # it is done: earlier attempts have gone on without it, and are refused by their marks
        except (Cut, KeyboardInterrupt):
            pass
        except ValueError as refused:
            assert "A day was begun after" in str(refused) or "are over" in str(refused)
            self.live.remove(attempt)

    def release(self, name, seated, attempt):
        with self.stream.ledger() as ledger:
            number = ledger.pay(BOTH.event_due(ledger, BOTH.releases(name)[name], LABELS[name]), label=LABELS[name])
            if self.rng.random() < 0.15:
                ledger.give_back(number, 1)
                raise Cut
        self.counted[name].append(seated)
        if self.rng.random() < 0.15:
            self.live.remove(attempt)  # it is lost, and cannot be resumed
            raise Cut
        attempt["made"].append(name)

    def check(self):
        paid = read(self.stream.folder / "ledger.jsonl").paid
        for name, releases in self.counted.items():
            costly = [each for each in paid if each.label == LABELS[name] and each.event != NoOpDpEvent()]
            counted = [user for seated in releases for user in seated]
            assert max(map(counted.count, counted), default=0) <= len(costly) <= BOTH.days_per_user


def test_no_user_counts_on_more_days_than_are_paid_for(tmp_path, monkeypatch):
    rng, most = np.random.default_rng(5), 0
    for trial in range(20):
        attempts = Attempts(tmp_path / str(trial), rng)
        for _ in range(25):
            attempts.go_on(monkeypatch)
            attempts.check()
        most = max(most, len(attempts.counted[SUMS]))
    assert most == BOTH.days


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


@pytest.mark.parametrize("where", ["before it is noted", "before it is named"])
def test_a_kill_between_the_two_writings_costs_no_seats(tmp_path, monkeypatch, where):
    stream, path = Stream(tmp_path / "run"), tmp_path / "run" / "seats.parquet"
    stream.take([1, 2])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed(patch, *((Ledger, "note") if where == "before it is noted" else (module, "_name")))
        stream.take([3], pay=False)
    (tmp_path / "run" / ".abc.seats.parquet.next").touch()  # of a process that was killed while it wrote
    assert stream.take([3, 4])[0] == {3, 4}
    assert sorted(pa.parquet.read_table(path)["user"].to_pylist()) == [1, 2, 3, 4]
    assert sorted(each.name for each in path.parent.iterdir()) == ["ledger.jsonl", "seats.parquet"]
    assert path.stat().st_mode & 0o777 == 0o600
    counted = [stream.take([1])[0] for _ in range(BUDGET.days - 2)]
    assert counted.count({1}) == BUDGET.days_per_user - 1


@pytest.mark.parametrize("harm", ["gone", "older", "another", "torn", "an older ledger", "no ledger"])
def test_a_list_that_is_not_the_ledgers_last_is_refused(tmp_path, harm):
    stream, other = Stream(tmp_path / "run"), Stream(tmp_path / "other")
    path, ledger = (tmp_path / "run" / name for name in ("seats.parquet", "ledger.jsonl"))
    stream.take([1, 2])
    older, older_ledger = path.read_bytes(), ledger.read_bytes()
    stream.take([1, 2])
    other.take([1])
    if harm == "gone":
        path.unlink()
    elif harm == "an older ledger":
        ledger.write_bytes(older_ledger)
    elif harm == "no ledger":
        ledger.unlink()
    else:
        found = {"older": older, "another": (tmp_path / "other" / path.name).read_bytes(), "torn": older[:90]}
        path.write_bytes(found[harm])
    before = ledger.read_bytes() if ledger.exists() else b""
    with pytest.raises(ValueError, match="not known on which days users' rows counted") as refused:
        stream.take([1])
    assert ("is gone" in str(refused.value)) == (harm == "gone")
    assert not before or ledger.read_bytes() == before


def test_a_day_is_not_resumed_after_a_later_one_has_paid(tmp_path):
    stream = Stream(tmp_path / "run")
    _, first = stream.take([1])
    stream.take([1, 2])
    with pytest.raises(ValueError, match="A day was begun after the one that is resumed here"):
        stream.take([1], mine=first)


def test_a_day_is_resumed_with_its_seats_after_an_attempt_that_paid_for_nothing(tmp_path):
    stream = Stream(tmp_path / "run")
    stream.take([1, 2, 3])
    seated, mine = stream.take([1, 4, 5])
    stream.take([1, 6], pay=False)
    again, mine = stream.take([1, 4, 5], mine=mine, pay=False)
    assert again == seated == {4, 5} | ({1} if 1 in seated else set())
    assert stream.take([1, 4, 5], mine=mine)[0] == seated
    held = pa.parquet.read_table(tmp_path / "run" / "seats.parquet")
    assert sorted(held["user"].to_pylist()) == sorted([1, 2, 3, *seated])
    assert stream.take([6])[0] == {6}
    assert [note["day"] for note in read(tmp_path / "run" / "ledger.jsonl").notes(module.LABEL)] == [1, 2, 3, 2, 3]


def test_texts_of_more_than_two_gigabytes_have_a_type_that_holds_them(tmp_path):
    stream = Stream(tmp_path / "run")
    stream.take(["ann", "bob"])
    assert stream.take(["ann", "cy"])[0] >= {"cy"}
    assert pa.parquet.read_table(tmp_path / "run" / "seats.parquet")["user"].type == pa.large_string()


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
            assert budget.event_due(ledger, event, LABELS[SUMS]) == event
            ledger.pay(event, label=LABELS[SUMS])


# The job.


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Four days of a run in which a user's rows count on two."""
    root = tmp_path_factory.mktemp("seats")
    for number in range(4):
        pa.parquet.write_table(table(users=2500, rows=30_000, seed=number), root / f"{number}.parquet")
    seen, asked, taken = [], [], []
    made, find, take = pipeline.private_sums.release, pipeline.private_items, pipeline.take_seats

    def released(job, log, users, *rest):
        found = made(job, log, users, *rest)
        seated = taken[-1][0]
        assert seated[users].all() and rest[-1]
        seen.append(({log.unit_ids[int(user)].as_py() for user in users}, asked[-1] - seated.sum(), found))
        return found

    def seats(*given):
        taken.append(take(*given))
        return taken[-1]

    def items(log, **options):
        asked.append(sum(part.num_users for part in log.found()[0].parts(Catalogue(range(1, 10_000)))))
        return find(log, **options)

    patch = pytest.MonkeyPatch()
    patch.setattr(pipeline.private_sums, "release", released)
    patch.setattr(pipeline, "private_items", items)
    patch.setattr(pipeline, "take_seats", seats)
    options = ["--days", 4, "--days-per-user", 2, "--quiet"]
    try:
        assert train("--data", root / "0.parquet", *COLUMNS, "--out", root / "run", *options) == 0
        for number in (1, 2, 3):
            assert train("--continue", root / "run", "--data", root / f"{number}.parquet", "--quiet") == 0
    finally:
        patch.undo()
    return root, seen


@pytest.mark.slow
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


@pytest.mark.slow
def test_sums_are_of_users_with_seats_and_their_number_is_noisy(stream):
    root, seen = stream
    counted = list(itertools.chain.from_iterable(users for users, _, _ in seen))
    assert max(map(counted.count, set(counted))) == 2 and len(seen) == 4
    for users, others, made in seen:
        assert not others  # items, too, are found among users with seats
        assert made.users_private and abs(made.num_users - len(users)) < 6 * 10 * made.noise_multiplier
        assert made.split.counts**-2 + made.split.gram**-2 == pytest.approx(0.99 * made.noise_multiplier**-2)
    # Noise of some 50 is zero now and then, on four days once in 10^8.
    assert any(made.num_users != len(users) for users, _, made in seen)
    assert len(seen[0][0]) > 1500 > len(seen[2][0])  # all are new on the first day


def test_what_is_released_knows_neither_seats_nor_their_number(stream):
    root, seen = stream
    seated, _, made = seen[-1]
    for path in (root / "run" / "release").rglob("*"):
        assert path.name != "seats.parquet"
    for name in ("statement.txt", "card.md"):
        numbers = re.findall(r"[\d.,]*\d", (root / "run" / "release" / name).read_text())
        # Noise of some 50 makes the two equal now and then.
        assert str(len(seated)) not in {each.replace(",", "") for each in numbers} - {str(made.num_users)}
        assert name == "card.md" or str(made.num_users) in numbers
    notes = [json.loads(line) for line in (root / "run" / "release" / "ledger.jsonl").read_text().splitlines()]
    notes = [line["settings"] for line in notes if line.get("label") == "seats of a day"]
    assert [note["day"] for note in notes] == [1, 2, 3, 4] and all(set(note) == {"day", "list"} for note in notes)
    assert len(pa.parquet.read_table(root / "run" / "private" / "seats.parquet")) > 2000


@pytest.mark.slow
def test_ctrl_c_keeps_the_list_once_all_is_written_and_leaves_none_where_nothing_is_paid(log, tmp_path, monkeypatch):
    save, items, options = WarmStart.save, pipeline.find_items, ["--days", 3, "--days-per-user", 2, "--quiet"]

    def cut(*arguments):
        if arguments and isinstance(arguments[0], WarmStart):
            save(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "find_items", cut)
    assert train("--data", log, *COLUMNS, "--out", tmp_path / "run", *options) == 130
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(pipeline, "find_items", items)
    monkeypatch.setattr(WarmStart, "save", cut)
    assert train("--data", log, *COLUMNS, "--out", tmp_path / "run", *options) == 130
    monkeypatch.setattr(WarmStart, "save", save)
    assert train("--continue", tmp_path / "run", "--data", log, "--quiet") == 0


@pytest.fixture(scope="module", params=["lazydpsgd", "upon-sums"])
def trained(request, tmp_path_factory):
    """Three days of a training; a user's rows count on one in what is released before the steps."""
    root, counted, asked = tmp_path_factory.mktemp("trained"), [], []
    options = ["--mechanism", request.param, "--days", 3, "--days-per-user", 1, "--items-epsilon", 4, "--quiet"]
    small = ["--batch-size", 80, "--steps", 3, "--width", 4, "--hidden", 0, "--negatives", 10]
    init, batches = pipeline.UserSubset.__init__, PoissonSampling.batches

    def subset(self, log, users, *show):
        if isinstance(log, Interactions):  # not what a search for items makes of it
            counted.append({log.unit_ids[int(user)].as_py() for user in users})
        init(self, log, users, *show)

    def drawn_from(self, *given, **named):
        asked.append(self.num_units)
        return batches(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.UserSubset, "__init__", subset)
        patch.setattr(PoissonSampling, "batches", drawn_from)
        for number in range(3):
            pa.parquet.write_table(table(users=500 + 200 * number, rows=9000, seed=number), root / f"{number}.parquet")
            first = [*COLUMNS, *small, *options, "--out", root / "run"]
            to = ["--continue", root / "run", "--quiet"] if number else first
            assert train("--data", root / f"{number}.parquet", "--confidential", *to) == 0
    return request.param, root / "run", counted, asked


@pytest.mark.slow
def test_a_trainings_releases_are_of_users_with_seats_and_its_steps_of_all(trained, tmp_path):
    name, run, counted, asked = trained
    ledger, config = run / "release" / "ledger.jsonl", json.loads((run / "private" / "config.json").read_text())
    paid, label = read(ledger).paid, {"lazydpsgd": LABELS[PRIOR], "upon-sums": LABELS[PRETRAINING_SUMS]}[name]
    blocks = [(what, [*several]) for what, several in itertools.groupby(paid, lambda each: each.label)]
    assert [what for what, _ in blocks] == 3 * ["private vocabulary", label, "training"]
    free = [all(each.event == NoOpDpEvent() for each in several) for _, several in blocks]
    assert free == [False] * 3 + 2 * [True, True, False]
    assert [sum(each.steps for each in several) for _, several in blocks] == 3 * [0, 0, 3] and config["day"] == 3
    # Each day has items, counts or sums of those with seats, and exact counts of all for the owner's report.
    found, released, exact = counted[0::3], counted[1::3], counted[2::3]
    assert len(exact) == 3
    for each in (found, released):
        assert len(set().union(*each)) == sum(map(len, each)) and min(map(len, each)) > 100
    assert all(few < many for few, many in zip(released, found)) and len(released[2]) < 0.5 * len(exact[2])
    assert {len(each) for each in exact} == set(asked)
    # All of ε is used: the noise of steps knows that two days' releases are free.
    spent = read(ledger).epsilon(config["delta"])
    assert 7.9 < spent <= 8 and checked(ledger, config["delta"], tmp_path) == pytest.approx(spent, abs=1e-3)
    said = " ".join((run / "release" / "statement.txt").read_text().split())
    assert "3 so far, of at most 3, of which a user's rows count on 1 at most" in said
    assert "in all but training steps, which add up as if each user were in all of them" in said


@pytest.mark.slow
def test_a_trained_model_of_users_with_seats_knows_the_same_cost(trained):
    name, run, _, _ = trained
    config = json.loads((run / "private" / "config.json").read_text())
    model = keras.models.load_model(run / "release" / "model.keras")
    entries = [entry for entry in model.privacy_history.snapshot() if not entry.label]
    alone = Accountant(entries[-1].event, Sampling.from_state(entries[-1].sampling), config["delta"])
    alone.follow(model)
    spent = read(run / "release" / "ledger.jsonl").epsilon(config["delta"])
    assert alone.epsilon() == pytest.approx(spent, abs=1e-3)


@pytest.mark.parametrize(
    "options, says",
    [
        (["--days-per-user", 3, "--days", 2], "--days-per-user must be at most --days, 2, got 3"),
        ([*FEW, "--mechanism", "spectral", "lazydpsgd"], "one private recommender, and lazydpsgd and spectral would"),
        ([*FEW, "--mechanism", "eana"], "--days-per-user is of one private recommender, and eana would be made"),
        ([*FEW, "--mechanism", "spectral-exact"], "and spectral-exact would be made"),
        (["--days-per-user", 0, "--days", 3], "--days-per-user must be positive"),
    ],
)
def test_settings_that_mean_nothing_are_refused_in_one_line(log, tmp_path, capsys, options, says):
    assert train("--data", log, *COLUMNS, "--out", tmp_path / "run", *options) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "run").exists()
