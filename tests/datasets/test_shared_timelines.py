"""Examples made by TensorFlow on a worker are those that numpy makes here."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_rec.data import Interactions, NextItemExamples, PoissonSampling, synthetic
from tfdp_rec.datasets.movielens import generated
from tfdp_rec.datasets.shared_timelines import _FILES, SharedTimelines


@pytest.fixture(scope="module")
def timelines():
    return synthetic.timelines(num_users=60, num_movies=200, events=1_500)


def held(shared):
    return {n: tf.io.decode_raw(tf.io.read_file(str(shared.folder / n)), kind) for n, kind in _FILES.items()}


def test_labels_and_contexts_are_those_of_one_machine(timelines, tmp_path):
    examples = NextItemExamples(timelines, np.arange(10, 50), history=7, negatives=0)
    shared = SharedTimelines(examples, tmp_path / "timelines")
    indices = np.arange(40)
    for share in (0.0, 0.4, 0.999):
        positions = 1 + (share * (examples.lengths - 1)).astype(np.int64)
        expected = examples._examples(indices, positions, None)
        found = shared._examples(held(shared), tf.constant(indices), tf.constant(positions))
        for name in ("context", "label"):
            np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.slow
def test_batches_hold_movies_of_their_users_and_distinct_negatives(timelines, tmp_path):
    shared = SharedTimelines(NextItemExamples(timelines, np.arange(5), negatives=150), tmp_path)
    labels = set()
    for batch in (drawn.batch for drawn in shared.batches(PoissonSampling(5, 3)).take(60)):
        labels |= set(batch["label"].numpy().tolist())
        negatives = batch["negatives"].numpy()
        assert len(np.unique(negatives)) == 150 and negatives.min() >= 1 and negatives.max() <= 200
        assert batch["context"].shape[1] == 20 and batch["context"].dtype == tf.int32
    # Every place but the first can be a label: the first movie of a timeline is one only if it is watched again.
    possible = set(np.concatenate([timelines[user][1:] for user in range(5)]).tolist())
    assert labels <= possible and len(labels) > len(possible) / 4


@pytest.mark.slow
def test_every_place_but_the_first_is_a_label_equally_often(tmp_path):
    timelines = synthetic.timelines(num_users=3, num_movies=200, events=30)
    user = int(np.argmax(timelines.lengths))
    shared = SharedTimelines(NextItemExamples(timelines, [user], history=200, negatives=0), tmp_path)
    places = [
        int(tf.math.count_nonzero(drawn.batch["context"])) for drawn in shared.batches(PoissonSampling(1, 1)).take(1000)
    ]
    counts = np.bincount(places, minlength=timelines.lengths[user])
    assert counts[0] == 0 and len(counts) == timelines.lengths[user]
    mean = 1000 / (len(counts) - 1)
    assert np.abs(counts[1:] - mean).max() < 7 * np.sqrt(mean)


def test_a_log_without_an_order_is_refused(tmp_path):
    log = Interactions.read({"u": [1, 1, 2, 2], "i": [1, 2, 1, 2]}, user="u", item="i", items=[1, 2])
    with pytest.raises(ValueError, match="read the log with time="):
        SharedTimelines(NextItemExamples(log, negatives=0), tmp_path)


def test_the_files_are_their_owners_alone(tmp_path):
    timelines = generated.timelines(num_users=50, num_movies=100, events=900)
    folder = SharedTimelines(NextItemExamples(timelines, negatives=20), tmp_path / "shared").folder
    assert {path.stat().st_mode & 0o77 for path in [folder, *folder.iterdir()]} == {0}
    (folder / "movies").chmod(0o644)
    SharedTimelines(NextItemExamples(timelines, negatives=20), folder)
    assert (folder / "movies").stat().st_mode & 0o77 == 0


def test_a_label_at_every_place_is_refused(timelines, tmp_path):
    with pytest.raises(ValueError, match="one label a user"):
        SharedTimelines(NextItemExamples(timelines, negatives=0, every_place=True), tmp_path)
