"""Criteo's files: fields, buckets, missing values, compression, days, and errors that say where."""

import gzip
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.adafest import criteo_files as criteo
from experiments.generated.clicks import KAGGLE_BUCKETS, SyntheticCriteo

BUCKETS = [50] * 26


def line(label="1", numbers=None, categories=None):
    numbers = ["3"] * 13 if numbers is None else numbers
    categories = ["0a1b2c3d"] * 26 if categories is None else categories
    return "\t".join([label, *numbers, *categories]) + "\n"


def write(path, *lines):
    path.write_text("".join(lines))
    return path


def slow_parse(text, buckets):
    """Line by line, field by field."""
    labels, numbers, categories = [], [], []
    for fields in (row.split("\t") for row in text.splitlines()):
        labels.append(float(fields[0]))
        numbers.append([math.log1p(max(int(x), 0)) if x else 0.0 for x in fields[1:14]])
        hashed = []
        for f, x in enumerate(fields[14:]):
            value, present = np.array([int(x or "0", 16)], np.uint64), np.array([x != ""])
            hashed.append(criteo.hash_to_buckets(value, present, f, buckets[f])[0])
        categories.append(hashed)
    return np.array(labels), np.array(numbers), np.array(categories)


fields = st.tuples(
    st.sampled_from("01"),
    st.lists(st.one_of(st.just(""), st.integers(-3, 10**12).map(str)), min_size=13, max_size=13),
    st.lists(st.text("0123456789abcdefABCDEF", max_size=8), min_size=26, max_size=26),
)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(fields, min_size=1, max_size=5), ending=st.sampled_from(["\n", "\r\n"]), last=st.booleans()
)
def test_reading_agrees_with_reading_field_by_field(rows, ending, last, tmp_path_factory):
    text = "".join(line(*row) for row in rows)
    written = text.replace("\n", ending)
    path = tmp_path_factory.mktemp("criteo") / "train.txt"
    path.write_bytes((written if last else written[: -len(ending)]).encode())
    examples = criteo.read(path, KAGGLE_BUCKETS)
    labels, numbers, categories = slow_parse(text, KAGGLE_BUCKETS)
    np.testing.assert_array_equal(examples.labels, labels)
    np.testing.assert_allclose(examples.numeric, numbers, rtol=1e-6)
    np.testing.assert_array_equal(examples.categorical, categories)
    assert examples.numeric.dtype == np.float32 and examples.categorical.dtype == np.int32


def test_missing_values_have_a_bucket_of_their_own(tmp_path):
    rows = [line(categories=[""] * 26), *(line(categories=[f"{i:x}"] * 26) for i in range(500))]
    examples = criteo.read(write(tmp_path / "train.txt", *rows), BUCKETS)
    assert (examples.categorical[0] == 0).all() and (examples.categorical[1:] > 0).all()
    assert examples.categorical.max() == 49


def test_one_value_in_two_features_gives_unrelated_buckets(tmp_path):
    rows = [line(categories=[f"{i:x}"] * 26) for i in range(300)]
    categorical = criteo.read(write(tmp_path / "train.txt", *rows), BUCKETS).categorical
    assert (categorical[:, 0] == categorical[:, 1]).mean() < 0.1


def test_buckets_are_evenly_used():
    values = np.arange(200_000, dtype=np.uint64)
    counts = np.bincount(criteo.hash_to_buckets(values, np.ones(len(values), bool), 3, 101), minlength=101)[
        1:
    ]
    assert abs(counts / 2000 - 1).max() < 0.15


@pytest.mark.parametrize("name", ["day_0.gz", "day_0"])
def test_blocks_and_compression_change_nothing(tmp_path, monkeypatch, name):
    text = "".join(line(label=str(i % 2), numbers=[str(i)] * 13) for i in range(10))
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    whole = criteo.read(path, BUCKETS)
    monkeypatch.setattr(criteo, "_LINES_AT_A_TIME", 3)
    assert [len(chunk) for chunk in criteo.read_chunks(path, BUCKETS)] == [3, 3, 3, 1]
    twice = criteo.read([path, path], BUCKETS)
    np.testing.assert_array_equal(twice.numeric, np.concatenate([whole.numeric] * 2))


def test_an_empty_file_has_no_examples(tmp_path):
    examples = criteo.read(write(tmp_path / "train.txt"), BUCKETS)
    assert len(examples) == 0 and examples.categorical.shape == (0, 26)


@pytest.mark.parametrize(
    "bad, complaint",
    [
        ("1\t2\t3\n", "expected 40 fields between tabs .* found 3"),
        ("\n", "expected 40 fields"),
        (line(label="2"), "the label must be 0 or 1, found '2'"),
        (line(label=""), "the label must be 0 or 1, found ''"),
        (line(numbers=["1"] * 12 + ["1.5"]), "number 13 must be a whole number .* found '1.5'"),
        (line(numbers=["-"] + ["1"] * 12), "number 1 must be a whole number"),
        (line(numbers=["1" * 19] + ["1"] * 12), "number 1 must be a whole number"),
        (
            line(categories=["xyz"] + ["0"] * 25),
            "category 1 must be up to 8 hexadecimal digits .* found 'xyz'",
        ),
        (line(categories=["0" * 9] + ["0"] * 25), "category 1 must be up to 8 hexadecimal"),
        (line().replace("\t", " ", 1).replace("\n", "\t\n", 1), "expected 40 fields|the label|number"),
    ],
)
@pytest.mark.parametrize("position", [0, 4])
def test_a_malformed_line_is_named(tmp_path, monkeypatch, bad, complaint, position):
    monkeypatch.setattr(criteo, "_LINES_AT_A_TIME", 3)
    rows = [line()] * 6
    rows[position] = bad
    path = write(tmp_path / "train.txt", *rows)
    with pytest.raises(ValueError, match=rf"train\.txt, line {position + 1}: ({complaint})"):
        criteo.read(path, BUCKETS)


@pytest.mark.parametrize("buckets", [[50] * 25, [50] * 25 + [1], [50] * 25 + [2**31]])
def test_impossible_bucket_counts_are_refused(tmp_path, buckets):
    with pytest.raises(ValueError, match="buckets"):
        criteo.read(write(tmp_path / "train.txt", line()), buckets)


def test_written_files_read_back(tmp_path):
    generator = SyntheticCriteo(seed=3)
    path = tmp_path / "day_0.gz"
    criteo.write(generator, path, 300)
    examples, read = generator.examples(300), criteo.read(path, [10_000] * 26)  # hashing needs room
    np.testing.assert_array_equal(read.labels, examples.labels)
    np.testing.assert_allclose(read.numeric, examples.numeric, rtol=1e-6)
    np.testing.assert_array_equal(read.categorical == 0, examples.categorical == 0)
    assert len(np.unique(read.categorical[:, 8])) == len(np.unique(examples.categorical[:, 8]))
