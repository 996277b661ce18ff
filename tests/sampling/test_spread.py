"""Rows spread over the batches of an epoch: as sorted in memory, whatever fits into it; nothing of them stays."""

import errno
import gc
import io
import itertools
import os
import signal
import subprocess
import sys
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from tfdp_rec.core.ground import spread as spreading
from tfdp_rec.core.ground.spread import spread
from tfdp_rec.datasets.logs import sources
from tfdp_rec.datasets.logs.row_files import RowFiles


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty folder for temporary files, which is empty again in the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    gc.collect()
    assert list(folder.iterdir()) == []


def leaves(rows):
    return tf.nest.flatten(rows)


def sliced(rows, places):
    return tf.nest.map_structure(lambda leaf: leaf[places], rows)


def blocks_of(rows, ends):
    for start, end in itertools.pairwise(ends):
        yield sliced(rows, slice(start, end))


def handing_out(numbers):
    """A draw that gives numbers which were drawn before."""
    left = iter(numbers.tolist())
    return lambda rows: np.fromiter(itertools.islice(left, rows), np.int64, rows)


def same(one, other):
    tf.nest.assert_same_structure(one, other)
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()
        for a, b in zip(leaves(one), leaves(other))
    )


def expected(rows, numbers, num_batches):
    """Each batch by looking at all rows."""
    plain = tf.nest.map_structure(lambda leaf: leaf.astype(object) if leaf.dtype.kind in "SU" else leaf, rows)
    return [sliced(plain, np.flatnonzero(numbers == batch)) for batch in range(num_batches)]


def some(rows=100, batches=7, seed=0):
    rng = np.random.default_rng(seed)
    x = {"id": rng.integers(2**60, size=rows), "vector": rng.random((rows, 8), np.float32)}
    return (x, np.array([f"user {number}" * (number % 5) for number in range(rows)])), rng.integers(batches, size=rows)


class Folders:
    """Blocks, and after each of them what is in the place for temporary files."""

    def __init__(self, blocks, place):
        self.blocks, self.place, self.seen = blocks, place, []

    def __iter__(self):
        for block in self.blocks:
            yield block
            self.seen.append(sorted(path.relative_to(self.place).as_posix() for path in self.place.rglob("*")))


KINDS = st.sampled_from(
    ["int8", "int64", "uint32", "float16", "float32", "float64", "complex64", "bool", "S3", "U4", "object"]
)
SHAPES = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
TEXT = st.text(max_size=3) | st.binary(max_size=3)


@st.composite
def data(draw):
    """A nest of rows, the number of the batch of each, how many batches, where blocks end, and bytes of memory."""
    count = draw(st.integers(1, 12))

    def leaf(kind, inner):
        kinds = (
            {"elements": TEXT} if kind == "object" else {"elements": {"allow_nan": False}} if kind[0] in "fc" else {}
        )
        return draw(arrays_of.arrays(kind, (count, *inner), fill=st.nothing() if kind == "object" else None, **kinds))

    made = [leaf(kind, draw(SHAPES)) for kind in draw(st.lists(KINDS, min_size=1, max_size=4))]
    forms = [made[0], tuple(made), {f"{n}": leaf for n, leaf in enumerate(made)}, ({"first": made[0]}, tuple(made))]
    batches = draw(st.integers(1, 20))
    numbers = np.array(draw(st.lists(st.integers(0, batches - 1), min_size=count, max_size=count)))
    ends = [0, *sorted(draw(st.lists(st.integers(0, count), max_size=5))), count]
    return draw(st.sampled_from(forms)), numbers, batches, ends, draw(st.sampled_from([0, 1, 300, 1000, 3000, 2**28]))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data())
def test_every_batch_has_its_rows_in_their_order_for_any_memory(made):
    rows, numbers, batches, ends, memory = made
    found = list(spread(blocks_of(rows, ends), handing_out(numbers), len(numbers), batches, memory=memory))
    assert len(found) == batches and all(map(same, found, expected(rows, numbers, batches)))


@pytest.mark.parametrize("memory", [1, 10_000, 100_000, 10**9])
@pytest.mark.parametrize("batches", [1, 7, 300, 2000])
def test_more_rows_are_in_the_same_batches_whether_or_not_they_fit_into_memory(place, memory, batches):
    rows, numbers = some(1000, batches)
    blocks = Folders(blocks_of(rows, range(0, 1001, 50)), place)
    found = spread(blocks, handing_out(numbers), 1000, batches, memory=memory)
    assert all(map(same, found, expected(rows, numbers, batches)))
    files = {file for seen in blocks.seen for file in seen}
    assert not files if memory == 10**9 else len(files) == 3  # a folder with a lock and one file, of any size


def test_no_more_is_held_than_memory_allows(monkeypatch):
    joined = []
    monkeypatch.setattr(
        spreading, "_join", lambda parts, join=spreading._join: joined.append(join(parts)) or joined[-1]
    )
    rows, numbers = {"x": np.zeros((20_000, 12))}, np.random.default_rng(0).integers(500, size=20_000)
    memory = 200_000  # of 2 MB
    batches = spread(blocks_of(rows, range(0, 20_001, 10)), handing_out(numbers), 20_000, 500, memory=memory)
    assert len(list(batches)) == 500
    assert 20 < len(joined) < 80 and max(sum(array.nbytes for array in arrays) for arrays in joined) < 0.55 * memory


def test_text_takes_the_memory_of_its_letters(place):
    rows = np.array(["x" * 10_000 for _ in range(200)], object)
    blocks = Folders(blocks_of(rows, range(0, 201, 10)), place)
    found = list(spread(blocks, lambda rows: np.arange(rows) % 3, 200, 3, memory=1_000_000))
    assert blocks.seen[0] == [] and len(blocks.seen[-1]) == 3 and sum(map(len, found)) == 200


def test_a_buffer_that_is_filled_anew_is_read_in_time():
    buffer = np.zeros(2, np.int64)

    def blocks():
        for number in range(4):
            buffer[:] = number
            yield buffer

    found = list(spread(blocks(), lambda rows: np.zeros(rows, np.int64), 8, 1))
    assert found[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


# What is refused, before the first batch.


@pytest.mark.parametrize("memory", [1, 10**9])
@pytest.mark.parametrize("rows, words", [(99, "more rows than num_rows=99"), (101, "fewer rows than num_rows=101")])
def test_another_number_of_rows_is_refused_before_the_first_batch(memory, rows, words):
    data, numbers = some()
    drawn = []

    def draw(count):
        drawn.append(count)
        return np.zeros(count, np.int64)

    with pytest.raises(ValueError, match=words):
        next(spread(blocks_of(data, range(0, 101, 10)), draw, rows, 7, memory=memory))
    assert sum(drawn) <= rows


@pytest.mark.parametrize("memory", [1, 10**9])
def test_an_iterator_has_one_epoch_and_data_two(memory):
    data, numbers = some()
    for blocks, epochs in ((blocks_of(data, [0, 60, 100]), 1), (list(blocks_of(data, [0, 60, 100])), 2)):
        for epoch in range(2):
            batches = spread(blocks, handing_out(numbers), 100, 7, memory=memory)
            if epoch < epochs:
                assert all(map(same, batches, expected(data, numbers, 7)))
            else:
                with pytest.raises(ValueError, match="fewer rows .* not an iterator"):
                    next(batches)


X = np.arange(4)
UNFIT = {
    "other dtype": ([{"x": X}, {"x": X.astype("int32")}], r"must be alike .*int64\[\].*int32\[\]"),
    "other inner shape": ([{"x": X}, {"x": np.zeros((4, 2), int)}], r"must be alike .*\[2\]"),
    "other names": ([{"x": X}, {"y": X}], "must be alike"),
    "other nest": ([{"x": X}, (X,)], "must be alike"),
    "other lengths": ([{"x": X, "y": X[:3]}], r"shapes \[\[4\], \[3\]\]"),
    "single rows": ([{"x": 3}], r"dataset\.batch"),
    "nothing": ([{}], "one row each"),
    "lists": ([{"x": np.array([[1], [2, 3]], object)}], "neither numbers nor text"),
    "missing text": ([{"x": np.array(["a", None])}], "neither numbers nor text"),
    "times": ([{"x": X.astype("M8[s]")}], "times as numbers"),
    "ragged": ([{"x": tf.ragged.constant([[1], [2, 3]])}], "RaggedTensor.*padded"),
    "sparse": ([{"x": tf.sparse.eye(4)}], "SparseTensor.*padded"),
}


@pytest.mark.parametrize("memory", [1, 10**9])
@pytest.mark.parametrize("blocks, words", UNFIT.values(), ids=UNFIT)
def test_blocks_that_are_no_rows_or_unlike_are_refused(blocks, words, memory):
    with pytest.raises(ValueError, match=words) as refusal:
        next(spread(blocks, lambda rows: np.zeros(rows, np.int64), 8, 2, memory=memory))
    assert len(str(refusal.value)) < 500 and str(refusal.value).endswith(".")


@pytest.mark.parametrize("drawn", [[0, 1, 2, 3], [0, -1, 0, 0], [0, 1, 2], [0.0, 1, 2, 0], 1])
def test_a_draw_of_other_numbers_is_refused(drawn):
    with pytest.raises(ValueError, match="one whole number from 0 to 2 for each row"):
        next(spread([X], lambda rows: np.array(drawn), 4, 3))


# Nothing of the rows stays.


def begun(place, folder=None, **settings):
    """An epoch on disk, of which one batch was read."""
    data, numbers = some()
    batches = spread(blocks_of(data, [0, 60, 100]), handing_out(numbers), 100, 7, folder, memory=1, **settings)
    next(batches)
    (made,) = (folder or place).iterdir()
    assert made.stat().st_mode & 0o777 == 0o700 and (made / "rows").stat().st_size > 4000
    return batches


@pytest.mark.parametrize(
    "end", [list, lambda batches: batches.close(), lambda batches: None], ids=["read", "closed", "dropped"]
)
@pytest.mark.parametrize("own", [False, True])
def test_what_is_on_disk_is_its_owners_and_ends_with_the_epoch(place, tmp_path, end, own):
    folder = tmp_path / "own" if own else None
    if own:
        folder.mkdir()
    batches = begun(place, folder)
    end(batches)
    del batches
    gc.collect()
    assert not any((folder or place).iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ZeroDivisionError])
def test_an_error_in_reading_or_training_leaves_nothing(place, error):
    data, numbers = some()

    def failing():
        yield from blocks_of(data, [0, 50, 60])
        assert len(list(place.iterdir())) == 1
        raise error

    with pytest.raises(error):
        next(spread(failing(), handing_out(numbers), 100, 7, memory=1))
    assert not any(place.iterdir())
    batches = begun(place)
    with pytest.raises(error):
        batches.throw(error)
    assert not any(place.iterdir())


KILLED = """
import itertools, sys
import numpy as np
from tfdp_rec.core.ground.spread import spread
batches = spread([np.arange(100)] * 3, lambda rows: np.arange(rows) % 5, 300, 5, sys.argv[1], memory=1)
next(batches)
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "end, left",
    [(signal.SIGKILL, 1), pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow)],
    ids=["SIGKILL", "SIGINT"],
)
def test_what_a_killed_process_left_is_removed_by_the_next_and_an_interrupted_one_leaves_nothing(tmp_path, end, left):
    folder = tmp_path / "own"
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "begun\n"
        (kept,) = folder.iterdir()
        next(spread([X], lambda rows: X, 4, 4, folder))
        assert kept.exists()  # its process is alive
        process.send_signal(end)
        process.communicate()
    assert process.returncode and len(list(folder.iterdir())) == left
    next(spread([X], lambda rows: X, 4, 4, folder))  # also one that itself fits into memory
    assert not any(folder.iterdir())


def test_a_full_disk_is_one_sentence_and_leaves_nothing(place, monkeypatch):
    class Full(io.FileIO):
        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

    data, numbers = some()
    monkeypatch.setattr(spreading, "open", lambda path, mode: io.BufferedWriter(Full(path, mode)), raising=False)
    with pytest.raises(OSError, match=r"disk of .* is full.*free some space.*\.$") as refusal:
        next(spread(blocks_of(data, [0, 50, 100]), handing_out(numbers), 100, 7, memory=1))
    assert refusal.value.errno == errno.ENOSPC and str(place) in str(refusal.value) and not any(place.iterdir())


def test_long_work_says_how_far_it_is_and_short_work_nothing(monkeypatch, capsys):
    data, numbers = some()

    def run(**settings):
        list(spread(blocks_of(data, range(0, 101, 10)), handing_out(numbers), 100, 7, **settings))

    run()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(spreading.time, "monotonic", itertools.count(step=3).__next__)
    run(note=None)
    assert capsys.readouterr().out == ""
    run()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "20 of 100 rows are in the batches of the epoch." and 2 < len(said) < 6


# Where rows come from.

TABLE = {
    "id": [2**60 + number for number in range(10)],
    "name": [f"user {number}" for number in range(10)],
    "kind": pa.array(["a", "b"] * 5).dictionary_encode(),
    "bytes": [b"\0x"] * 10,
    "ok": [True, False] * 5,
    "vector": [[float(number), 1.0] for number in range(10)],
    "fixed": pa.array([[[number, 1, 2]] * 2 for number in range(10)], pa.list_(pa.list_(pa.int16(), 3), 2)),
}


def written(folder, table=TABLE):
    table = pa.table(table)
    for number, start in enumerate((0, 4, 4)):
        part = table.slice(start, 4 if number == 0 else 0 if number == 1 else 6)
        pa.parquet.write_table(part, folder / f"part-{number}.parquet", row_group_size=3)
    return str(folder / "part-*.parquet")


@pytest.mark.parametrize("at_once", [1, 4, 2**18])
def test_parquet_files_are_read_as_arrays_as_often_as_asked(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(sources, "_ROWS", at_once)
    rows = RowFiles(written(tmp_path), (["id", "vector"], {"all": ("name", "kind", "bytes", "ok", "fixed")}, "ok"))
    assert len(rows) == 10
    x = {"id": np.array(TABLE["id"]), "vector": np.array(TABLE["vector"])}
    kinds = [np.array(["a", "b"] * 5, object), np.array(TABLE["bytes"], object), np.array(TABLE["ok"])]
    fixed = np.array([[[number, 1, 2]] * 2 for number in range(10)], np.int16)
    whole = (x, {"all": (np.array(TABLE["name"], object), *kinds, fixed)}, np.array(TABLE["ok"]))
    numbers = np.random.default_rng(0).integers(3, size=10)
    for memory in (1, 10**9):
        found = list(spread(rows, handing_out(numbers), len(rows), 3, memory=memory))
        assert all(map(same, found, expected(whole, numbers, 3)))


LACKING = {
    "a missing number": (pa.array([1, None]), "lacks values"),
    "a missing text": (pa.array(["a", None]), "lacks values"),
    "a missing list": (pa.array([[1], None]), "lacks values"),
    "a missing number in a list": (pa.array([[1], [None]]), "lacks values"),
    "lists of other lengths": (pa.array([[1], [2, 3]]), "different lengths"),
    "times": (pa.array([1, 2], pa.timestamp("s")), "is of type timestamp"),
    "records": (pa.array([{"a": 1}, {"a": 2}]), "is of type struct"),
}


@pytest.mark.parametrize("column, words", LACKING.values(), ids=LACKING)
def test_columns_that_are_no_arrays_are_refused_by_file_and_name(tmp_path, column, words):
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.table({"id": [1, 2], "column": column}), path)
    with pytest.raises(ValueError, match=words) as refusal:
        next(iter(RowFiles(path, ["id", "column"])))
    assert str(path) in str(refusal.value) and "column" in str(refusal.value) and str(refusal.value).endswith(".")


def test_files_that_are_not_parquet_or_lack_a_column_are_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("id\n1\n")
    with pytest.raises(ValueError, match="Parquet files alone"):
        RowFiles(path, ["id"])
    with pytest.raises(ValueError, match="Parquet files alone"):
        RowFiles({"id": [1]}, ["id"])
    with pytest.raises(ValueError, match="no column 'other'"):
        next(iter(RowFiles(written(tmp_path), ["id", "other"])))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="broken.parquet cannot be read"):
        len(RowFiles(tmp_path / "broken.parquet", ["id"]))


@pytest.mark.parametrize("memory", [1, 10**9])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_dataset_of_batches_has_the_rows_that_it_has(memory, shuffled):
    data, numbers = some()
    dataset = tf.data.Dataset.from_tensor_slices(data)
    dataset = (dataset.shuffle(20) if shuffled else dataset).batch(16)
    found = list(spread(dataset, handing_out(numbers), 100, 7, memory=memory))
    assert [len(batch[1]) for batch in found] == np.bincount(numbers, minlength=7).tolist()
    if not shuffled:
        text = (data[0], np.char.encode(data[1]))
        assert all(map(same, found, expected(text, numbers, 7)))
    everything = np.concatenate([batch[0]["id"] for batch in found])
    assert sorted(everything.tolist()) == sorted(data[0]["id"].tolist())


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda dataset: dataset.batch(10).repeat(), "has no end"),
        (lambda dataset: dataset.batch(10).repeat().filter(lambda x, y: True), "more rows than num_rows=100"),
        (lambda dataset: dataset.batch(10).repeat(2), "more rows than num_rows=100"),
        (lambda dataset: dataset.batch(16, drop_remainder=True), "fewer rows than num_rows=100"),
        (lambda dataset: dataset, r"give dataset\.batch\(1024\)"),
    ],
)
def test_a_dataset_with_other_rows_is_refused(change, words):
    dataset = change(tf.data.Dataset.from_tensor_slices(some()[0]))
    batches = spread(dataset, lambda rows: np.zeros(rows, np.int64), 100, 7)
    with pytest.raises(ValueError, match=words):
        next(batches)


def test_a_dataset_of_bfloat16_keeps_it():
    values = tf.cast(tf.range(8), tf.bfloat16)
    found = list(spread(tf.data.Dataset.from_tensors(values), lambda rows: np.arange(rows) % 2, 8, 2, memory=1))
    assert found[1].dtype == values.numpy().dtype and found[1].astype(int).tolist() == [1, 3, 5, 7]
