"""Logs: every form tells the same rows; grouped as a loop would; what is wrong is named; whole or not there."""

import errno
import gc
import gzip
import json
import os
import shutil
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tfdp_rec.data import Interactions, Items, NextItemExamples
from tfdp_rec.datasets.logs import grouping, sources

LOG = {
    "who": ["ann", "bob", "ann", "007", "ann", "bob"],
    "what": ["tea", "jam", "jam", "2024-01-01", "ham", "tea"],
    "when": [1_700_000_300, 1_700_000_100, 1_700_000_200, 1_700_000_000, 1_700_000_300, 1_700_000_400],
    "price": [1.0, None, 2.5, 0.5, 3.0, 4.0],
}
NAMES = {"user": "who", "item": "what", "time": "when"}
CATALOGUE = ["ham", "jam", "tea"]


def told(log):
    """Each user's items by their own ids."""
    return {user: log.items.of(log[unit]) for unit, user in enumerate(log.unit_ids.to_pylist())}


EXPECTED = {"ann": ["jam", "tea", "ham"], "bob": ["jam", "tea"], "007": []}


class Frame:
    """What pandas and polars give Arrow."""

    def __init__(self, table):
        self.table = table

    def __arrow_c_stream__(self, schema=None):
        return self.table.__arrow_c_stream__(schema)


def json_lines(log=LOG):
    rows = zip(*log.values())
    return "".join(json.dumps(dict(zip(log, row))) + "\n" for row in rows).encode()


def written(folder, form):
    table, path = pa.table(LOG), folder / f"log{form}"
    if form in (".csv", ".csv.gz"):
        with pa.CompressedOutputStream(path, "gzip") if form.endswith("gz") else pa.OSFile(str(path), "wb") as file:
            pyarrow.csv.write_csv(table, file)
    elif form == ".tsv":
        pyarrow.csv.write_csv(table, path, pyarrow.csv.WriteOptions(delimiter="\t"))
    elif form in (".jsonl", ".json.gz"):
        path.write_bytes(gzip.compress(json_lines()) if form.endswith("gz") else json_lines())
    elif form == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    elif form == ".feather":
        pyarrow.feather.write_feather(table, path)
    elif form == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as file:
            file.write_table(table, 4)
    return path


FORMS = [".csv", ".csv.gz", ".tsv", ".jsonl", ".json.gz", ".parquet", ".feather", ".arrow"]


@pytest.mark.parametrize("form", FORMS)
def test_every_format_tells_the_same(tmp_path, form, monkeypatch):
    monkeypatch.setattr(sources, "_BYTES", 200)  # several blocks
    log = Interactions.read(written(tmp_path, form), **NAMES, features=["price"], items=CATALOGUE)
    assert told(log) == EXPECTED and log.ordered and len(log) == 3
    ann = log.units(["ann"])[0]
    prices = log.features["price"][log.offsets[ann] : log.offsets[ann + 1]]
    assert prices.tolist() == [2.5, 1.0, 3.0] and log.times[log.offsets[ann]] == 1_700_000_200
    assert np.isnan(log.features["price"]).sum() == 1


@pytest.mark.parametrize("given", [LOG, pa.table(LOG), Frame(pa.table(LOG)), {k: np.array(v) for k, v in LOG.items()}])
def test_frames_tell_the_same(given):
    log = Interactions.read(given, **NAMES, items=CATALOGUE)
    assert told(log) == EXPECTED


def test_files_folders_patterns_and_lists_are_one_log(tmp_path):
    table = pa.table(LOG)
    for number in range(3):
        pyarrow.parquet.write_table(table.slice(2 * number, 2), tmp_path / f"{number}.parquet")
    (tmp_path / "_SUCCESS").write_text("")
    for source in (tmp_path, str(tmp_path / "*.parquet"), [tmp_path / f"{number}.parquet" for number in range(3)]):
        assert told(Interactions.read(source, **NAMES, items=CATALOGUE)) == EXPECTED


def oracle(rows, ordered, drop):
    """(user, item, time) rows in a loop: each user's items."""
    grouped, seen = {}, set()
    for user, item, time in rows:
        if not user:
            continue
        mine = grouped.setdefault(user, [])
        key = (user, item, time if ordered else None)
        if not item or (ordered and time is None) or (drop and key in seen):
            continue
        seen.add(key)
        mine.append((time if ordered else 0, item))
    return {user: [item for _, item in sorted(mine, key=lambda row: row[0])] for user, mine in grouped.items()}


ROW = st.tuples(
    st.sampled_from(["a", "b", "c", "d", "", None]), st.sampled_from(["x", "y", "z", "", None]),
    st.sampled_from([None, 1, 2, 3, -4]),
)  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.lists(ROW, min_size=1, max_size=40), st.booleans(), st.booleans())
def test_grouped_as_a_loop_would_in_however_many_parts(rows, ordered, drop):
    rows = [*rows, ("a", None, None)]
    users, items, times = ([row[place] for row in rows] for place in range(3))
    log = {"u": pa.array(users, pa.string()), "i": pa.array(items, pa.string()), "t": pa.array(times, pa.int64())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_ROWS", 7)
        patch.setattr(grouping, "_ROWS_IN_A_PART", 5)
        found = Interactions.read(
            pa.table(log), user="u", item="i", time="t" if ordered else "", duplicates="drop" if drop else "keep",
            items=["x", "y", "z"],
        )  # fmt: skip
    assert told(found) == oracle(rows, ordered, drop)
    assert found.about["left out"]["without user"] == sum(not user for user in users)
    assert len(rows) - sum(found.about["left out"].values()) == found.num_rows


# Ids and times.


def test_ids_of_text_files_are_text_and_numbers_are_numbers(tmp_path):
    (tmp_path / "log.csv").write_text("u,i\n007,01\n7,1\n007,\n")
    log = Interactions.read(tmp_path / "log.csv", user="u", item="i", items=[1])
    assert told(log) == {"007": [], "7": ["1"]} or told(log) == {"007": [], "7": [1]}
    frame = {"u": np.array([3, 4, 3]), "i": np.array([5.0, np.nan, 6.0])}
    assert told(Interactions.read(frame, user="u", item="i", items=["5", "6", "x"])) == {3: ["5", "6"], 4: []}
    coded = {"u": pa.array(["a", "b"]).dictionary_encode(), "i": pa.array([1, 2], pa.uint8())}
    assert told(Interactions.read(coded, user="u", item="i", items=[2])) == {"a": [], "b": [2]}
    coded["u"] = pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", "b"], pa.string_view()))  # as polars has them
    assert told(Interactions.read(coded, user="u", item="i", items=[2])) == {"a": [], "b": [2]}


SAME_ORDER = [
    ["2024-01-03", "2024-01-01T10:00:00", "2024-01-02 11:30:00.5", None],
    ["2024-01-03T00:30:00+01:00", "2024-01-01T10:00:00Z", "2024-01-02T11:30:00-05:00", ""],
    ["3", "1", "2", None],
    ["3.5", "1.5", "-2e-3", None],
    [3, -1, 2, None],
    [3.5, float("-inf"), 2.0, float("nan")],
    np.array(["2024-01-03", "2024-01-01", "2024-01-02", "NaT"], "datetime64[ns]"),
    pa.array([3, 1, 2, None], pa.date32()),
]


@pytest.mark.parametrize("times", SAME_ORDER, ids=str)
def test_times_of_any_one_format_order_rows(times):
    log = {"u": ["a"] * 4, "i": ["z", "x", "y", "w"], "t": times}
    found = told(Interactions.read(log, user="u", item="i", time="t", items=["w", "x", "y", "z"]))["a"]
    lacking = {"-2e-3": ["y", "x", "z"], float("-inf"): ["y", "z"]}
    key = times[2] if times[2] == "-2e-3" else times[1] if isinstance(times[1], float) else None
    assert found == lacking.get(key, ["x", "y", "z"])


TWO_FORMATS = [
    (["2024-01-01", "2024-01-02"], ["1700000000"], "is '1700000000', and was '2024-01-01' at"),
    (["1700000000"], ["1700000000", "03/01/2024"], "row 2: t is '03/01/2024'"),
    (["2024-01-01"], ["2024-01-02", "2024-01-02T10:00:00Z"], "row 2"),
    ([1_700_000_000], [5, 1_700_000_000_000], "row 2: t is '1700000000000', and was '1700000000' at"),
    ([1_700_000_000, 5], [1.5], "whole numbers"),
    ([1], ["2024-01-01"], "row 1: t is '2024-01-01'"),
    (["soon"], ["1"], "a.parquet, row 1: t is 'soon', which is no time"),
    ([True], [True], "type bool, which is no time"),
]


@pytest.mark.parametrize("first, second, words", TWO_FORMATS, ids=str)
def test_two_formats_in_one_column_are_refused_by_file_and_row(tmp_path, first, second, words):
    for name, times in (("a", first), ("b", second)):
        log = {"u": ["x"] * len(times), "i": ["y"] * len(times), "t": times}
        pyarrow.parquet.write_table(pa.table(log), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match=words) as refusal:
        Interactions.read(tmp_path, user="u", item="i", time="t", folder=tmp_path / "made")
    said = str(refusal.value)
    assert said.endswith(".") and len(said) < 500 and ".parquet" in said
    assert not (tmp_path / "made").exists() and not list(tmp_path.glob(".*made"))


@pytest.mark.parametrize("one, other", [(["a"], [1]), ([1], ["a"]), ([1], [1.5]), ([1], [2**63]), ([1], [2.0**53])])
def test_ids_of_two_kinds_are_refused_by_file_and_row(tmp_path, one, other):
    for name, users in (("a", one), ("b", other)):
        kind = pa.uint64() if other == [2**63] and users == other else None
        pyarrow.parquet.write_table(pa.table({"u": pa.array(users, kind), "i": ["y"]}), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet, row 1: u is"):
        Interactions.read(tmp_path, user="u", item="i")


def test_times_that_are_missing_at_first_have_the_kind_of_those_that_come(monkeypatch):
    monkeypatch.setattr(sources, "_ROWS", 2)
    log = {"u": ["a", "a", "a", "a", "b"], "i": [1, 2, 3, 4, 5], "t": ["", None, "2.5", "1.5", None]}
    assert told(Interactions.read(log, user="u", item="i", time="t", items=range(6))) == {"a": [4, 3], "b": []}


# What is wrong.


def refused(source, error=ValueError, **names):
    with pytest.raises(error) as refusal:
        Interactions.read(source, **{"user": "u", "item": "i", **names})
    said = str(refusal.value)
    assert said.endswith(".") and len(said) < 500
    return said


def test_logs_that_are_none_are_refused_by_name(tmp_path):
    assert "has no column 'i'; it has 'u', 'item'" in refused({"u": [1], "item": [2]})
    assert "no log at" in refused(tmp_path / "*.parquet", FileNotFoundError)
    assert "0 rows and no user" in refused({"u": pa.array([], pa.string()), "i": pa.array([], pa.string())})
    assert "1 rows and no user" in refused({"u": [None], "i": ["x"]})
    assert "one of length" in refused({"u": [1], "i": [1, 2]}) or "length" in refused({"u": [1], "i": [1, 2]})
    assert "dict of columns" in refused(3)
    assert "row 1: p is 'red'" in refused({"u": [1], "i": [1], "p": ["red"]}, features=["p"])
    assert "names one twice" in refused({"u": [1], "i": [1]}, time="u")
    assert "i is of type" in refused({"u": [1], "i": [[1]]})
    cases = {
        "a.csv": (b"", "is empty"),
        "b.csv": (b"u,i\n1,2\n1\n", "cannot be read"),
        "c.csv": (b"u,item\n1,2\n", "has no column 'i'"),
        "d.jsonl": (b'{"u": 1, "i": 2}\n{"u": 1\n', "cannot be read"),
        "e.jsonl": (b"[1]\nnot json\n", "one JSON object a line"),
        "f.jsonl": (b'{"u": 1, "i": 2}\n{"u": "x", "i": 2}\n', "cannot be read"),
        "g.parquet": (b"PAR1 cut short", "cannot be read"),
        "h.arrow": (b"ARROW1 cut short", "cannot be read"),
        "h.csv.gz": (gzip.compress(b"u,i\n1,2\n" * 9)[:-9], "cannot be read"),
        "i.txt": (b"u i", "no format that is read here"),
        "j.jsonl": (b'{"u": 1}\n', "has no column 'i'"),
    }
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        said = refused(tmp_path / name)
        assert words in said and name in said, said


def test_a_disk_that_fills_up_leaves_nothing_and_says_so(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(grouping.Grouping, "_join", full)
    with pytest.raises(OSError, match="disk of .* is full") as refusal:
        Interactions.read(LOG, **NAMES, folder=tmp_path / "made")
    assert refusal.value.errno == errno.ENOSPC and str(refusal.value).endswith(".")
    assert [path.name for path in tmp_path.iterdir()] == [".made.lock"]


# Made once.


def test_what_was_made_is_found_again_until_files_or_settings_change(tmp_path, monkeypatch):
    source, made = written(tmp_path, ".csv"), tmp_path / "made"
    Interactions.read(source, **NAMES, folder=made)
    assert oct(os.stat(made).st_mode)[-3:] == "700"
    with monkeypatch.context() as patch:
        patch.setattr(sources, "stretches", lambda *args: 1 / 0)
        found = Interactions.read(source, **NAMES, folder=made, items=CATALOGUE)
        assert told(found) == EXPECTED
        assert told(Interactions.read(source, **NAMES, folder=made, items=CATALOGUE)) == EXPECTED
        with pytest.raises(ZeroDivisionError):
            Interactions.read(source, **NAMES, duplicates="keep", folder=made)
    assert told(found) == EXPECTED  # a failed second reading leaves the first
    with source.open("a") as file:
        file.write('"eve","tea",1700000000,1\n')
    assert told(Interactions.read(source, **NAMES, folder=made, items=CATALOGUE)) == {**EXPECTED, "eve": ["tea"]}
    assert told(found) == EXPECTED  # who had it open reads on


def test_a_half_made_folder_is_never_read(tmp_path, monkeypatch):
    made = tmp_path / "made"
    left = tmp_path / ".0123456789ab.made"  # as a kill leaves it
    left.mkdir()
    (left / "rows.bin").write_bytes(b"1234")
    Interactions.read(LOG, **NAMES, folder=made)
    assert not left.exists()
    (made / grouping.ABOUT).unlink()
    with pytest.raises(ValueError, match="holds something else"):
        Interactions.read(LOG, **NAMES, folder=made)
    with pytest.raises(ValueError, match="holds something else"):
        Interactions.read(LOG, **NAMES, folder=written(tmp_path, ".csv"))


def test_without_a_folder_nothing_stays():
    log = Interactions.read(LOG, **NAMES, items=CATALOGUE)
    folder = log.folder
    assert folder.exists()
    del log
    assert not folder.exists()


# Users.


def crowd(users, rows=1):
    return {"u": np.repeat([f"user {u}" for u in users], rows), "i": ["x"] * (rows * len(users))}


def test_a_user_stays_on_their_side_when_other_users_join():
    log, more = (Interactions.read(crowd(users), user="u", item="i") for users in (range(500), range(-9, 700)))
    sides = []
    for found in (log, more):
        train, test = found.split(0.8, key="first")
        assert sorted([*train, *test]) == list(range(len(found)))
        assert stats.binomtest(len(train), len(found), 0.8).pvalue > 1e-6
        sides.append(set(found.unit_ids.take(pa.array(train)).to_pylist()))
    everybody = set(log.unit_ids.to_pylist())
    assert sides[0] == sides[1] & everybody
    other = log.unit_ids.take(pa.array(log.split(0.8, key="second")[0])).to_pylist()
    assert 0.5 < len(sides[0] & set(other)) / len(other) < 0.95
    with pytest.raises(ValueError, match="between 0 and 1"):
        log.split(1.0)


def test_given_splits_name_users_by_their_own_ids():
    log = Interactions.read(LOG, **NAMES)
    assert log.unit_ids.take(pa.array(log.units(["bob", "ann"]))).to_pylist() == ["bob", "ann"]
    with pytest.raises(ValueError, match="1 of these users are not in the log, 'eve'"):
        log.units(["ann", "eve"])


def test_everybody_is_a_unit_whatever_items_are_known():
    log = Interactions.read(LOG, **NAMES)
    assert "items not chosen" in repr(log)
    with pytest.raises(ValueError, match="private_items"):
        log.numbers  # noqa: B018
    none = log.with_items(["nothing of that"])
    assert len(none) == 3 and none.num_rows == 0 and none.recent([0, 1], 2)["item"].tolist() == [[0, 0], [0, 0]]
    assert "3 users without a row left" in none.summary()
    batch = NextItemExamples(none, history=4, negatives=1).fetch([2, 0])
    assert batch["label"].tolist() == [0, 0] and not batch["context"].any()
    some = log.with_items(["tea"])
    assert told(some) == {"ann": ["tea"], "bob": ["tea"], "007": []} and told(log.with_items(CATALOGUE)) == EXPECTED


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=30), st.integers(1, 4), st.booleans())
def test_one_user_moves_row_counts_by_no_more_than_said(rows, bound, ordered):
    rows = [*rows, (5, 1)]
    counts = []
    for kept in (rows, [row for row in rows if row[0] != 0]):
        log = {"u": [u for u, _ in kept], "i": [i for _, i in kept], "t": list(range(len(kept)))}
        names = {"user": "u", "item": "i", "time": "t" if ordered else ""}
        found = Interactions.read(log, **names, items=[1, 2, 3], rows_per_unit=bound)
        counts.append(np.bincount(found.numbers, minlength=4))
        for unit, user in enumerate(found.unit_ids.to_pylist()):
            mine = [i for u, i in kept if u == user and i < 4]
            assert found[unit].tolist() == (mine if ordered else list(dict.fromkeys(mine)))[-bound:]
    assert np.linalg.norm(counts[0] - counts[1]) <= found.row_sensitivity + 1e-9
    assert found.row_sensitivity == (bound if ordered else bound**0.5)


@pytest.mark.parametrize("dtype, bits", [("float32", 24), ("float64", 53)])
def test_users_whose_floats_may_be_those_of_several_are_refused(dtype, bits):
    ids = np.array([2.0**bits - 1, 2.0**bits - 2, 3.0], dtype)
    assert Interactions.read({"u": ids, "i": ["x", "y", "z"]}, user="u", item="i").num_users == 3
    with pytest.raises(ValueError, match="row 2"):
        Interactions.read({"u": ids + np.array([0, 2, 0], dtype), "i": ["x", "y", "z"]}, user="u", item="i")


def test_a_bound_is_a_whole_number_and_none_is_infinite():
    log = Interactions.read(LOG, **NAMES)
    assert log.with_items(CATALOGUE).row_sensitivity == float("inf")
    for wrong in (0, 1.5):
        with pytest.raises(ValueError, match="rows_per_unit"):
            log.with_items(CATALOGUE, rows_per_unit=wrong)
    with pytest.raises(ValueError, match="give it with items"):
        Interactions.read(LOG, **NAMES, rows_per_unit=3)


def test_one_huge_user_is_grouped_and_gives_one_example():
    users = np.where(np.arange(200_000) % 100, "bot", "rare")
    log = {"u": users, "i": np.arange(200_000) % 50, "t": np.arange(200_000)[::-1]}
    found = Interactions.read(log, user="u", item="i", time="t", items=range(50))
    bot = found.units(["bot"])[0]
    assert len(found) == 2 and found.lengths[bot] == 198_000
    assert found.items.of(found[bot][:3]) == [49, 48, 47]
    assert NextItemExamples(found, negatives=0).fetch([bot])["context"].shape == (1, 20)


def test_recent_rows_are_the_last_ones_in_order():
    log = Interactions.read(LOG, **NAMES, features=["price"], items=CATALOGUE)
    found = log.recent(log.units(["ann", "007", "bob"]), 2)
    assert [log.items.of(row) for row in found["item"]] == [["tea", "ham"], [None, None], ["jam", "tea"]]
    assert found["price"][0].tolist() == [1.0, 3.0] and found["time"][2].tolist() == [1_700_000_100, 1_700_000_400]


# Examples.


def test_rows_without_order_give_any_label_and_any_others_as_context():
    rows = {"u": ["a"] * 6 + ["b"] * 3, "i": [*range(6), *range(3)]}
    log = Interactions.read(rows, user="u", item="i", items=range(6))
    examples = NextItemExamples(log, history=3, negatives=0, seed=0)
    a, b = log.units(["a", "b"])
    labels, others = np.zeros(7), np.zeros((7, 7))
    for _ in range(3000):
        batch = examples.fetch([a, b])
        label, context = batch["label"][0], batch["context"][0]
        assert len({label, *context}) == 4 and 0 not in context
        labels[label] += 1
        others[label, context] += 1
        assert sorted([batch["label"][1], *batch["context"][1]]) == [0, 1, 2, 3]
    assert stats.chisquare(labels[1:]).pvalue > 1e-6
    for label in range(1, 7):
        assert stats.chisquare(np.delete(others[label, 1:], label - 1)).pvalue > 1e-6
    skewed = labels[1:] + np.array([150, -150, 0, 0, 0, 0])
    assert stats.chisquare(skewed).pvalue < 1e-6


def test_examples_of_a_log_are_those_of_timelines():
    from tfdp_rec.data import synthetic

    timelines = synthetic.timelines(num_users=50, num_movies=40, events=600)
    users = np.repeat(np.arange(50), timelines.lengths)
    log = Interactions.read(
        {"u": users, "i": timelines.numbers, "t": np.arange(len(users))}, user="u", item="i", time="t",
        items=range(1, 41),
    )  # fmt: skip
    order = log.units(range(50))
    one, other = (NextItemExamples(source, seen, seed=3, negatives=5).fetch(np.arange(50))
                  for source, seen in ((timelines, None), (log, order)))  # fmt: skip
    assert all((one[name] == other[name]).all() for name in ("context", "label"))


# Items.


def test_items_are_read_and_saved(tmp_path):
    (tmp_path / "catalogue.csv").write_text("sku,title\n01,A\n02,B\n")
    log = Interactions.read({"u": [1], "sku": ["02"]}, user="u", item="sku", items=tmp_path / "catalogue.csv")
    assert told(log) == {1: ["02"]} and len(log.items) == 2
    log.items.save(tmp_path / "items.parquet")
    again = Items.read(tmp_path / "items.parquet")
    assert again.ids == log.items.ids and again.numbers(["02", "2", None]).tolist() == [2, 0, 0]
    with pytest.raises(ValueError, match="say which one holds the ids"):
        Items.read(tmp_path / "catalogue.csv")
    assert Items.read(tmp_path / "catalogue.csv", column="title").of([[2, 1]][0]) == ["B", "A"]


def test_items_that_are_no_list_are_refused():
    for wrong, words in (([], "is empty"), ([1, None], "missing"), (["a", "a"], "'a' twice"), ([1, "a"], "all text")):
        with pytest.raises(ValueError, match=words):
            Items(wrong)
    with pytest.raises(IndexError, match="from 1 to 2"):
        Items(["a", "b"]).of([3])


def test_numbers_and_text_meet_in_items():
    assert Items(["7", "07"]).numbers([7, 8]).tolist() == [1, 0]
    assert Items([7, 8]).numbers(["8", "08", "x", ""]).tolist() == [2, 0, 0, 0]


def test_a_user_without_items_teaches_a_model_nothing():
    import tfdp_rec

    model = tfdp_rec.models.TwoTower([1, 2, 3], width=4, hidden=0, ks=(1,))
    model.compile(tfdp_rec.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2))
    batch = {"context": np.array([[1, 0], [0, 0]]), "label": np.array([2, 0]), "negatives": np.array([1, 3])}
    found = tfdp_rec.clipping.clipped_sum(model, batch, l2_norm_clip=1.0)
    assert found.norms[0] > 0.01 and found.norms[1] < 1e-6


# Odd names and values.


def test_a_file_whose_name_looks_like_a_pattern_is_read_and_not_another(tmp_path):
    for name, item in (("w[1].csv", "right"), ("w1.csv", "wrong")):
        (tmp_path / name).write_text(f"u,i\na,{item}\n")
    for source in (tmp_path / "w[1].csv", [str(tmp_path / "w[1].csv")]):
        assert Interactions.read(source, user="u", item="i").found()[1].to_pylist() == ["right"]
    both = Interactions.read(str(tmp_path / "w*.csv"), user="u", item="i").found()[1]
    assert sorted(both.to_pylist()) == ["right", "wrong"]


def test_nanoseconds_are_times_without_pandas(tmp_path):
    """pyarrow asks pandas for them as soon as one is shown."""
    times = pa.array([1_234_567_890_123_456_789, 5], pa.timestamp("ns"))
    pa.parquet.write_table(pa.table({"u": ["a", "a"], "i": ["x", "y"], "t": times}), tmp_path / "log.parquet")
    log = Interactions.read(tmp_path / "log.parquet", user="u", item="i", time="t")
    assert log.found()[1].to_pylist() == ["x", "y"] and log.found()[0].numbers.tolist() == [2, 1]
    with pytest.raises(ValueError, match="row 1: t is '2009-02-13 23:31:30.123456789'"):
        Interactions.read(tmp_path / "log.parquet", user="u", item="i", features=["t"])


@pytest.mark.parametrize("values", [[1.5, 1e300], [1.7e9, -1e19]])
def test_a_number_that_is_no_time_is_named_with_file_and_row(tmp_path, values):
    pa.parquet.write_table(pa.table({"u": ["a", "b"], "i": ["x", "y"], "t": values}), tmp_path / "log.parquet")
    with pytest.raises(ValueError, match=r"log.parquet, row 2: t is '.*', which is no time"):
        Interactions.read(tmp_path / "log.parquet", user="u", item="i", time="t")


@pytest.mark.parametrize("name", ["u", "i"])
def test_text_that_is_not_utf_8_is_refused_by_file(tmp_path, name):
    starts, text = np.array([0, 1, 2], np.int32), b"a\xff"
    ids = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(starts), pa.py_buffer(text)])
    columns = {"u": ["a", "b"], "i": ["x", "y"]} | {name: ids}
    pa.parquet.write_table(pa.table(columns), tmp_path / "log.parquet")
    with pytest.raises(ValueError, match=rf"log.parquet.*: {name} holds text that is not UTF-8"):
        Interactions.read(tmp_path / "log.parquet", user="u", item="i")


def test_nanoseconds_as_floats_are_times_and_beside_seconds_two_units():
    log = {"u": ["a", "a"], "i": ["x", "y"], "t": [1.7e18, 1.6e18]}
    assert Interactions.read(log, user="u", item="i", time="t").found()[0].numbers.tolist() == [2, 1]
    with pytest.raises(ValueError, match="the column began with seconds since 1970"):
        Interactions.read({**log, "t": [1.7e9, 1.6e18]}, user="u", item="i", time="t")


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "jsonl", "frame"])
def test_two_columns_of_one_name_are_refused_by_file(tmp_path, kind):
    table = pa.table([pa.array(["a"]), pa.array(["x"]), pa.array(["z"])], names=["u", "i", "i"])
    path = tmp_path / f"log.{kind}"
    if kind == "csv":
        path.write_text("u,i,i\na,x,z\n")
    elif kind == "parquet":
        pa.parquet.write_table(table, path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    elif kind == "jsonl":
        path.write_text('{"u": "a", "i": "x", "i": "z"}\n')
    with pytest.raises(ValueError, match="has 2 columns called 'i'|specified twice"):
        Interactions.read(table if kind == "frame" else path, user="u", item="i")


def test_what_killed_processes_left_in_the_place_for_temporary_files_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = {"u": ["a"], "i": ["x"]}
    alive = Interactions.read(rows, user="u", item="i")
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_mode & 0o77 == 0
    dead = shutil.copytree(kept, tmp_path / "tfdp-rec-interactions-dead")
    other = Interactions.read(rows, user="u", item="i")
    assert not dead.exists() and kept.exists() and len(list(tmp_path.iterdir())) == 2
    del alive, other
    gc.collect()
    assert list(tmp_path.iterdir()) == []


# A row for each user.

LISTS = {
    "who": ["ann", "bob", "007", None, "cy"],
    "what": [["jam", "tea", None, "ham"], ["jam", "tea"], [], ["lost"], None],
    "when": [[1_700_000_200, 1_700_000_300, 5, 1_700_000_400], [1_700_000_100, 1_700_000_400], [], [1], None],
}
BY_USER = {"user": "who", "items": "what", "times": "when"}


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_lists_of_a_user_are_the_rows_they_stand_for(rows, tmp_path, monkeypatch):
    flat = [
        (user, item, time)
        for user, items, times in zip(*LISTS.values())
        for item, time in zip(items or [None], times or [None])
    ]
    expected = told(Interactions.read(dict(zip(NAMES.values(), zip(*flat))), **NAMES, items=CATALOGUE))
    pyarrow.parquet.write_table(pa.table(LISTS), tmp_path / "lists.parquet")
    monkeypatch.setattr(sources, "_ROWS", rows)
    for source in (pa.table(LISTS), tmp_path / "lists.parquet"):
        log = Interactions.from_grouped(source, **BY_USER).with_items(CATALOGUE)
        assert log.ordered and told(log) == expected == {**EXPECTED, "cy": []}
    plain = Interactions.from_grouped(pa.table(LISTS), user="who", items="what").with_items(CATALOGUE)
    assert not plain.ordered and told(plain) == told(log)


def test_long_lists_are_read_a_few_users_at_a_time(tmp_path, monkeypatch):
    path = tmp_path / "lists.parquet"
    pyarrow.parquet.write_table(pa.table({"who": range(200), "what": [list(range(50))] * 200}), path)
    monkeypatch.setattr(sources, "_ROWS", 500)
    sizes = [sources.unfold(each, "who").table.num_rows for each in sources.stretches(str(path), ["who", "what"])]
    assert sum(sizes) == sources.rows_about(str(path)) == 10_000 and max(sizes) <= 500


def test_a_parquet_file_is_never_in_memory_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_ROWS", 10_000)
    path, before = tmp_path / "rows.parquet", pa.total_allocated_bytes()
    table = pa.table({"x": np.random.default_rng(0).random(1_000_000)})
    pyarrow.parquet.write_table(table, path, row_group_size=50_000)
    del table
    held = [pa.total_allocated_bytes() - before for _ in sources.stretches(str(path), ["x"])]
    assert len(held) == 100 and max(held) < path.stat().st_size / 4


def test_lists_of_different_lengths_are_refused_by_their_file(tmp_path):
    broken = {**LISTS, "when": [[1], *LISTS["when"][1:]]}
    with pytest.raises(ValueError, match="lists of one user have different lengths"):
        Interactions.from_grouped(pa.table(broken), **BY_USER)


@pytest.mark.parametrize(
    "wrong, says",
    [({"who": pa.array([["a"], ["b"]])}, "who is of .* an id there"), ({"what": pa.array([1, 2])}, "a list there")],
)
def test_columns_of_a_log_by_user_that_are_no_lists_or_are_one_too_many(wrong, says):
    """One item stood for all times of its user."""
    right = {"who": pa.array(["a", "b"]), "what": pa.array([[1, 2], []], pa.large_list(pa.int64()))}
    found = Interactions.from_grouped(pa.table(right), user="who", items="what").with_items([1, 2])
    assert sorted(map(len, (found[0], found[1]))) == [0, 2]
    with pytest.raises(ValueError, match=says):
        Interactions.from_grouped(pa.table({**right, **wrong}), user="who", items="what")


@pytest.mark.parametrize("timed", [True, False])
def test_a_log_written_by_user_is_the_same_log(timed, tmp_path):
    rng = np.random.default_rng(1)
    rows = {"who": [f"u{u}" for u in rng.integers(0, 40, 900)], "what": rng.integers(0, 30, 900).tolist()}
    rows["what"][:5], names = [None] * 5, {"user": "who", "item": "what"}
    if timed:
        rows["when"], names = rng.random(900), NAMES
    log = Interactions.read(rows, **names)
    log.write_grouped(tmp_path / "by-user.parquet")
    again = Interactions.from_grouped(tmp_path / "by-user.parquet", **dict(zip(BY_USER, rows)))
    assert pyarrow.parquet.read_metadata(tmp_path / "by-user.parquet").num_rows == len(log)
    assert told(again.with_items(range(3, 25))) == told(log.with_items(range(3, 25)))
    assert again.ordered == log.ordered == timed and (not timed or sorted(again.with_items([3, 4]).times) == sorted(
        log.with_items([3, 4]).times))  # fmt: skip
