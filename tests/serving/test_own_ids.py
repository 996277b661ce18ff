"""The SavedModel that answers in one's own ids: exactly what Python answers, whatever the catalogue's size and kind."""

import shutil

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from helpers import bytes_in, of_this_machine
from serving.conftest import MANY

import tfdp_rec
from tfdp_rec.data import Items
from tfdp_rec.serving import export, own_ids
from tfdp_rec.spectral import SpectralRecommender


@pytest.fixture(scope="module")
def signatures(exported, tmp_path_factory):
    """From a copy, the original gone: the vocabulary goes with it."""
    copy = tmp_path_factory.mktemp("elsewhere") / "servable"
    shutil.copytree(exported / "servable", copy)
    shutil.move(exported / "servable", exported / "away")
    try:
        return tf.saved_model.load(str(copy)).signatures
    finally:
        shutil.move(exported / "away", exported / "servable")


@pytest.mark.slow
def test_an_interruption_leaves_an_older_folder_as_it_was(tmp_path, monkeypatch):
    """Its graph stood beside the new weights and ids, and gave other items."""
    one, other = (
        SpectralRecommender(ids, epsilon=8.0, delta=1e-4).fit([ids[:2]] * 300 + [ids[2:]] * 300, verbose=0)
        for ids in ([10, 20, 30, 40], [50, 60, 70, 80])
    )
    one.export(tmp_path / "servable", k=1)
    before = {path: path.read_bytes() for path in (tmp_path / "servable").rglob("*") if path.is_file()}
    save = tf.saved_model.save

    def interrupted(*args, **kwargs):
        save(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(tf.saved_model, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        other.export(tmp_path / "servable", k=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_folder_of_a_cloud_is_written_where_it_is(monkeypatch):
    """It would have been a path of this machine."""
    recommender = SpectralRecommender([1, 2], epsilon=8.0, delta=1e-4).fit([[1, 2]] * 300, verbose=0)
    written = []
    monkeypatch.setattr(tf.saved_model, "save", lambda served, path, **options: written.append(path))
    recommender.export("gs://bucket/servable", k=1)
    assert written == ["gs://bucket/servable"]


def test_it_names_no_folder_of_the_machine_that_made_it(exported):
    """The vocabulary's table was named by the path of a temporary file."""
    folder = exported / "servable"
    assert not [n for n in of_this_machine(exported) for held in bytes_in(folder) if n.encode() in held]


def named(history):
    return [f"item {i}" for i in history]


def texts(tensor):
    return [[each.decode() for each in row] for row in tensor.numpy().tolist()]


def padded(histories, padding=""):
    width = max(map(len, histories))
    return tf.constant([[padding] * (width - len(history)) + history for history in histories])


HISTORIES = [[1, 2, 3], [], [55, 999, 3, 55, 12], list(range(1, MANY)), [41]]


@pytest.mark.parametrize("k", [1, 7, MANY, MANY + 5])
def test_every_k_is_answered_as_python_answers(recommender, signatures, k):
    answer = signatures["top_k"](history=padded([named(h) for h in HISTORIES]), k=tf.constant(k))
    ids, scores = recommender.recommend(HISTORIES, min(k, MANY))
    found = np.isfinite(scores)
    wanted = [[f"item {i}" if i else "" for i in row] + [""] * (k - len(row)) for row in ids.tolist()]
    assert texts(answer["ids"]) == wanted
    np.testing.assert_allclose(answer["scores"].numpy()[:, :MANY][found], scores[found], rtol=1e-4, atol=1e-6)
    assert (answer["scores"].numpy()[:, :MANY][~found] == tf.float32.min).all()
    assert answer["known"].numpy().tolist() == [3, 0, 4, MANY - 1, 1]
    titles = {"item 3": "Third of all", "item 4": "Øl"}
    assert texts(answer["titles"]) == [[titles.get(i, "") for i in row] for row in wanted]


def test_ragged_histories_are_answered_as_padded_ones(signatures):
    asked = padded([named(h) for h in HISTORIES])
    flat = tf.constant([i for h in HISTORIES for i in named(h)])
    lengths = tf.constant([len(h) for h in HISTORIES])
    one = signatures["top_k"](history=asked, k=tf.constant(4))
    for other in (
        signatures["ragged"](items=flat, lengths=lengths, k=tf.constant(4)),
        signatures["serving_default"](history=asked),
    ):
        assert all(np.array_equal(one[name].numpy(), other[name].numpy()) for name in ("ids", "known", "titles"))
        np.testing.assert_allclose(one["scores"], other["scores"], rtol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError):
        signatures["ragged"](items=flat, lengths=lengths + 1, k=tf.constant(4))


@pytest.mark.parametrize("allowed", [[3, 3, 58, 999, 41, 2], [58], [], list(range(1, MANY + 1))])
def test_a_filter_answers_the_best_of_what_it_allows(recommender, signatures, allowed):
    k = 5
    asked = padded([named(h) for h in HISTORIES])
    answer = signatures["among"](history=asked, k=tf.constant(k), allowed=tf.constant(named(allowed), tf.string))
    for history, ids, scores in zip(HISTORIES, texts(answer["ids"]), answer["scores"].numpy()):
        own = recommender.scores([history])[0]
        left = [i for i in range(1, MANY + 1) if i in allowed and i not in history]
        best = sorted(left, key=lambda i: (-own[i - 1], i))[:k]
        assert ids == named(best) + [""] * (k - len(best))
        np.testing.assert_allclose(scores[: len(best)], own[np.array(best, int) - 1], rtol=1e-4, atol=1e-6)


class Tastes(own_ids.WholeCatalogue):
    """Scores from a table; the number of histories that are scored at a time."""

    def __init__(self, items=7):
        super().__init__(items)
        self.table = tf.constant(np.random.default_rng(0).normal(size=(items, items)), tf.float32)
        self.at_a_time = []

    def scores(self, history):
        self.at_a_time.append(len(history))
        return tf.reduce_sum(tf.gather(self.table, tf.maximum(history, 0)), axis=1)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("columns", [0, 3])
def test_many_histories_are_scored_some_at_a_time(rows, columns, monkeypatch):
    """1,024 histories took 5 GB with a catalogue of 300,000, for a request of 5 KB."""
    history = tf.constant(np.random.default_rng(1).integers(-1, 7, [rows, columns]))
    allowed = tf.constant([5, 2, 3], tf.int64)
    whole = Tastes()
    expected = whole.best(history, 4), whole.best_among(history, 4, allowed)
    monkeypatch.setattr(own_ids, "_MOST_SCORES", 15)
    some = Tastes()
    found = some.best(history, 4), some.best_among(history, 4, allowed)
    for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert one.shape == [rows, 4]
        np.testing.assert_array_equal(one, other)
    assert max(some.at_a_time) <= 2 and max(whole.at_a_time) == max(1, rows)


def test_titles_are_by_the_ids_of_items(recommender, items, tmp_path):
    """Keys of text beside whole numbers gave each item the title ""."""
    with pytest.raises(ValueError, match="titles are by ids such as '1', and the items have ids such as 1"):
        export(tmp_path / "servable", recommender, Items(range(1, MANY + 1)), {"1": "One"})
    with pytest.raises(ValueError, match="titles are by ids such as 1, and the items have ids such as 'item 1'"):
        export(tmp_path / "servable", recommender, items, {1: "One"})


@pytest.mark.slow
def test_titles_may_be_of_other_items(recommender, items, tmp_path):
    """Once all items with a title were forgotten, the others could not be exported."""
    export(tmp_path / "servable", recommender, items, {"gone": "An item that left"})
    answer = tf.saved_model.load(str(tmp_path / "servable")).signatures["serving_default"](history=tf.constant([[""]]))
    assert not any(texts(answer["titles"])[0])


@pytest.mark.parametrize("k", [1.5, 0, MANY + 1, "3"])
def test_the_number_of_answers_is_a_whole_one(recommender, items, tmp_path, k):
    with pytest.raises(ValueError, match="k must be a whole number between 1 and the 60 items"):
        export(tmp_path / "servable", recommender, items, k=k)
    with pytest.raises(ValueError, match="k must be a whole number between 1 and the 60 items"):
        recommender.recommend([[1]], k)


@pytest.mark.slow
def test_an_export_warns_of_steps_that_no_epsilon_covers(tmp_path):
    model = tfdp_rec.models.TwoTower(range(1, 9), width=4, history_length=3)
    optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    batch = {"context": np.ones([4, 3], np.int32), "label": np.ones([4], np.int32), "negatives": np.array([2, 3])}
    model.compile(optimizer)
    model.train_on_batch(batch)
    model.compile("adam")
    with pytest.warns(UserWarning, match="not private"):
        model.train_on_batch(batch)
    with pytest.warns(UserWarning, match="No epsilon covers"):
        model.export(str(tmp_path / "servable"), k=3)


def test_padding_may_stand_anywhere_and_k_must_be_positive(signatures):
    rows = [["item 1", "item 3", "", ""], ["", "item 1", "", "item 3"], ["nowhere", "item 1", "item 3", ""]]
    answer = signatures["serving_default"](history=tf.constant(rows))
    assert len(set(map(tuple, texts(answer["ids"])))) == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="k must be at least 1"):
        signatures["top_k"](history=tf.constant([["item 1"]]), k=tf.constant(0))


@pytest.mark.slow
def test_equal_scores_stand_in_the_order_of_the_catalogue(recommender, tmp_path):
    flat = SpectralRecommender(np.arange(1, 13), 1.0, 1e-4, head=3, words=recommender._words).fit([[1]] * 20, 0)
    found = flat.estimates
    found.prior[:], found.weights[:], found.overlap[:] = 0.5, 0.0, 0.0
    export(str(tmp_path / "servable"), flat, Items(list("lkjihgfedcba")), k=12)
    answer = tf.saved_model.load(str(tmp_path / "servable")).signatures["serving_default"](history=tf.constant([["j"]]))
    assert "".join(texts(answer["ids"])[0]) == "lkihgfedcba"


def test_whole_numbers_may_be_any_and_padding_is_none_of_them(recommender, tmp_path):
    ids = [0, -1, 10**17, *range(100, 100 + MANY - 3)]
    export(str(tmp_path / "servable"), recommender, Items(ids), k=3)
    serve = tf.saved_model.load(str(tmp_path / "servable")).signatures["top_k"]
    everything = tf.constant([ids[:-1] + [-2, 7]], tf.int64)
    answer = serve(history=everything, k=tf.constant(2))
    assert answer["ids"].numpy().tolist() == [[ids[-1], -2]] and answer["known"].numpy().tolist() == [MANY - 1]
    best, _ = recommender.recommend([[1, 3]], 3)
    answer = serve(history=tf.constant([[0, 10**17]], tf.int64), k=tf.constant(3))
    assert answer["ids"].numpy().tolist() == [[ids[i - 1] for i in best[0]]]


@pytest.mark.slow
def test_what_a_line_cannot_hold_is_refused_and_the_rest_is_held(recommender, tmp_path):
    odd = ["tab\tand space ", "", "Ünï\u2028cödé", "{}", '"', "\x0b"]
    taken = [f"item {i}" for i in range(MANY - len(odd) + 1)]
    for bad in ("two\nlines", "two\rlines"):
        with pytest.raises(ValueError, match="has a line break in its id"):
            export(str(tmp_path / "bad"), recommender, Items([bad, *taken, *[o for o in odd if o]][:MANY]))
    kept = Items([o for o in odd if o] + taken)
    export(str(tmp_path / "servable"), recommender, kept, k=MANY)
    answer = tf.saved_model.load(str(tmp_path / "servable")).signatures["serving_default"](history=tf.constant([[""]]))
    assert sorted(texts(answer["ids"])[0]) == sorted(kept.ids.to_pylist())
    history = tf.constant([[o for o in odd if o]])
    known = tf.saved_model.load(str(tmp_path / "servable")).signatures["serving_default"](history=history)["known"]
    assert known.numpy().tolist() == [len(odd) - 1]
    with pytest.raises(ValueError, match="make it on the log with these items"):
        export(str(tmp_path / "other"), recommender, Items(pa.array(["one", "two"])))
