"""A log on Spark: its sums are the one-machine sums, number for number, and no fault of a task changes them."""

import datetime
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from scipy import stats

from tfdp_rec.cli import main
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.data import Interactions, PoissonSampling
from tfdp_rec.datasets.log import Log
from tfdp_rec.privacy import Accountant, private_counts, private_items
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.spectral.order import _select_judges, ballots
from tfdp_rec.spectral.pair_sums import pair_sums
from tfdp_rec.sums.counts import item_weights
from tfdp_rec.sums.fixed_point import ONE
from tfdp_rec.sums.set_union import weights
from tfdp_rec.sums.total import Summand, keyed_draw, total

pytest.importorskip("pyspark")
spark_module = pytest.importorskip("tfdp_rec.sums.spark")
SparkLog = spark_module.SparkLog
slow = pytest.mark.slow
UNKNOWN = 99


@pytest.fixture(scope="module")
def spark():
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "3", "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "Asia/Tokyo", "spark.executorEnv.TZ": "Asia/Tokyo",
    }  # fmt: skip
    builder = SparkSession.builder.master("local[2,4]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


def on_spark(spark, rows, kinds="user string, item bigint, time bigint", **arguments):
    frame = spark.createDataFrame(list(zip(*rows.values())), kinds)
    time = {"time": "time"} if "time" in rows else {}
    return SparkLog(frame, user="user", item="item", **time, **arguments)


def here(rows, **arguments):
    names = rows.column_names if isinstance(rows, pa.Table) else rows
    return Interactions.read(rows, user="user", item="item", time="time" if "time" in names else "", **arguments)


def random_rows(seed=0, users=60, items=30, rows=1500, without=()):
    """Users of very different lengths; many equal times, repeats and missing ids."""
    rng = np.random.default_rng(seed)
    user = np.minimum(rng.geometric(0.05, rows), users)
    made = {
        "user": [f"u{each}" if each != 3 else None for each in user],
        "item": [int(each) if each else None for each in rng.integers(0, items, rows)],
        "time": [int(each) if each else None for each in rng.integers(0, 25, rows)],
    }
    kept = [at for at in range(rows) if made["user"][at] not in without]
    return {name: [values[at] for at in kept] for name, values in made.items()}


def sums(log):
    """Every sum that is released with noise, without it."""
    catalogue, head = log.catalogue, np.arange(log.num_items)[::2]
    rng = np.random.default_rng(5)
    made = rng.normal(size=(len(head), len(head))).astype(np.float32), rng.random(len(head), np.float32)
    counts = {t: total(log, catalogue, spark_counts(t, log.num_items)) for t in (None, 3)}
    pairs = [np.triu(pair_sums(log, catalogue, head, ordered), 1) for ordered in (False, True)]
    return [*counts.values(), *pairs, np.array([ballots(log, 1.0, catalogue, head, *made)])]


def spark_counts(typical, size):
    from functools import partial

    return Summand(partial(item_weights, typical=typical), size)


def vocabulary(log, most=10**6, words=None):
    """Weight of each item in the set union, by id."""
    histories, ids = log.found()
    given = weights(histories, np.zeros(len(ids), bool), most, words or seeded(1))
    return {item: weight for item, weight in zip(ids.to_pylist(), given.tolist()) if weight}


def assert_same(one, other):
    assert len(one) == len(other)
    for left, right in zip(one, other):
        assert np.array_equal(left, right)


def histories(log):
    """Each user's rows, by id."""
    numbers, ids = log.found()
    ids = ids.to_pylist()
    ends = zip(log.unit_ids.to_pylist(), numbers.offsets[:-1], numbers.offsets[1:])
    times = np.fromfile(log.folder / "times.bin", np.int64).tolist() if log.ordered else [0] * len(numbers.numbers)
    return {u: [(ids[n - 1], t) for n, t in zip(numbers.numbers[a:b].tolist(), times[a:b])] for u, a, b in ends}


def test_all_sums_are_those_of_one_machine(spark):
    rows = random_rows()
    log, one = on_spark(spark, rows), here(rows)
    assert len(log) == len(one) and log.ordered
    items = range(2, 28)  # some are left out, one is in no row
    found, expected = sums(log.with_items([*items, 1000])), sums(one.with_items([*items, 1000]))
    assert_same(found, expected)
    assert all(each.any() for each in expected)
    assert vocabulary(log) == vocabulary(one)


def test_users_draw_by_a_key_and_their_own_id_alone():
    ids = pa.array(["ann", "bob", "cy", "🦜"])
    draw, few = keyed_draw(b"key", ids), keyed_draw(b"key", ids[2:])
    drawn = draw(np.array([2, 0, 3, 1]))
    assert len(drawn) == len(set(drawn.tolist())) == 6
    assert drawn[2:].tolist() == few(np.array([3, 1])).tolist()
    assert not set(drawn.tolist()) & set(keyed_draw(b"other", ids)(np.array([2, 0, 3, 1])).tolist())
    many = keyed_draw(b"key", pa.array(range(4000)))(np.full(4000, 5)) / 2.0**64
    assert stats.kstest(many, "uniform").pvalue > 1e-6


# What a log is.

LATE = datetime.datetime(2024, 10, 27, 1, 30)
NASTY = {
    "text": ("user string, item string, time bigint", {
        "user": ["🦜", "", None, "a", "a", "a ", "a", "7", "🦜", "only", "a", "late"],
        "item": ["x", "y", "z", "", "ü", "ü", "x", None, "x", None, "ü", "x"],
        "time": [5, 1, 1, 2, 2, 2, 2, 3, 5, 1, 2, None],
    }),
    "negative": ("user bigint, item int, time double", {
        "user": [-1, 0, -(2**62), -1, None, -1, 2, 2, 0, -1], "item": [5, -5, 0, 5, 6, 7, 8, 9, -5, None],
        "time": [0.5, math.nan, 1.0, 0.5, 0.25, 0.25, math.inf, -0.0, 3.0, 0.0],
    }),
    "floats": ("user double, item float, time bigint", {
        "user": [1.0, math.nan, None, 2.0, -0.0, 0.0, 1.0], "item": [1.0, 2.0, 3.0, math.nan, 4.0, 4.0, 1.0],
        "time": [1, 1, 1, 1, 1, 1, 0],
    }),
    "moments": ("user string, item bigint, time timestamp_ntz", {
        "user": ["a"] * 4, "item": [1, 2, 3, 4],
        "time": [LATE, LATE - datetime.timedelta(microseconds=1), None, datetime.datetime(1969, 12, 31)],
    }),
    "dates": ("user string, item bigint, time date", {
        "user": ["a"] * 3, "item": [1, 2, 1], "time": [LATE.date(), datetime.date(1912, 2, 29), LATE.date()],
    }),
    "moments as text": ("user string, item bigint, time string", {
        "user": ["a"] * 4, "item": [1, 2, 3, 4], "time": ["2024-10-27T01:30:00", "", "1969-12-31T00:00:00", None],
    }),
    "no times": ("user string, item bigint", {"user": ["a", "b", "a", None], "item": [1, 2, 1, 3]}),
    "users without times": ("user bigint, item bigint, time double", {
        "user": list(range(12)) * 2, "item": list(range(24)), "time": ([0.5] + [None] * 11) * 2,
    }),
    "ties": ("user string, item bigint, time bigint", {
        "user": ["a", "b"] * 500, "item": list(range(7, 1007)), "time": [1] * 1000,
    }),
}  # fmt: skip


@slow
@pytest.mark.parametrize("duplicates", ["drop", "keep"])
@pytest.mark.parametrize("name", NASTY)
def test_ids_times_and_duplicates_are_those_of_one_machine(spark, name, duplicates):
    kinds, rows = NASTY[name]
    kind = {"bigint": pa.int64(), "int": pa.int64(), "string": pa.string()}
    types = {each.split()[0]: kind.get(each.split()[1]) for each in kinds.split(", ")}
    table = pa.table({column: pa.array(values, types[column]) for column, values in rows.items()})
    one = here(table, duplicates=duplicates)
    log = on_spark(spark, rows, kinds, duplicates=duplicates)
    expected = histories(one)
    assert len(log) == len(expected) and log.ordered == one.ordered
    assert histories(log.collect()) == expected
    assert sorted(map(str, log.found()[1].to_pylist())) == sorted({str(i) for h in expected.values() for i, _ in h})


@slow
def test_moments_with_a_zone_are_told_apart_by_microseconds_whatever_the_sessions_zone(spark, tmp_path):
    latest = 1730000000000001
    times = pa.array([latest, latest - 1, -1], pa.timestamp("us", "UTC"))

    rows = pa.table({"user": ["a"] * 3, "item": [1, 2, 3], "time": times})
    pyarrow.parquet.write_table(rows, tmp_path / "rows.parquet")
    log = SparkLog(spark.read.parquet(str(tmp_path)), user="user", item="item", time="time")
    expected = {"a": [(3, -1), (2, latest - 1), (1, latest)]}
    assert histories(log.collect()) == histories(here(rows)) == expected


@slow
def test_what_is_no_id_and_no_time_is_refused_without_its_value(spark):
    rows = {"user": ["a", "b", "secretive"], "item": [1, 2, 3], "time": ["1", "2", "yesterday"]}
    with pytest.raises(ValueError, match="Interactions.read, of the same rows, names it") as refusal:
        on_spark(spark, rows, "user string, item bigint, time string")
    assert "yesterday" not in str(refusal.value) and "secretive" not in str(refusal.value)
    with pytest.raises(ValueError, match="no user"):
        on_spark(spark, {"user": [None, ""], "item": [1, 2]}, "user string, item bigint")
    with pytest.raises(ValueError, match="of Spark's type boolean: cast it"):
        on_spark(spark, {"user": [True], "item": [1]}, "user boolean, item bigint")
    log = on_spark(spark, {"user": ["a"], "item": [1]}, "user string, item bigint").with_items([1])
    with pytest.raises(TypeError, match="added up there"):
        list(log.parts(log.catalogue))
    with pytest.raises(ValueError, match="the numbers 1 to 1"):
        private_counts(log, Log([1], [0, 1]) and log.with_items([1, 2]).catalogue, noise_multiplier=1.0)


@slow
@pytest.mark.parametrize("parts", [1, 2, 24])
def test_parts_do_not_change_a_sum_and_each_user_is_in_one(spark, parts):
    rows = random_rows(1)
    log = on_spark(spark, rows, parts=parts)
    users = log._groups.map(lambda group: group.users.to_pylist()).collect()
    assert sum(map(len, users)) == len({user for part in users for user in part}) == len(log)
    assert_same(sums(log.with_items(range(1, 30))), sums(here(rows).with_items(range(1, 30))))


@slow
def test_a_user_of_two_hundred_thousand_rows_breaks_nothing(spark):
    rng = np.random.default_rng(0)
    count, other = 200_000, 3000
    rows = {
        "user": ["big"] * count + [f"u{each}" for each in rng.integers(0, 500, other)],
        "item": rng.integers(1, 5000, count + other).tolist(), "time": rng.integers(0, 10**6, count + other).tolist(),
    }  # fmt: skip
    log, one = (each.with_items(range(1, 5000)) for each in (on_spark(spark, rows), here(rows)))
    assert len(log) == len(one)
    assert_same(sums(log), sums(one))


@slow
def test_the_sides_are_those_of_one_machine(spark):
    rows = random_rows(2)
    log, one = on_spark(spark, rows), here(rows)
    for view, units in zip(log.split(0.7, "key"), one.split(0.7, "key")):
        ids = one.unit_ids.take(pa.array(units)).to_pylist()
        assert len(view) == len(ids) and set(histories(view.collect())) == set(ids)
        assert histories(view.collect()) == {user: held for user, held in histories(one).items() if user in ids}
    train = log.split(0.7, "key")[0].with_items(range(1, 30))
    chosen = {user for user in histories(train.collect())}
    left = {name: [v for v, u in zip(values, rows["user"]) if u in chosen] for name, values in rows.items()}
    assert_same(sums(train), sums(here(left).with_items(range(1, 30))))


def test_equal_times_stand_as_they_were_read_whatever_order_a_shuffle_brings():
    rows = [("a", item, 1, item) for item in range(9)] + [("b", 3, 0, 9), (None, 4, 0, 10)]
    kinds = {"user": pa.string(), "item": pa.int64(), "time": pa.int64()}
    orders = [rows, rows[::-1], [rows[at] for at in np.random.default_rng(0).permutation(len(rows))]]
    for order in orders:
        (group,) = spark_module._group(order, kinds, "drop")
        assert group.table().to_pydict() == {
            "user": ["a", "b"], "item": [list(range(9)), [3]], "time": [[1] * 9, [0]]
        }  # fmt: skip
    assert not list(spark_module._group(rows[-1:], kinds, "drop")) and not list(spark_module._group([], kinds, "drop"))


# What one user moves.


@slow
@pytest.mark.parametrize("seed", range(2))
def test_a_user_moves_each_sum_by_at_most_one_and_counts_use_all_of_it(spark, seed):
    rows = random_rows(seed, users=5, rows=200)
    items = range(1, 30)
    both = on_spark(spark, rows, parts=2)
    whole, words = sums(both.with_items(items)), vocabulary(both)
    moved_most = Fraction(0)
    for user in sorted(set(rows["user"]) - {None}):
        less = on_spark(spark, random_rows(seed, users=5, rows=200, without=[user]), parts=2)
        moved = [one - other for one, other in zip(whole, sums(less.with_items(items)))]
        squares = [sum(Fraction(int(step), ONE) ** 2 for step in each.reshape(-1)) for each in moved[:4]]
        assert max(squares) <= 1 and abs(int(moved[4][0])) <= 1
        moved_most = max(moved_most, squares[0])
        without = vocabulary(less)
        assert sum(Fraction(words.get(i, 0) - without.get(i, 0), ONE) ** 2 for i in {*words, *without}) <= 1
    assert moved_most > Fraction(999, 1000)


@slow
def test_with_a_cap_every_set_of_a_users_terms_is_as_likely_and_another_key_chooses_others(spark):
    users, terms, cap = 3000, 5, 2
    rows = {"user": np.repeat(np.arange(users), terms).tolist(), "item": list(range(users * terms))}
    log = on_spark(spark, rows, "user bigint, item bigint")
    seen = []
    for seed in (1, 2):
        given = vocabulary(log, cap, seeded(seed))
        assert len(given) == cap * users and set(given.values()) == {math.isqrt(ONE**2 // cap)}
        chosen = np.array([item in given for item in range(users * terms)]).reshape(users, terms)
        codes, counts = np.unique(chosen @ 2 ** np.arange(terms), return_counts=True)
        assert len(codes) == math.comb(terms, cap)
        assert stats.chisquare(counts).pvalue > 1e-6
        assert stats.chisquare(counts + np.array([90, -90] * 5)).pvalue < 1e-6
        seen.append(chosen)
    same = (seen[0] == seen[1]).all(axis=1).sum()
    assert stats.binomtest(int(same), users, 1 / math.comb(terms, cap)).pvalue > 1e-6


@slow
def test_a_share_of_the_users_is_asked_others_each_time(spark):
    from functools import partial

    rows = {"user": list(range(4000)), "item": list(range(4000))}
    log = on_spark(spark, rows, "user bigint, item bigint").with_items(range(4000))
    pieces = partial(_select_judges, position=np.arange(4000), share=0.3)
    one, other = (total(log, log.catalogue, Summand(item_weights, 4000, pieces, True)) > 0 for _ in range(2))
    for asked in (one, other):
        assert stats.binomtest(int(asked.sum()), 4000, 0.3).pvalue > 1e-6
    assert stats.binomtest(int((one & other).sum()), 4000, 0.09).pvalue > 1e-6
    assert ballots(log, 0.0, log.catalogue, np.arange(30), np.zeros((30, 30)), np.zeros(30)) == 0


# Faults.


class Faulty:
    """A log whose tasks do something in their first attempt, before they give anything."""

    def __init__(self, log, fault):
        self.log, self.fault = log, fault

    def total(self, catalogue, summand, words):
        fault, give = self.fault, summand.give

        def give_after(part):
            fault()
            return give(part)

        return self.log.total(catalogue, summand._replace(give=give_after), words)


def make_killer(folder, partition):
    """Kills the Python worker of a partition's first attempt, and leaves a file that says so."""
    path = str(folder / "killed")

    def kill():
        from pyspark import TaskContext

        context = TaskContext.get()
        if context.partitionId() == partition and context.attemptNumber() == 0:
            open(path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


@slow
@pytest.mark.parametrize("partition", [0, 2])
def test_a_killed_worker_changes_nothing(spark, tmp_path, partition):
    log = on_spark(spark, random_rows(3)).with_items(range(1, 30))
    head, catalogue = np.arange(20), log.catalogue
    expected = total(log, catalogue, spark_counts(None, 29))
    faulty = Faulty(log, make_killer(tmp_path, partition))
    assert np.array_equal(total(faulty, catalogue, spark_counts(None, 29)), expected)
    assert (tmp_path / "killed").exists()
    assert np.array_equal(pair_sums(faulty, catalogue, head, True), pair_sums(log, catalogue, head, True))


@slow
def test_what_a_task_draws_does_not_hang_on_the_attempt(spark, tmp_path):
    histories, ids = on_spark(spark, random_rows(4)).found()
    nothing, faulty = np.zeros(len(ids), bool), Faulty(histories, make_killer(tmp_path, 1))
    whole = weights(histories, nothing, 10**6, seeded(7))
    given, again = weights(histories, nothing, 3, seeded(7)), weights(faulty, nothing, 3, seeded(7))
    assert (tmp_path / "killed").exists()
    assert np.array_equal(given, again) and not np.array_equal(given, whole)
    assert not np.array_equal(given, weights(histories, nothing, 3, seeded(8)))


LOST_EXECUTOR = """
import os, signal, sys
import numpy as np
from pyspark.sql import SparkSession
from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.sums.set_union import weights
from tfdp_rec.sums.spark import SparkLog

settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
builder = SparkSession.builder.master("local-cluster[2,1,1024]")
for name, value in settings.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
rng = np.random.default_rng(0)
rows = list(zip(rng.integers(0, 300, 9000).tolist(), rng.integers(0, 400, 9000).tolist()))
log = SparkLog(spark.createDataFrame(rows, "u bigint, i bigint"), user="u", item="i", parts=6)
histories, ids = log.found()
marker = sys.argv[1]


def parent(process):
    return int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])


class Faulty:
    def total(self, catalogue, summand, words):
        give = summand.give

        def give_after(part):
            from pyspark import TaskContext

            if TaskContext.get().partitionId() == 3 and not os.path.exists(marker):
                open(marker, "w").close()
                os.kill(parent(os.getppid()), signal.SIGKILL)  # the executor, with the parts on its disk
            return give(part)

        return histories.total(catalogue, summand._replace(give=give_after), words)


nothing = np.zeros(len(ids), bool)
given, again = (weights(each, nothing, 9, seeded(1)) for each in (histories, Faulty()))
assert os.path.exists(marker) and given.any() and np.array_equal(given, again)
print("equal")
"""


@slow
def test_a_lost_executor_changes_nothing(tmp_path):
    import pyspark

    home = tmp_path / "spark"  # where a cluster on one machine writes
    home.mkdir()
    for name in os.listdir(os.path.dirname(pyspark.__file__)):
        (home / name).symlink_to(os.path.join(os.path.dirname(pyspark.__file__), name))
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LOST_EXECUTOR))
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": paths}
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "lost")], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0 and ended.stdout.strip().endswith("equal"), ended.stderr[-3000:]


# What is paid.


def jobs(spark):
    return sorted(spark.sparkContext.statusTracker().getJobIdsForGroup(None))


@slow
def test_a_release_is_paid_for_before_spark_begins_and_stays_paid_where_it_fails(spark, tmp_path):
    rows = random_rows(5, users=200, rows=4000)
    log = on_spark(spark, rows)
    known = log.with_items(range(1, 30))
    accountant = Accountant(
        private_counts([[1]], Log([1], [0, 1]) and known.catalogue, noise_multiplier=2.0).event,
        PoissonSampling(len(log), 5, unit="user"), delta=1e-4, ledger=tmp_path / "ledger.jsonl",
    )  # fmt: skip
    before, seen, spend = jobs(spark), [], accountant.spend
    accountant.spend = lambda event, label: seen.append(jobs(spark)) or spend(event, label)
    counted = private_counts(known, known.catalogue, noise_multiplier=4.0, accountant=accountant)
    assert seen == [before] and len(jobs(spark)) > len(before) and len(counted.values) == 29
    before = jobs(spark)
    found = private_items(log, epsilon=4.0, delta=1e-5, accountant=accountant)
    assert seen[1] == before and len(jobs(spark)) > len(before) and found.terms

    def fail():
        raise ArithmeticError

    before = jobs(spark)
    broken = Faulty(known, fail)
    broken.parts = known.parts
    with pytest.raises(Exception, match="ArithmeticError"):
        private_counts(broken, known.catalogue, noise_multiplier=4.0, accountant=accountant)
    assert seen[2] == before and len(jobs(spark)) > len(before)
    labels = [paid.label for paid in read(tmp_path / "ledger.jsonl").paid]
    assert labels == ["popularity counts", "private vocabulary", "popularity counts"]

    class Broke:
        def spend(self, event, label):
            raise ValueError("no budget")

    before = jobs(spark)
    for release in (
        lambda: private_items(log, epsilon=1.0, delta=1e-5, accountant=Broke()),
        lambda: private_counts(known, known.catalogue, noise_multiplier=1.0, accountant=Broke()),
    ):
        with pytest.raises(ValueError, match="no budget"):
            release()
    assert jobs(spark) == before


@slow
def test_the_recommender_of_a_log_on_spark_is_that_of_one_machine(spark):
    rows = random_rows(6, users=300, rows=6000)
    log, one = (each.with_items(range(1, 30)) for each in (on_spark(spark, rows), here(rows)))
    made = [
        SpectralRecommender(
            each.catalogue.ids, noise_multiplier=1.0, delta=1e-4, ordered=True, words=seeded(1)
        ).fit(each, verbose=0) for each in (log, one)
    ]  # fmt: skip
    assert np.array_equal(made[0].released.counts, made[1].released.counts)
    assert np.array_equal(made[0].released.pairs, made[1].released.pairs) and made[0].num_users == len(one)
    asked = SpectralRecommender(log.catalogue.ids, epsilon=4.0, delta=1e-4, ordered=None).fit(log, verbose=0)
    assert asked.vote is not None and math.isfinite(asked.vote.votes)


# Logs with a row for each user.


@slow
def test_what_spark_wrote_by_user_is_the_log(spark, tmp_path):
    rows = random_rows(7)
    rows["user"].append("without an item"), rows["item"].append(None), rows["time"].append(1)
    one = here(rows)
    on_spark(spark, rows).write_grouped(str(tmp_path / "grouped"))
    again = Interactions.from_grouped(tmp_path / "grouped", user="user", items="item", times="time")
    assert histories(again) == histories(one) and again.ordered
    assert_same(sums(again.with_items(range(1, 30))), sums(one.with_items(range(1, 30))))
    real = {"user": [1, 2, 1], "item": ["b", "a", "c"], "time": [0.5, 0.25, 0.125]}
    on_spark(spark, real, "user bigint, item string, time double").write_grouped(str(tmp_path / "real"))
    assert Interactions.from_grouped(
        str(tmp_path / "real"), user="user", items="item", times="time"
    ).unit_ids.type == pa.int64()  # fmt: skip
    plain = {"user": ["a", "b", "a"], "item": [2, 1, 1]}
    on_spark(spark, plain, "user string, item bigint").write_grouped(str(tmp_path / "plain"))
    found = Interactions.from_grouped(tmp_path / "plain", user="user", items="item")
    assert histories(found) == histories(here(plain)) and not found.ordered


# The main job.


def write_log(folder, rows):
    pyarrow.parquet.write_table(pa.table(rows), folder / "log.parquet")
    return ["--data", str(folder / "log.parquet"), "--user", "user", "--item", "item", "--time", "time"]


@slow
def test_the_main_job_on_spark_is_that_of_one_machine_but_for_noise(spark, tmp_path):
    log = write_log(tmp_path, random_rows(8, users=400, rows=9000))
    asked = [*log, "--mechanism", "spectral", "spectral-exact", "--delta", "1e-4", "--metrics-epsilon", "0"]
    asked += ["--confidential", "--quiet"]
    for engine in ([], ["--engine", "spark"]):
        out = tmp_path / ("spark" if engine else "here")
        assert main(["train", *asked, *engine, "--out", str(out)]) == 0
    results, ledgers, statements = [], [], []
    for out in (tmp_path / "here", tmp_path / "spark"):
        results.append(json.loads((out / "private" / "confidential" / "results.json").read_text()))
        ledgers.append([(paid.label, paid.event) for paid in read(out / "release" / "ledger.jsonl").paid])
        statements.append((out / "release" / "statement.txt").read_text())
        assert not (out / "private" / "resume").exists() and (out / "release" / "servable").is_dir()
    assert ledgers[0] == ledgers[1] and [label for label, _ in ledgers[0]] == ["private vocabulary", "private sums"]
    for one, other in zip(*results):
        for name in ("recommender", "test_users", "noise_multiplier", "epsilon"):
            assert one[name] == other[name]
    assert results[0][0]["test_users"] > 20
    guarantees = [each.split("Mechanism")[0] for each in statements]
    assert "epsilon = 8," in guarantees[0] and guarantees[0] == guarantees[1]


@slow
def test_a_day_on_spark_is_added_to_a_day_on_one_machine(spark, tmp_path):
    for day in (1, 2):
        (tmp_path / str(day)).mkdir()
    first, second = (write_log(tmp_path / str(day), random_rows(day, users=400, rows=9000)) for day in (1, 2))
    run = str(tmp_path / "run")
    asked = ["--mechanism", "spectral", "--delta", "1e-4", "--days", "2", "--epsilon", "16", "--quiet", "--out", run]
    assert main(["train", *first, *asked]) == 0
    assert main(["train", "--continue", run, *second[:2], "--engine", "spark", "--quiet"]) == 0
    labels = [paid.label for paid in read(tmp_path / "run" / "release" / "ledger.jsonl").paid]
    assert labels == ["private vocabulary", "private sums"] * 2
    assert SpectralRecommender.load(tmp_path / "run" / "release" / "released.npz").released.fits == 2


def test_a_training_on_spark_is_refused_and_the_way_is_named(tmp_path, capsys):
    asked = ["train", *write_log(tmp_path, random_rows()), "--engine", "spark", "--out", str(tmp_path / "out")]
    assert main([*asked, "--mechanism", "lazydpsgd"]) != 0
    assert "Interactions.from_grouped" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main([*asked, "--days", "2", "--days-per-user", "1"]) != 0
    assert "--days-per-user" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["log.csv", "log.TSV.gz", "log.jsonl"])
def test_text_is_refused_on_spark(tmp_path, capsys, name):
    """A later file with other columns, or a user's line break within quotes, moved the sums by any number of users."""
    (tmp_path / name).write_text("user,item\nann,1\n")
    asked = ["--data", str(tmp_path / name), "--user", "user", "--item", "item", "--out", str(tmp_path / "out")]
    assert main(["train", *asked, "--engine", "spark", "--mechanism", "spectral", "--quiet"]) == 2
    assert "--engine spark reads Parquet" in capsys.readouterr().err and not (tmp_path / "out").exists()


@slow
def test_spark_leaves_the_handling_of_interrupts(spark, tmp_path, monkeypatch):
    """A Ctrl-C while a payment was written kept it, for a run that could not go on."""
    asked = write_log(tmp_path, random_rows())

    def takes_over(builder):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return spark

    monkeypatch.setattr(type(spark.builder), "getOrCreate", takes_over)
    before = signal.getsignal(signal.SIGINT)
    assert spark_module.rows_of(asked[1:2]).count() and signal.getsignal(signal.SIGINT) is before


# Other engines.


def test_the_function_for_other_engines_gives_the_same_sums():
    text = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    (code,) = [block for block in text.split("```python\n")[1:] if "def cells" in block]
    scope = {"np": np, "pa": pa}
    exec(code.split("```")[0], scope)
    rows = random_rows(9)
    rows["item"] = [item or 0 for item in rows["item"]]
    one, users = here(rows).with_items(range(1, 30)), {}
    for user, item, time in zip(*rows.values()):
        if user and time:
            users.setdefault(user, []).append(item)
    held, found = list(users.items()), {}
    summand = spark_counts(None, 29)
    for start in range(0, len(held), 7):
        for place, value in scope["cells"](held[start : start + 7], one.catalogue, summand):
            found[place] = found.get(place, 0) + value
    expected = total(one, one.catalogue, summand)
    assert found == {place: value for place, value in enumerate(expected.tolist()) if value}
