"""A batch carries the proof of its draw to the step, which trains on nothing else at an amplified epsilon."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.core.claim import names
from tfdp_rec.core.claim.sampling_proof import SeenDraws, refuse_choosing
from tfdp_rec.privacy import Accountant, PoissonSampling
from tfdp_rec.training.lookahead import lookahead

UNITS, BATCH = 200, 20
IDS = np.arange(UNITS, dtype=np.int32)
LABELS = np.linspace(-1, 1, UNITS, dtype=np.float32)[:, None]
REFUSED = (ValueError, tfdp_rec.NotPrivate)


def fetch(indices):
    return IDS[indices][:, None], LABELS[indices]


def model_of(**options):
    ids = keras.Input([1], dtype="int32")
    model = tfdp_rec.PrivateModel(ids, keras.layers.Flatten()(keras.layers.Embedding(UNITS, 1, name="items")(ids)))
    options = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": BATCH, **options}
    model.compile(tfdp_rec.DPSGD(0.1, **options), loss="mse")
    return model


class Training:
    """A model, a sampling and an accountant that is to speak of both."""

    def __init__(self, scheme=PoissonSampling, **options):
        self.sampling = scheme(UNITS, BATCH)
        self.model = model_of(**options)
        self.accountant = Accountant(self.model.optimizer.dp_event(), self.sampling, 1e-3, "rdp")
        self.before = 0

    def fit(self, data, steps=6, budget=100.0, **options):
        self.model.fit(
            data, steps_per_epoch=steps, verbose=0, callbacks=[PrivacyBudget(self.accountant, budget)], **options
        )
        return self.accountant.epsilon()

    @property
    def steps(self):
        """Since the test began."""
        return int(self.model.optimizer.iterations) - self.before


@pytest.fixture(scope="module")
def once():
    """One model for the whole file: tracing a step takes seconds."""
    return Training()


@pytest.fixture
def training(once):
    once.before = int(once.model.optimizer.iterations)
    return once


def test_honest_batches_are_taken_at_the_honest_epsilon(training):
    before = training.accountant.steps
    assert training.fit(training.sampling.batches(fetch)) == training.accountant.epsilon(before + 6)
    assert training.steps == 6


def rows_of_five(indices):
    return np.repeat(IDS[indices], 5)[:, None], np.repeat(LABELS[indices], 5, axis=0)


def rows_of_nobody_asked_for(indices):
    return IDS[:BATCH][:, None], LABELS[:BATCH]


@pytest.mark.parametrize("wrong", [rows_of_five, rows_of_nobody_asked_for])
def test_a_fetch_that_does_not_give_one_row_for_each_index_is_refused(training, wrong):
    with pytest.raises(REFUSED, match="one row for each index"):
        training.fit(training.sampling.batches(wrong))
    assert training.steps == 0


def test_a_fetch_that_gives_more_rows_only_later_is_refused_when_it_does(training):
    busy = lambda indices: fetch(indices) if len(indices) < 3 else rows_of_five(indices)  # noqa: E731
    with pytest.raises(REFUSED, match="one row for each index"):
        training.fit(training.sampling.batches(busy))
    assert training.steps == 0


def batch_of(element):
    return element.batch if hasattr(element, "batch") else element


AFTERWARDS = {
    "unbatch and batch": lambda data: data.unbatch().batch(BATCH),
    "batch of batches": lambda data: data.batch(2),
    "the plain rows, batched": lambda data: data.map(batch_of).unbatch().batch(BATCH),
    "the plain batches": lambda data: data.map(lambda *element: batch_of(element[0] if len(element) == 1 else element)),
    "cached": lambda data: data.take(3).cache().repeat(),
    "each batch twice": lambda data: data.flat_map(lambda *e: tf.data.Dataset.from_tensors(*e).repeat(2)),
    "shuffled": lambda data: data.shuffle(8, seed=1).take(20),  # by chance in order, unseeded
    "every other batch": lambda data: data.enumerate().filter(lambda i, *_: i % 2 == 0).map(lambda i, e: e),
}


@pytest.mark.parametrize("change", AFTERWARDS)
def test_what_is_done_to_a_dataset_after_sampling_is_refused(training, change):
    with pytest.raises(REFUSED):
        training.fit(AFTERWARDS[change](training.sampling.batches(fetch)))
    assert training.steps <= 3


def test_batches_chosen_by_their_size_are_refused(training):
    """At the first that is left out: each is with a chance near a half, so within 60 steps surely (2^-60)."""
    large = lambda *element: tf.shape(tf.nest.flatten(element)[0])[0] > BATCH  # noqa: E731
    with pytest.raises(REFUSED):
        training.fit(training.sampling.batches(fetch).take(200).filter(large), steps=60)
    assert training.steps < 60


def seven(*element):
    return tf.reduce_any(tf.nest.flatten(element)[0] == 7)


CHOOSING = {
    "take_while, again and again": lambda data: data.take_while(seven).repeat(10**6),
    "a first draw, if it pleases": lambda data: data.take(1).filter(seven).repeat(10**6),
    "one iteration a number": lambda data: tf.data.Dataset.range(10**6).flat_map(lambda _: data.take(1).filter(seven)),
    "under a prefetch": lambda data: data.take_while(seven).repeat(10**6).prefetch(1),
    "zipped with its number": lambda data: data.take(1).enumerate().filter(lambda i, e: seven(e)).map(lambda i, e: e),
}


@pytest.mark.slow_cases("a first draw, if it pleases", "under a prefetch")
@pytest.mark.parametrize("change", CHOOSING)
def test_draws_chosen_by_their_rows_are_refused_before_the_first_step(training, change):
    """Each iteration of these has no gap, and all had the unit that was asked for: ε was 1.98, and 27.8 in truth."""
    data = CHOOSING[change](training.sampling.batches(fetch))
    with pytest.raises(REFUSED, match="after sampling, which could choose among draws"):
        training.fit(data)
    with pytest.raises(REFUSED, match="after sampling, which could choose among draws"):
        lookahead(data, training.model)
    graph = CHOOSING[change](training.sampling.graph_batches(lambda indices: {"items": indices}))
    with pytest.raises(REFUSED, match="after sampling, which could choose among draws"):
        refuse_choosing(graph)
    assert training.steps == 0


def test_draws_chosen_after_look_ahead_are_refused(training):
    data = lookahead(training.sampling.batches(fetch), training.model)
    with pytest.raises(REFUSED, match="went through Filter after sampling"):
        training.fit(data.take(1).filter(lambda element: seven(element.batch)).repeat(10**6))
    assert training.steps == 0


def test_what_gives_draws_as_they_come_is_taken(training):
    data = training.sampling.batches(fetch).take(2).repeat().prefetch(2)
    training.fit(data.with_options(tf.data.Options()), steps=4)
    training.fit(lookahead(data, training.model).prefetch(1), steps=2)
    assert training.steps == 6


def test_rows_cut_off_after_sampling_are_refused(training):
    short = lambda batch: tf.nest.map_structure(lambda rows: rows[1:], batch)  # noqa: E731

    def cut(*element):
        drawn = element[0] if len(element) == 1 else element
        return drawn._replace(batch=short(drawn.batch)) if hasattr(drawn, "batch") else short(drawn)

    with pytest.raises(REFUSED, match="went through Map after sampling"):
        training.fit(training.sampling.batches(fetch).map(cut))
    with pytest.raises(REFUSED, match="drew .* units and gives"):
        training.model.train_on_batch(cut(next(iter(training.sampling.batches(fetch)))))
    with pytest.raises(REFUSED, match="in what map returns"):
        training.sampling.batches(fetch, map=lambda ids, labels: (ids[1:], labels[1:]))
    assert training.steps == 0


def test_a_batch_is_trained_on_once_whoever_trains(training):
    batch = next(iter(training.sampling.batches(fetch)))
    training.model.train_on_batch(batch)
    with pytest.raises(REFUSED, match="trained on before"):
        training.model.train_on_batch(batch)
    with pytest.raises(REFUSED, match="trained on before"):
        model_of().train_on_batch(batch)
    assert training.steps == 1


def test_draws_left_out_are_refused_and_a_new_iteration_is_not(training):
    batches = iter(training.sampling.batches(fetch))
    training.model.train_on_batch(next(batches))
    next(batches)
    with pytest.raises(REFUSED, match="left out"):
        training.model.train_on_batch(next(batches))
    training.model.train_on_batch(next(iter(training.sampling.batches(fetch))))
    assert training.steps == 2


def test_draws_that_another_process_kept_in_a_file_are_refused(training, tmp_path, monkeypatch):
    """cache(filename): the second process to read it had not seen these draws, and took them for fresh ones."""
    kept = training.sampling.batches(fetch).take(4).cache(str(tmp_path / "kept"))
    with monkeypatch.context() as of_another:
        of_another.setattr("tfdp_rec.core.claim.names.PROCESS", names.PROCESS ^ 1)
        assert len(list(kept)) == 4
    with pytest.raises(REFUSED, match="drawn by another process and kept in a file"):
        training.fit(kept)
    assert training.steps == 0
    with pytest.raises(REFUSED, match="drawn by another process and kept in a file"):
        SeenDraws().add((names.PROCESS ^ 1) << 38, 0)


def test_two_iterations_may_take_turns(training):
    one, other = (iter(training.sampling.batches(fetch)) for _ in range(2))
    for _ in range(3):
        training.model.train_on_batch(next(one))
        training.model.train_on_batch(next(other))
    assert training.steps == 6


def test_batches_of_another_sampling_are_refused_by_the_accountant(training):
    with pytest.raises(REFUSED, match="another sampling"):
        training.fit(PoissonSampling(UNITS, BATCH).batches(fetch))
    assert training.steps == 0


def test_a_batch_size_that_is_not_the_optimizers_is_refused():
    training = Training(expected_batch_size=40)
    with pytest.raises(REFUSED, match="expected_batch_size is 20 .* 40"):
        training.fit(training.sampling.batches(fetch))
    assert training.steps == 0


# Inputs that a batch shares.


class Shares(tfdp_rec.PrivateTraining, keras.Model):
    shared_inputs = ("negatives",)

    def __init__(self):
        super().__init__()
        self.scores = tfdp_rec.CandidateScores(UNITS, 2)
        self.users = keras.layers.Embedding(UNITS, 2)

    def per_example_loss(self, data, training):
        logits = self.scores(self.users(data["user"]), data["item"], data["negatives"])
        return tf.reduce_logsumexp(logits, axis=-1) - logits[:, 0]


def sharing_model():
    model = Shares()
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=BATCH))
    return model


def pairs(indices):
    return {"user": IDS[indices], "item": IDS[indices]}


def negatives():
    return {"negatives": np.random.default_rng().choice(UNITS, 5, replace=False).astype(np.int32)}


def test_shared_inputs_from_a_function_that_is_not_given_the_indices():
    """A map may leave them as they are."""
    model, sampling = sharing_model(), PoissonSampling(UNITS, BATCH)
    other = lambda batch: {**batch, "item": (batch["item"] + 1) % UNITS}  # noqa: E731
    for change in ({}, {"map": other}):
        model.fit(sampling.batches(pairs, shared=negatives, **change), steps_per_epoch=4, verbose=0)
    assert int(model.optimizer.iterations) == 8


def test_shared_inputs_out_of_fetch_are_refused():
    def own_items(indices):
        return {**pairs(indices), "negatives": np.resize(IDS[indices] if len(indices) else IDS, 5)}

    model, sampling = sharing_model(), PoissonSampling(UNITS, BATCH)
    with pytest.raises(REFUSED, match="shared="):
        model.fit(sampling.batches(own_items), steps_per_epoch=4, verbose=0)
    with pytest.raises(REFUSED, match="shared="):  # as many negatives as units, by chance or not
        model.fit(sampling.batches(lambda i: {**pairs(i), "negatives": IDS[i]}), steps_per_epoch=4, verbose=0)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("place", ["within an input", "in the targets"])
def test_an_entry_of_examples_with_the_name_of_a_shared_one_is_refused(place):
    def fetch(indices):
        own = {"negatives": IDS[indices]}
        return {**pairs(indices), "bought": own} if place == "within an input" else (pairs(indices), own)

    model, sampling = sharing_model(), PoissonSampling(UNITS, BATCH)
    with pytest.raises(REFUSED, match="'negatives' is of the model's shared_inputs and stands at two places"):
        model.fit(sampling.batches(fetch, shared=negatives), steps_per_epoch=4, verbose=0)
    assert int(model.optimizer.iterations) == 0


MADE_OF_ROWS = {
    "other values": lambda batch: {**batch, "negatives": tf.concat([batch["negatives"][:-1], batch["item"][:1]], 0)},
    "the rows": lambda batch: {**batch, "negatives": batch["item"]},
    "within an entry": lambda batch: {"user": batch["user"], "item": batch["item"], "in": {"negatives": batch["item"]}},
}


def in_place(batch):
    batch["negatives"] = batch["item"]
    return batch


def within_in_place(batch):
    batch["negatives"]["ids"] = batch["item"]
    return batch


@pytest.mark.parametrize("change", [in_place, within_in_place])
def test_a_map_that_changes_its_batch_in_place_hides_nothing(change):
    shared = negatives if change is in_place else lambda: {"negatives": {"ids": negatives()["negatives"]}}
    with pytest.raises(REFUSED, match="map makes 'negatives' anew"):
        PoissonSampling(UNITS, BATCH).batches(pairs, shared=shared, map=change)


def test_shared_inputs_of_a_batch_whose_first_entry_is_a_tuple_are_looked_at():
    fetch = lambda i: (({"user": IDS[i]}, IDS[i]), IDS[i])  # noqa: E731
    keep, change = lambda x, y: (x, y), lambda x, y: (({**x[0], "negatives": y}, x[1]), y)
    PoissonSampling(UNITS, BATCH).batches(fetch, shared=negatives, map=keep)
    with pytest.raises(REFUSED, match="map makes 'negatives' anew"):
        PoissonSampling(UNITS, BATCH).batches(fetch, shared=negatives, map=change)


@pytest.mark.parametrize("made", MADE_OF_ROWS)
def test_a_map_that_makes_shared_inputs_of_the_rows_is_refused(made):
    with pytest.raises(REFUSED, match="map makes 'negatives' anew"):
        PoissonSampling(UNITS, BATCH).batches(pairs, shared=negatives, map=MADE_OF_ROWS[made])


def test_shared_inputs_that_the_model_does_not_name_are_refused(training):
    data = training.sampling.batches(lambda i: ({"ids": IDS[i][:, None]}, LABELS[i]), shared=negatives)
    with pytest.raises(REFUSED, match="shared_inputs"):
        training.fit(data)


# Seeds and test noise.


@pytest.mark.fast_cases("None-0-seed")
@pytest.mark.parametrize("noise, seed, named", [(None, 0, "seed"), (7, None, "KeyedNoise")])
def test_a_seed_and_test_noise_make_epsilon_infinite(noise, seed, named):
    training = Training(noise=noise and tfdp_rec.noise.KeyedNoise(noise))
    training.model.fit(training.sampling.batches(fetch, seed=seed), steps_per_epoch=3, verbose=0)
    training.accountant.follow(training.model)
    assert training.accountant.epsilon() == np.inf
    assert named in training.accountant.statement()


@pytest.mark.parametrize("wrong", ["seed", "noise"])
def test_no_budget_lets_a_seed_or_test_noise_start(wrong):
    training = Training(noise=tfdp_rec.noise.KeyedNoise(7) if wrong == "noise" else None)
    with pytest.raises(REFUSED, match="KeyedNoise" if wrong == "noise" else "seed"):
        training.fit(training.sampling.batches(fetch, seed=0 if wrong == "seed" else None))
    assert training.steps == 0


# Data of no sampling.


def test_data_of_no_sampling_train_and_have_no_epsilon():
    training = Training()
    training.model.fit(*fetch(np.arange(UNITS)), batch_size=BATCH, verbose=0)
    assert training.steps == 10
    training.accountant.follow(training.model)
    assert training.accountant.epsilon() == training.accountant.epsilon(10) == np.inf
    assert "none: epsilon is infinite, since no sampling drew" in " ".join(training.accountant.statement().split())


def test_data_of_no_sampling_are_refused_under_a_budget():
    training = Training()
    data = tf.data.Dataset.from_tensor_slices(fetch(np.arange(UNITS))).batch(BATCH).repeat()
    with pytest.raises(REFUSED, match="no sampling drew"):
        training.fit(data)
    assert training.steps == 0


# Maps on the rows.


def test_a_map_on_the_rows_keeps_the_draw(training):
    double = lambda ids, labels: (ids, 2 * labels)  # noqa: E731
    data = training.sampling.batches(fetch, map=double)
    training.fit(data)
    assert training.steps == 6


def test_a_model_without_privacy_trains_on_drawn_batches_as_well():
    training = Training()
    training.model.compile("sgd", loss="mse")
    training.model.fit(training.sampling.batches(fetch), steps_per_epoch=3, verbose=0)
    assert np.isfinite(training.model.evaluate(training.sampling.batches(fetch), steps=2, verbose=0))


@pytest.mark.fast_cases("options0-EANA")
@pytest.mark.parametrize("mechanism", ["LazyDPSGD", "EANA"])
@pytest.mark.parametrize("options", [{"steps_per_execution": 3}, {"run_eagerly": True}])
def test_draws_pass_through_keras_and_look_ahead(mechanism, options):
    sampling, model = PoissonSampling(UNITS, BATCH), model_of()
    optimizer = getattr(tfdp_rec, mechanism)(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=BATCH)
    model.compile(optimizer, loss="mse", metrics=["mae"], **options)
    ahead = tfdp_rec.data.lookahead(sampling.batches(fetch), model)
    for data in (sampling.batches(fetch), ahead, sampling.batches(fetch).prefetch(3)):
        model.fit(data, steps_per_epoch=6, epochs=2, verbose=0)
    assert int(optimizer.iterations) == 36
    with pytest.raises(REFUSED, match="trained on before"):
        model.fit(sampling.batches(fetch).take(3).cache().repeat(), steps_per_epoch=6, verbose=0)
