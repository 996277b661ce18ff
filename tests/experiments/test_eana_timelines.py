"""The reader of knowledge-graph timelines, its examples, and its vocabularies."""

import json
import sys

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent

from experiments.eana.timelines import (
    Activity,
    Timeline,
    TimelineStore,
    Vocabulary,
    distinct_terms,
    named_timelines,
    read_timelines,
    split_individuals,
    write_timelines,
)
from experiments.generated.knowledge_graph import FEATURES, SyntheticKG, pad_window
from tfdp_rec.core.claim.events import FailingDpEvent
from tfdp_rec.privacy import private_terms


def activity(time, entities=(), unigrams=(), bigrams=()):
    return Activity(time, {"entities": list(entities), "unigrams": list(unigrams), "bigrams": list(bigrams)})


KG = SyntheticKG(num_individuals=5000, vocabulary_size=20_000, num_topics=20)
PEOPLE = [
    Timeline("a", [activity(1, ["Q1"], ["one"]), activity(2, ["Q2", "Q3"]), activity(5, ["Q1"], [], ["x y"])]),
    Timeline("b", [activity(3, [], ["zwei"]), activity(4, ["Q9"])]),
    Timeline("alone", [activity(7, ["Q1"])]),
    Timeline("ü", [activity(1, ["Q2"]), activity(2, ["Q3"])]),
]
TERMS = {"entities": Vocabulary(("Q1", "Q2", "Q3")), "unigrams": Vocabulary(("one", "zwei")),
         "bigrams": Vocabulary(("x y",))}  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_give_back_what_was_written(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="no pyarrow for this NumPy", exc_type=ImportError)
    path = write_timelines(PEOPLE, tmp_path / f"people{suffix}", chunk=2)
    assert list(read_timelines(path)) == PEOPLE


def test_activities_are_sorted_and_missing_features_are_empty(tmp_path):
    path = tmp_path / "people.jsonl"
    record = {"id": 7, "activities": [{"time": 9, "entities": ["Q1"]}, {"time": 2, "unigrams": None}]}
    path.write_text(json.dumps(record) + "\n\n")
    (timeline,) = read_timelines(path)
    assert timeline == Timeline("7", [activity(2), activity(9, ["Q1"])])


@pytest.mark.parametrize("line, words", [
    ("{not json", "line 2: not JSON"),
    ('{"id": "x"}', "record 2: expected an object with 'id' and 'activities'"),
    ('{"activities": []}', "record 2"),
    ("[1, 2]", "record 2"),
    ('{"id": "x", "activities": [{"time": "noon"}]}', "'time' must be an integer"),
    ('{"id": "x", "activities": [{"entities": []}]}', "record 2"),
    ('{"id": "x", "activities": [{"time": 1, "entities": ["Q1", 3]}]}', "'entities' must be a list of strings"),
    ('{"id": "x", "activities": [{"time": 1, "bigrams": "x y"}]}', "'bigrams' must be a list of strings"),
])  # fmt: skip
def test_a_malformed_record_names_file_and_place(tmp_path, line, words):
    path = tmp_path / "people.jsonl"
    path.write_text('{"id": "ok", "activities": []}\n' + line + "\n")
    with pytest.raises(ValueError, match=words) as caught:
        list(read_timelines(path))
    assert "people.jsonl" in str(caught.value)


def test_missing_and_unknown_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        list(read_timelines(tmp_path / "nowhere.jsonl"))
    (tmp_path / "people.csv").write_text("")
    with pytest.raises(ValueError, match="csv"):
        list(read_timelines(tmp_path / "people.csv"))
    with pytest.raises(ValueError, match="csv"):
        write_timelines(PEOPLE, tmp_path / "out.csv")


def test_parquet_without_a_working_pyarrow_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match="jsonl"):
        write_timelines(PEOPLE, tmp_path / "people.parquet")


def test_vocabulary_ids_and_files(tmp_path):
    path = tmp_path / "terms.txt"
    path.write_text("Q1\nQ2\n\nQ3\n", encoding="utf-8")
    vocabulary = Vocabulary.from_file(path)
    assert vocabulary.terms == ("Q1", "Q2", "Q3") and vocabulary.size == 4
    assert vocabulary.event is None
    assert vocabulary.ids(["Q3", "unknown", "Q1"]).tolist() == [3, 0, 1]
    path.write_text("Q1\nQ1\n")
    with pytest.raises(ValueError, match="once"):
        Vocabulary.from_file(path)


def store(**changes):
    return TimelineStore(PEOPLE, TERMS, **{"context_length": 3, **changes})


def test_store_keeps_individuals_with_an_example():
    """'alone' has one activity; 'b' has no known entity after its first."""
    assert store().num_individuals == 2


def test_examples_are_what_came_before_the_label():
    seen = set()
    for seed in range(60):
        batch = store().fetch([0, 1], seed=seed)
        label = int(batch["label"][0])
        if batch["entities"][0, 1].any():  # the last activity was drawn
            assert label == 1
            assert batch["entities"][0].tolist() == [[2, 3, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
            assert batch["unigrams"][0, 1, 0] == 1 and not batch["bigrams"][0].any()
            seen.add("last")
        else:
            assert label in (2, 3)
            assert batch["entities"][0].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
            seen.add(label)
        assert batch["label"][1] == 3 and batch["entities"][1, 0, 0] == 2
    assert seen == {"last", 2, 3}


def test_empty_batches_and_bad_indices():
    batch = store().fetch([])
    assert batch["entities"].shape == (0, 3, 4) and batch["label"].shape == (0,)
    assert {f: batch[f].dtype for f in batch} == {f: store().fetch([0])[f].dtype for f in batch}
    with pytest.raises(IndexError, match="indices"):
        store().fetch([2])


def test_store_needs_vocabularies_and_examples():
    with pytest.raises(ValueError, match="bigrams"):
        TimelineStore(PEOPLE, {k: v for k, v in TERMS.items() if k != "bigrams"})
    with pytest.raises(ValueError, match="No timeline has an example"):
        TimelineStore(PEOPLE[2:3], TERMS)


def test_long_timelines_keep_the_newest_and_the_first_values():
    people = [Timeline("x", [activity(t, [f"Q{t}", "Q1", "Q2"]) for t in range(1, 40)])]
    terms = {**TERMS, "entities": Vocabulary(tuple(f"Q{t}" for t in range(1, 40)))}
    long = TimelineStore(
        people, terms, context_length=5, values_per_activity={"entities": 1, "unigrams": 1, "bigrams": 1}
    )
    entities = long.fetch([0], seed=3)["entities"][0, :, 0]
    assert np.all(np.diff(entities) == -1)


def test_pad_window_stays_within_the_timeline():
    window, present = pad_window(np.array([4, 10]), np.array([6, 20]), 4)
    assert window.tolist() == [[5, 4, 4, 4], [19, 18, 17, 16]]
    assert present.tolist() == [[True, True, False, False], [True] * 4]


def test_split_is_by_individual_and_nine_to_one():
    train, test = split_individuals(1000, seed=1)
    assert train.size == 900 and not set(train) & set(test) and len({*train, *test}) == 1000
    assert not np.array_equal(train, split_individuals(1000, seed=2)[0])
    with pytest.raises(ValueError, match="empty"):
        split_individuals(3, train_share=1.0)


def test_a_private_vocabulary_counts_distinct_terms_of_individuals():
    people = [Timeline(str(i), [activity(t, ["often", "often"]) for t in range(3)]) for i in range(500)] + PEOPLE
    held = distinct_terms(people, "entities")
    vocabulary = Vocabulary(*private_terms(held, 10, noise_multiplier=1.0, threshold_delta=1e-6))
    assert vocabulary.terms == ("often",)
    assert vocabulary.event == ComposedDpEvent([GaussianDpEvent(1.0), FailingDpEvent(1e-6)])
    with pytest.raises(ValueError, match="feature"):
        distinct_terms(people, "emoji")


def test_reading_the_written_timelines_gives_the_same_examples(tmp_path):
    """The named form, through a file and a vocabulary, and the direct form agree on the same walk."""
    path = write_timelines(named_timelines(KG, 0, 40, chunk=7), tmp_path / "kg.jsonl")
    terms = {f: Vocabulary(tuple(f"{f[0]}{n}" for n in range(1, 20_001))) for f in FEATURES}
    store = TimelineStore(read_timelines(path), terms, values_per_activity=KG.values_per_activity)
    assert store.num_individuals == 40
    walk, lengths = KG.walk(np.arange(40))
    for seed in range(5):
        batch = store.fetch(np.arange(40), seed=seed)
        for row in range(40):
            context = batch["entities"][row, :, 0]
            context = context[context > 0][::-1] - 1
            starts = [p for p in range(1, lengths[row]) if 1 + walk[row, p] == batch["label"][row]
                      and np.array_equal(walk[row, max(0, p - 20) : p], context)]  # fmt: skip
            neighbour_labels = batch["label"][row] - 1 not in walk[row, : lengths[row]]
            assert (
                starts or neighbour_labels or _label_is_a_shown_neighbour(walk[row], context, batch["label"][row] - 1)
            )


def _label_is_a_shown_neighbour(walk, context, label):
    ends = [p for p in range(1, walk.size) if np.array_equal(walk[max(0, p - 20) : p], context)]
    return any(KG.neighbour(walk[p : p + 1], np.zeros(1, np.int64))[0] == label for p in ends)
