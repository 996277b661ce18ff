"""The reader of knowledge-graph timelines, its examples, and the vocabulary counted under privacy."""

import json
import math
import sys

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from scipy import stats

from tfdp_rec.datasets.kg.files import (
    Activity,
    Timeline,
    TimelineStore,
    Vocabulary,
    pad_window,
    private_vocabulary,
    read_timelines,
    split_individuals,
    vocabulary_threshold,
    write_timelines,
)


def activity(time, entities=(), unigrams=(), bigrams=()):
    return Activity(time, {"entities": list(entities), "unigrams": list(unigrams), "bigrams": list(bigrams)})


ARGSORT = np.argsort

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
    assert vocabulary.event is None and vocabulary.delta == 0
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


def crowd(counts):
    """One individual a use: term i is used by counts[i] individuals, each with that term alone."""
    return [Timeline(f"{term}-{n}", [activity(1, [term])]) for term, count in counts.items() for n in range(count)]


def test_private_vocabulary_finds_the_frequent_and_hides_the_rare():
    people = crowd({"often": 500, "common": 100, "rare": 1})
    vocabulary = private_vocabulary(people, "entities", 10, noise_multiplier=1.0, threshold_delta=1e-6, seed=0)
    assert vocabulary.terms == ("often", "common")
    assert vocabulary.event == GaussianDpEvent(1.0) and vocabulary.delta == 1e-6
    small = private_vocabulary(people, "entities", 1, noise_multiplier=1.0, threshold_delta=1e-6, seed=0)
    assert small.terms == ("often",)


def passes(people, term, sigma, delta, max_terms, runs=4000):
    found = [private_vocabulary(people, "entities", 100, noise_multiplier=sigma, threshold_delta=delta,
                                max_terms=max_terms, seed=seed).terms for seed in range(runs)]  # fmt: skip
    return sum(any(t.startswith(term) for t in terms) for terms in found)


@pytest.mark.parametrize("own, max_terms", [(1, 1), (4, 4), (9, 4)])
def test_terms_of_one_individual_pass_with_probability_at_most_delta(own, max_terms):
    people = [Timeline("x", [activity(1, [f"own{i}" for i in range(own)])])]
    found = passes(people, "own", sigma=0.5, delta=0.05, max_terms=max_terms)
    assert stats.binom.sf(found - 1, 4000, 0.05) > 1e-6, f"{found} of 4000 pass"
    if own == max_terms == 1:
        assert stats.binom.cdf(found, 4000, 0.05) > 1e-6  # attained where one term is the worst case


def test_weights_get_noise_of_the_right_size():
    """A term about one σ above the threshold passes as often as a Gaussian says; a wrong σ would not."""
    sigma, delta = 4.0, 1e-3
    threshold = vocabulary_threshold(sigma, delta, 1)
    count = math.ceil(threshold) + 4
    found = passes(crowd({"near": count}), "near", sigma, delta, 1, runs=2000)
    assert stats.binomtest(found, 2000, stats.norm.cdf((count - threshold) / sigma)).pvalue > 1e-6
    assert stats.binomtest(found, 2000, stats.norm.cdf((count - threshold) / (2 * sigma))).pvalue < 1e-6


def test_one_individual_moves_the_weights_by_at_most_one(monkeypatch):
    """The vector of weights with and without one individual differs by exactly 1 in ℓ₂, whatever is repeated."""
    person = Timeline("x", [activity(t, ["Q1", "Q2", f"Q{t}"]) for t in range(3, 60)])
    others = crowd({f"Q{t}": 3 for t in range(1, 60)})

    def weights(people, max_terms):
        """Reads the weights off the ranking's input: without noise they are what `private_vocabulary` sorts."""
        seen = []
        monkeypatch.setattr(np, "argsort", lambda values, kind: (seen.append(-values), ARGSORT(values))[1])
        private_vocabulary(people, "entities", 99, noise_multiplier=1e-12, threshold_delta=0.5, max_terms=max_terms)
        monkeypatch.undo()
        return seen[0]

    for max_terms in (1, 7, 100):
        moved = np.linalg.norm(weights([*others, person], max_terms) - weights(others, max_terms))
        assert moved == pytest.approx(1.0, abs=1e-9)


def test_threshold_is_the_definition():
    sigma, delta, m = 1.3, 1e-5, 50
    expected = max(1 / math.sqrt(t) + sigma * stats.norm.ppf((1 - delta) ** (1 / t)) for t in range(1, m + 1))
    assert vocabulary_threshold(sigma, delta, m) == pytest.approx(expected, rel=1e-6)


def test_private_vocabulary_refuses_bad_arguments():
    good = {"noise_multiplier": 1.0, "threshold_delta": 1e-6}
    for feature, size, change, words in [
        ("emoji", 5, {}, "feature"),
        ("entities", 0, {}, "size"),
        ("entities", 5, {"noise_multiplier": 0.0}, "noise_multiplier"),
        ("entities", 5, {"threshold_delta": 0.0}, "threshold_delta"),
        ("entities", 5, {"max_terms": 0}, "max_terms"),
    ]:
        with pytest.raises(ValueError, match=words):
            private_vocabulary(PEOPLE, feature, size, **{**good, **change})
