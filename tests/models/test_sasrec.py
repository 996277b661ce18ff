"""SASRec: no place sees what comes later, the loss against its definition, clipping by user, sums, saving."""

import copy
import dataclasses
import re

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent
from helpers import assert_matches_oracle

import tfdp_rec
from tfdp_rec.cli import main
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.data import NextItemExamples, PoissonSampling, Timelines
from tfdp_rec.models.sasrec import RecentItems, SASRec
from tfdp_rec.privacy import Accountant, Ledger, Snapshot

ITEMS, PLACES = 40, 6
RNG = np.random.default_rng(0)
HISTORIES = [list(RNG.permutation(ITEMS)[: RNG.integers(0, 12)] + 1) for _ in range(60)]


def make_model(**changes):
    seeding.seed(0)
    return SASRec(range(1, ITEMS + 1), **{"width": 8, "history_length": PLACES, "num_heads": 2, **changes})


def stirred(model):
    """With every weight away from where training begins."""
    for weight in model.trainable_variables:
        weight.assign(RNG.normal(0, 0.5, weight.shape))
    return model


def make_batch():
    context, label = RNG.integers(1, ITEMS + 1, [2, 5, PLACES])
    for row, length in enumerate([PLACES, 3, 0, 1, PLACES]):
        context[row, length:] = label[row, length:] = 0
    label[0, 2] = label[1, 0] = 0  # a place within a history whose label was left out
    label[4] = context[4, 0]  # one label at every place
    return {"context": context, "label": label, "negatives": np.array([3, 1, 4, 1, 5, 9, 2, 6])}


@pytest.fixture(scope="module")
def sums():
    made = tfdp_rec.spectral.SpectralRecommender(
        range(1, ITEMS + 1), noise_multiplier=0.5, delta=1e-4, ordered=True, head=30
    )
    return made.fit(HISTORIES, verbose=0)


@pytest.mark.parametrize("blocks", [0, 2])
def test_no_place_sees_what_comes_later(blocks):
    model, batch = stirred(make_model(num_blocks=blocks)), make_batch()
    before = model.encode(tf.constant(batch["context"])).numpy()
    changed = batch["context"].copy()
    changed[:, 4] = changed[:, 4] % ITEMS + 1
    moved = np.abs(model.encode(tf.constant(changed)).numpy() - before).max(axis=2)
    assert (moved[:, :4] == 0).all() and (moved[:, 4:] > 1e-6).all()


def test_recent_items_by_hand():
    rows = RNG.normal(size=[2, 4, 3]).astype("float32")
    found = RecentItems()(tf.constant(rows)).numpy()
    for place in range(4):
        weights = 1 / (1 + place - np.arange(place + 1))
        expected = np.einsum("s,bsw->bw", weights, rows[:, : place + 1]) / np.linalg.norm(weights)
        np.testing.assert_allclose(found[:, place], expected, rtol=1e-5)


def test_scores_are_those_after_the_last_item_whatever_pads():
    model, batch = stirred(make_model(prior=np.arange(1, ITEMS + 1))), make_batch()
    table = model.scores.embeddings.numpy()[1:]
    prior = np.log(np.arange(1, ITEMS + 1) / np.sum(np.arange(1, ITEMS + 1)))
    queries, found = model.encode(tf.constant(batch["context"])).numpy(), model(batch["context"]).numpy()
    for row, length in enumerate([PLACES, 3, 0, 1, PLACES]):
        query = queries[row, length - 1] if length else np.zeros(8)
        np.testing.assert_allclose(found[row], table @ query + prior, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("blocks", [0, 1])
@pytest.mark.parametrize("with_sums", [False, True])
def test_padding_within_a_history_counts_for_nothing(with_sums, blocks, sums):
    arguments = {"width": 8, "history_length": 3, "num_heads": 2, "num_blocks": blocks}
    model = stirred(SASRec.upon(sums, **arguments) if with_sums else make_model(**arguments))
    expected = model(np.array([[4, 7, 9]])).numpy()
    for history in ([4, 0, 7, 9], [0, 0, 4, 7, 0, 9, 0], [11, 4, 7, 0, 9]):
        np.testing.assert_allclose(model(np.array([history])), expected, rtol=1e-6)
    np.testing.assert_allclose(model(np.array([[0, 5]])), model(np.array([[5, 0, 0]])), rtol=1e-6)


def losses_by_hand(model, batch, begin):
    """The mean over an example's places, of a softmax over the label and what each negative stands for."""
    queries, table = model.encode(tf.constant(batch["context"])).numpy(), model.scores.embeddings.numpy()
    chances, found = dict(zip(batch["negatives"], batch.get("expected", []))), []
    for row, label in enumerate(batch["label"]):
        places = []
        for place in np.flatnonzero(label):
            others = [n for n in batch["negatives"] if n != label[place]]
            logit = lambda i: queries[row, place] @ table[i] + begin(row, place, i)  # noqa: B023, E731
            stands_for = [1 / chances.get(n, len(batch["negatives"]) / ITEMS) for n in others]
            logits = [logit(label[place]), *(logit(n) + np.log(each) for n, each in zip(others, stands_for))]
            places.append(np.log(np.exp(logits).sum()) - logits[0])
        found.append(np.mean(places) if places else 0.0)
    return found


def by_chances(batch):
    """The batch with negatives of other chances, the repeated one's the same."""
    chances = np.linspace(0.1, 1.0, 10, dtype="float32")
    return {**batch, "expected": chances[batch["negatives"]]}


@pytest.mark.parametrize("drawn", [dict, by_chances])
def test_the_loss_is_the_mean_of_the_places(drawn):
    prior = np.arange(1, ITEMS + 1) / np.sum(np.arange(1, ITEMS + 1))
    model, batch = stirred(make_model(prior=prior)), drawn(make_batch())
    found = model.per_example_loss({name: tf.constant(values) for name, values in batch.items()})
    expected = losses_by_hand(model, batch, lambda row, place, i: np.log(prior[i - 1]))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.fast_cases("0-True")
@pytest.mark.parametrize("with_sums", [False, True])
@pytest.mark.parametrize("blocks", [0, 1])
def test_a_user_is_clipped_as_one(blocks, with_sums, sums):
    arguments = {"width": 8, "history_length": PLACES, "num_heads": 2, "num_blocks": blocks}
    model = stirred(SASRec.upon(sums, **arguments) if with_sums else make_model(**arguments))
    for drawn in (dict, by_chances):
        assert_matches_oracle(model, drawn(make_batch()), clip=0.3, rtol=1e-3)


def test_upon_sums_answers_begin_as_theirs(sums):
    """Scores above a share of an item's popularity, which is the least that a logit can tell."""
    model = SASRec.upon(sums, width=8, history_length=12, num_heads=2)
    histories = [history for history in HISTORIES if history] + [[31], [], [3, 31, 3, 7, 31], [5] * 12]
    context = np.array([[*history, *[0] * (12 - len(history))] for history in histories])
    found, expected = model(context).numpy(), sums.scores(histories)
    least = np.maximum(0.1 * sums.popularity, 1e-7)
    np.testing.assert_allclose(found, np.log(np.maximum(expected, least)), rtol=1e-3, atol=1e-3)


def test_upon_sums_every_place_counts_what_came_before(sums):
    model, batch = stirred(SASRec.upon(sums, width=8, history_length=PLACES, num_heads=2)), make_batch()
    least = np.maximum(0.1 * sums.popularity, 1e-7)

    def begin(row, place, item):
        score = sums.scores([batch["context"][row, : place + 1]])[0, item - 1]
        return np.log(max(score, least[item - 1]))

    batch["context"][0] = [7, 9, 7, 30, 9, 7]  # the sums count a repeated item once, where it stands last
    found = model.per_example_loss({name: tf.constant(values) for name, values in batch.items()})
    np.testing.assert_allclose(found, losses_by_hand(model, batch, begin), rtol=2e-3)


@pytest.mark.slow
def test_trained_upon_sums_and_saved(sums, tmp_path):
    """The numbers of the sums are in the file, are not trained, and get no noise."""
    model = SASRec.upon(sums, width=8, history_length=PLACES, num_heads=2)
    fixed = [weight.numpy() for weight in model.sums.weights]
    model.compile(tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=5))
    for _ in range(2):
        model.train_on_batch(make_batch())
    for weight, before in zip(model.sums.weights, fixed, strict=True):
        np.testing.assert_array_equal(weight, before)
    context = make_batch()["context"]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(context), model(context), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("with_sums", [False, True])
def test_items_join_and_the_others_score_as_before(with_sums, sums):
    arguments = {"width": 8, "history_length": PLACES, "num_heads": 2}
    model = stirred(SASRec.upon(sums, **arguments) if with_sums else make_model(prior=np.arange(1, ITEMS + 1)))
    model.compile(tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=5))
    model.train_on_batch(make_batch())
    told = np.array([[3, 9, 30, 0, 0, 0]])
    before = model(told).numpy()
    larger = model.grow([100, 101])
    grown = larger(told).numpy()
    assert grown.shape[1] == ITEMS + 2
    found = grown[:, :ITEMS]
    np.testing.assert_allclose(found - found[:, :1], before - before[:, :1], atol=1e-4)
    assert np.isfinite(grown).all()
    if with_sums:
        assert len(larger.saved_history().uses) == 1
        with pytest.raises(ValueError, match="takes no prior"):
            model.grow([100], prior=np.ones(ITEMS + 1))
    assert larger.privacy_history.snapshot().steps == 1


@pytest.mark.slow
def test_a_training_upon_later_sums_tells_of_both(sums):
    """Tables go on upon other sums: the history has the cost of both, and of the steps."""
    arguments = {"width": 8, "history_length": PLACES, "num_blocks": 0}
    first = stirred(SASRec.upon(sums, **arguments))
    first.compile(tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=5))
    first.train_on_batch({**make_batch()})
    later = tfdp_rec.spectral.SpectralRecommender(
        range(1, ITEMS + 1), noise_multiplier=0.5, delta=1e-4, ordered=True, head=20
    )
    second = SASRec.upon(later.fit(HISTORIES, verbose=0), **arguments)
    with pytest.raises(ValueError, match="only the number of rows"):
        first.grow_into(second)
    with pytest.raises(ValueError, match="no frozen weight"):
        first.grow_into(second, replaced=[first.items.embeddings.path])
    first.grow_into(second, replaced=[variable.path for variable in first.sums.weights])
    assert len(second.saved_history().uses) == 2 and second.privacy_history.snapshot().steps == 1
    np.testing.assert_array_equal(second.items.embeddings, first.items.embeddings)
    np.testing.assert_allclose(second.sums.between.numpy()[1:, 1:], later.estimates.weights)


@pytest.mark.slow
@pytest.mark.parametrize("with_sums", [False, True])
def test_it_is_exported_by_raw_ids(with_sums, sums, tmp_path):
    """Histories longer than the model, with gaps and unknown ids; answers are those of the model itself."""
    arguments = {"width": 8, "history_length": PLACES, "num_heads": 2}
    model = stirred(SASRec.upon(sums, **arguments) if with_sums else make_model())
    model.compile(tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=5))
    model.train_on_batch(make_batch())  # rows owe noise
    model.export(str(tmp_path / "served"), k=5)
    histories = [[1, 2, 3, 4, 5, 6, 7, 8], [0, 9, 0, 11, 999, 0, 0, 0], [0] * 8]
    served = tf.saved_model.load(str(tmp_path / "served")).signatures
    found = served["serving_default"](history=tf.constant(histories, tf.int64))
    scores = model(np.array([[3, 4, 5, 6, 7, 8], [9, 11, 0, 0, 0, 0], [0] * 6])).numpy()
    for row, held in enumerate(([1, 2, 3, 4, 5, 6, 7, 8], [9, 11], [])):
        scores[row, np.array(held, int) - 1] = -np.inf
    best = np.argsort(-scores, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(found["ids"], best + 1)
    np.testing.assert_allclose(found["scores"], np.take_along_axis(scores, best, 1), rtol=1e-5, atol=1e-6)
    allowed = tf.constant([9, 4, 7], tf.int64)
    among = served["among"](history=tf.constant(histories[1:2], tf.int64), k=tf.constant(3), allowed=allowed)
    assert sorted(among["ids"].numpy()[0].tolist()) == [0, 4, 7]
    model.save(tmp_path / "model.keras")
    assert main(["export", str(tmp_path / "model.keras"), str(tmp_path / "again"), "--top-k", "5"]) == 0
    again = tf.saved_model.load(str(tmp_path / "again")).signatures["serving_default"]
    np.testing.assert_array_equal(again(history=tf.constant(histories, tf.int64))["ids"], found["ids"])
    with pytest.raises(TypeError, match="does not take signature"):
        model.export(str(tmp_path / "other"), signature=1)


@pytest.mark.slow
def test_it_learns_transitions_that_sums_without_direction_cannot_tell():
    """Each item is followed by the next one of a circle: private at a user's level, by its own examples."""
    users = 4000
    rng = np.random.default_rng(3)
    histories = [((rng.integers(0, 10) + np.arange(rng.integers(3, 9))) % 10) + 1 for _ in range(users)]
    offsets = np.cumsum([0, *map(len, histories)])
    log = Timelines(np.concatenate(histories), offsets, np.arange(users), np.arange(1, 11), list("abcdefghij"))
    examples = NextItemExamples(log, history=PLACES, negatives=10, seed=0, every_place=True)
    sampling = PoissonSampling(users, 400, unit="user")
    seeding.seed(1)
    model = SASRec(range(1, 11), width=8, history_length=PLACES, num_blocks=0)
    model.compile(tfdp_rec.LazyDPSGD(30.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=400))
    model.fit(sampling.batches(examples.fetch, shared=examples.shared), steps_per_epoch=60, verbose=0, shuffle=False)
    context = np.array([[item, 0, 0, 0, 0, 0] for item in range(1, 11)])
    best = np.argmax(model(context).numpy(), axis=1) + 1
    assert (best == np.arange(1, 11) % 10 + 1).mean() >= 0.8


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: make_model(width=8, num_heads=3), "num_heads must divide width"),
        (lambda: make_model(prior=[1.0, 2.0]), "prior must be 40"),
        (lambda: SASRec([]), "catalogue"),
    ],
)
def test_misuse_is_one_line(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_sums_without_order_are_refused(sums):
    other = tfdp_rec.spectral.SpectralRecommender(range(1, ITEMS + 1), noise_multiplier=0.5, delta=1e-4)
    with pytest.raises(ValueError, match="in order"):
        SASRec.upon(other.fit(HISTORIES, verbose=0), width=8)


# What the sums cost.

SAMPLING = dict(num_units=1000, expected_batch_size=5)


def accounted(model, sampling=None):
    accountant = Accountant(GaussianDpEvent(1.0), sampling or PoissonSampling(**SAMPLING), 1e-4, "rdp")
    accountant.follow(model)
    return accountant


def test_the_model_tells_what_its_sums_have_cost(sums, tmp_path):
    """An accountant that was told nothing, and one of a file, count the sums, once."""
    model = SASRec.upon(sums, width=8, history_length=PLACES, num_heads=2)
    assert accounted(model).spent_besides == sums.uses and [event for event, _ in sums.uses] == [sums.event]
    model.save(tmp_path / "untrained.keras")
    assert accounted(keras.models.load_model(tmp_path / "untrained.keras")).spent_besides == sums.uses
    plan = tfdp_rec.PrivatePlan(
        sampling=PoissonSampling(**SAMPLING), delta=1e-4, steps=3, noise_multiplier=1.0, spent=sums.uses,
        accountant="rdp",
    )  # fmt: skip
    model.compile(tfdp_rec.LazyDPSGD(0.5, plan=plan))
    assert plan.accountant.spent_besides == sums.uses
    model.save_weights(tmp_path / "model.weights.h5")
    other = SASRec.upon(sums, width=8, history_length=PLACES, num_heads=2)
    other.load_weights(tmp_path / "model.weights.h5")
    assert accounted(other).spent_besides == sums.uses
    model.compile(tfdp_rec.DPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=5))
    assert accounted(model).spent_besides == sums.uses


@pytest.mark.slow
def test_a_plan_that_was_not_told_of_the_sums_keeps_its_epsilon():
    users = 400
    ids = np.arange(1, ITEMS + 1)
    log = Timelines(np.tile(ids[:3], users), 3 * np.arange(users + 1), np.arange(users), ids, list(map(str, ids)))
    sums = tfdp_rec.spectral.SpectralRecommender(range(1, ITEMS + 1), 2.0, 1e-4, ordered=True).fit(log, verbose=0)
    examples = NextItemExamples(log, history=PLACES, negatives=10, seed=0, every_place=True)
    sampling = PoissonSampling(users, 20, unit="user")
    plan = tfdp_rec.PrivatePlan(sampling=sampling, delta=1e-4, steps=8, epsilon=3.0, accountant="rdp")
    model = SASRec.upon(sums, width=4, history_length=PLACES, num_blocks=0)
    model.compile(tfdp_rec.LazyDPSGD(0.5, plan=plan))
    batches = plan.batches(examples.fetch, shared=examples.shared)
    model.fit(batches, steps_per_epoch=8, callbacks=[plan.budget()], verbose=0)
    assert plan.accountant.steps < 8 and 2.0 < plan.accountant.epsilon() <= 3.0
    with pytest.raises(tfdp_rec.NotPrivate, match="budget is spent"):
        model.train_on_batch(next(iter(batches)))


def test_sums_of_several_fits_have_cost_each_of_them(tmp_path):
    def more(noise=0.5, before=None):
        made = tfdp_rec.spectral.SpectralRecommender(
            range(1, ITEMS + 1), noise_multiplier=noise, delta=1e-4, ordered=True, head=30, before=before
        )
        return made.fit(HISTORIES, verbose=0)

    first, unrelated = more(), more()
    first.save(tmp_path / "first.npz")
    second = more(0.6, tfdp_rec.spectral.SpectralRecommender.load(tmp_path / "first.npz").released.faded(0.5))
    assert [event.noise_multiplier for event, _ in second.uses] == [0.5, 0.6] and second.uses[0] == first.uses[0]
    both = accounted(SASRec.upon(second, width=8, history_length=PLACES))
    both.follow(SASRec.upon(first, width=8, history_length=PLACES))
    assert both.spent_besides == second.uses
    both.follow(SASRec.upon(unrelated, width=8, history_length=PLACES))
    assert sorted(both.spent_besides, key=str) == sorted([*second.uses, *unrelated.uses], key=str)


def test_sums_that_do_not_tell_what_they_have_cost_are_refused(sums):
    unknown = copy.copy(sums)
    unknown.released = dataclasses.replace(sums.released, multipliers=np.array([np.nan]))
    with pytest.raises(ValueError, match="cost.*Use"):
        SASRec.upon(unknown, width=8, history_length=PLACES)
    spent = [(GaussianDpEvent(0.5), "sums of Monday")]
    assert accounted(SASRec.upon(unknown, spent=spent, width=8, history_length=PLACES)).spent_besides == spent


def test_sums_of_a_run_do_not_tell_what_finding_their_items_has_cost(sums, tmp_path):
    with open(tmp_path / "released.npz", "wb") as file:
        sums.write(file, mark="{}")
    of_run = tfdp_rec.spectral.SpectralRecommender.load(tmp_path / "released.npz")
    with pytest.raises(ValueError, match="what all of it has cost is in its ledger.jsonl") as refused:
        SASRec.upon(of_run, width=8, history_length=PLACES)
    with Ledger(path := tmp_path / "ledger.jsonl", "user", Snapshot(None)) as ledger:
        ledger.pay(GaussianDpEvent(2.0), label="private sums")
        for _ in range(2):  # blocks of one training have one id
            ledger.pay(GaussianDpEvent(9.0), 100, "training", steps=100, id="of the training")
    said = re.search(r"spent=(\[.*\])", str(refused.value))
    assert said
    model = SASRec.upon(of_run, spent=eval(said[1], {"tfdp_rec": tfdp_rec, "path": path}), width=8, history_length=2)
    assert accounted(model).epsilon() == pytest.approx(read(path).epsilon(accounted(model).delta, "rdp"))


def test_a_use_of_a_model_goes_with_its_layers():
    class Own(tfdp_rec.PrivateTraining, keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.rows = layer

        def call(self, x):
            return tf.reduce_sum(self.rows(x), axis=[1, 2])[:, None]

    use, layer = (GaussianDpEvent(2.0), "counts of Monday"), keras.layers.Embedding(5, 2)
    first, second = Own(layer), Own(layer)
    first(np.array([[1]]))
    first.add_uses([use])
    for model in (first, second):
        model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2), loss="mse")
        model.prepare((np.array([[1], [2]]), np.array([[0.0], [1.0]])))
    assert accounted(second).spent_besides == [use]


def test_sums_with_the_noise_of_a_test_have_no_guarantee():
    made = tfdp_rec.spectral.SpectralRecommender(
        range(1, ITEMS + 1), noise_multiplier=0.5, delta=1e-4, ordered=True, words=seeded(1)
    )
    model = SASRec.upon(made.fit(HISTORIES, verbose=0), width=8, history_length=PLACES)
    assert accounted(model).spent_besides[0][0] == NonPrivateDpEvent() and accounted(model).epsilon() == np.inf
