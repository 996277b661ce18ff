"""Canaries are uniform, distinct, and planted exactly as often as they say."""

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from tfdp_rec.audit.canaries import REPEATS, Canaries, Uniform

CATALOGUE = {"context": Uniform(501, shape=(4,), low=1, dtype="int32"), "label": Uniform(501, low=1)}


def draw(**changes):
    sizes = {"repeats": (1, 3, 10), "per_repeat": 5, "num_references": 200, "seed": 1}
    return Canaries.draw(CATALOGUE, **{**sizes, **changes})


def original_fetch(indices):
    return {"context": np.full((len(indices), 4), 7, "int32"), "label": 1000 + np.asarray(indices)}


def keys(features):
    return [(*context, label) for context, label in zip(features["context"].tolist(), features["label"].tolist())]


def test_the_papers_sizes():
    canaries = Canaries.draw({"context": Uniform(27_279, (20,), low=1), "label": Uniform(27_279, low=1)}, seed=0)
    assert canaries.num_units == 9750 and canaries.repeats.size == 450
    assert canaries.references["context"].shape == (16_384, 20)
    thousand = 1000 * sum((*REPEATS, 1000))
    assert thousand == 1_195_000  # the paper's second study


def test_each_canary_is_planted_exactly_its_repeat_count():
    canaries = draw()
    fetch, total = canaries.insert(original_fetch, num_units=40)
    everything = fetch(np.arange(total))
    counts = Counter(keys(everything))
    for key, repeats in zip(keys(canaries.features), canaries.repeats):
        assert counts[key] == repeats
    assert not set(keys(canaries.references)) & set(counts)
    assert total == 40 + 5 * (1 + 3 + 10)
    np.testing.assert_array_equal(everything["label"][:40], 1000 + np.arange(40))


def test_mixed_batches_keep_their_order_and_types():
    canaries = draw()
    fetch, _ = canaries.insert(original_fetch, num_units=40)
    batch = fetch(np.array([41, 3, 40, 39]))
    assert batch["label"][1] == 1003 and batch["label"][3] == 1039
    np.testing.assert_array_equal(batch["context"][[0, 2]], canaries.features["context"][[1, 0]])
    assert batch["context"].dtype == np.int32
    assert fetch(np.array([], dtype=np.int64))["label"].shape == (0,)


def test_all_sequences_are_distinct_even_in_a_small_catalogue():
    tiny = {"context": Uniform(6, shape=(2,)), "label": Uniform(6)}  # 216 sequences
    canaries = Canaries.draw(tiny, repeats=(1,), per_repeat=10, num_references=140, seed=3)
    assert len(set(keys(canaries.features)) | set(keys(canaries.references))) == 150
    with pytest.raises(ValueError, match="too small"):
        Canaries.draw(tiny, repeats=(1,), per_repeat=17, num_references=200, seed=3)


def test_ids_are_uniform_over_the_catalogue():
    canaries = draw(num_references=20_000)
    contexts = canaries.references["context"]
    counts = np.bincount(contexts.ravel(), minlength=501)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:]).pvalue > 1e-6
    skewed = np.bincount(contexts.min(axis=1), minlength=501)
    assert stats.chisquare(skewed[1:]).pvalue < 1e-6  # the same test does see what is not uniform


def test_seed_decides_and_entropy_otherwise():
    np.testing.assert_array_equal(draw().features["label"], draw().features["label"])
    assert keys(draw(seed=None).features) != keys(draw(seed=None).features)


def test_losses_group_by_repeat_count():
    canaries = draw()
    grouped = canaries.by_repeats(np.arange(15.0))
    assert list(grouped) == [1, 3, 10]
    np.testing.assert_array_equal(grouped[3], np.arange(5.0, 10.0))
    with pytest.raises(ValueError, match="15 canary losses"):
        canaries.by_repeats(np.zeros(14))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="high > low"):
        Uniform(3, low=3)
    for change in ({"per_repeat": 0}, {"num_references": 0}, {"repeats": ()}, {"repeats": (0, 1)}):
        with pytest.raises(ValueError, match="at least 1"):
            draw(**change)
    fetch, total = draw().insert(original_fetch, num_units=40)
    with pytest.raises(IndexError, match="Unit indices"):
        fetch(np.array([total]))
    wrong, _ = draw().insert(lambda i: {"context": np.zeros((len(i), 9)), "label": np.zeros(len(i))}, 40)
    with pytest.raises(ValueError, match="shape"):
        wrong(np.array([0, 41]))


@pytest.mark.parametrize("dtype", ["float32", "int64", "U8", object])
def test_no_unit_stands_in_for_what_a_canary_lacks(dtype):
    """The first unit's age, say, stood in each copy of each canary, so that the unit was there that often."""
    ages = np.arange(1, 41).astype(dtype)
    fetch, total = draw().insert(lambda i: {**original_fetch(i), "age": ages[i]}, num_units=40)
    everything = fetch(np.arange(total))
    assert everything["age"].dtype == ages.dtype and (everything["age"][:40] == ages).all()
    assert (everything["age"][40:] == ("" if dtype in ("U8", object) else 0)).all()
    batch = fetch(np.array([41, 3, 40]))
    assert batch["age"][1] == ages[3] and (batch["age"][[0, 2]] != ages[0]).all()


def test_text_of_canaries_is_not_cut_to_that_of_the_batch():
    canaries = Canaries({"sku": np.array(["sku-3000"])}, np.array([2]), {"sku": np.array(["sku-1"])})
    fetch, _ = canaries.insert(lambda i: {"sku": np.array(["a", "b"])[i]}, num_units=2)
    assert fetch(np.array([0, 2]))["sku"].tolist() == ["a", "sku-3000"]
    assert fetch(np.array([2, 3]))["sku"].tolist() == ["sku-3000", "sku-3000"]


def test_units_fetch_one_row_each():
    """What a batch shares comes by `shared=`: a fetch that gives it would have it taken for a feature of units."""
    fetch, _ = draw().insert(lambda i: {**original_fetch(i), "negatives": np.arange(3)}, num_units=40)
    with pytest.raises(ValueError, match="3 rows for 1 units"):
        fetch(np.array([1, 41]))
