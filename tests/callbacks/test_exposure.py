"""The exposure callback: sees what a model memorised, from released weights, when it should."""

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf

import tfdp_rec
from tfdp_rec.audit import Canaries, Uniform, exposure_interpolation
from tfdp_rec.callbacks.exposure import Exposure, per_example_losses
from tfdp_rec.models import TwoTower
from tfdp_rec.noise import EntropyNoise

QUICK = EntropyNoise(jit_compile=False)  # nothing to compile for tables this small
MOVIES = 200
CATALOGUE = {"context": Uniform(MOVIES + 1, shape=(3,), low=1), "label": Uniform(MOVIES + 1, low=1)}
CANARIES = Canaries.draw(CATALOGUE, repeats=(1, 30), per_repeat=10, num_references=512, seed=0)
NEGATIVES = {"negatives": np.arange(1, MOVIES + 1)}


def make_model(optimizer):
    seeding.seed(1)
    model = TwoTower(vocabulary=list(range(1, MOVIES + 1)), width=16, hidden=0, ks=(1, 2))
    model.compile(optimizer=optimizer)
    return model


def batches(size=64):
    users = {
        "context": np.random.default_rng(0).integers(1, MOVIES + 1, (400, 3)),
        "label": np.arange(400) % MOVIES + 1,
    }
    fetch, total = CANARIES.insert(lambda i: {name: values[i] for name, values in users.items()}, 400)

    def batch(step):
        return {**fetch(np.random.default_rng(step).integers(0, total, size)), **NEGATIVES}

    made = {name: tf.convert_to_tensor(value) for name, value in batch(0).items()}
    spec = {n: tf.TensorSpec(v.shape if n in NEGATIVES else [None, *v.shape[1:]], v.dtype) for n, v in made.items()}
    return tf.data.Dataset.from_generator(lambda: map(batch, range(10_000)), output_signature=spec)


@pytest.mark.slow
def test_repeated_canaries_become_exposed_and_noise_hides_them():
    medians = {}
    for name, optimizer in [
        ("plain", tfdp_rec.EANA(6.0, l2_norm_clip=1.0, noise_multiplier=0.0, expected_batch_size=64, noise=QUICK)),
        (
            "noisy",
            tfdp_rec.LazyDPSGD(6.0, l2_norm_clip=1.0, noise_multiplier=20.0, expected_batch_size=64, noise=QUICK),
        ),
    ]:
        callback = Exposure(CANARIES, NEGATIVES, every=100)
        model = make_model(optimizer)
        logs = model.fit(batches(), steps_per_epoch=60, epochs=2, verbose=0, callbacks=[callback]).history
        assert [epoch for epoch, _ in callback.history] == [1]  # the last epoch is measured whatever `every` says
        medians[name] = {count: float(np.median(v)) for count, v in callback.history[-1][1].items()}
        assert logs["exposure_30"][-1] == medians[name][30]
    assert medians["plain"][30] > max(5, medians["plain"][1] + 1)
    assert medians["noisy"][30] < medians["plain"][30] - 2


@pytest.mark.slow
def test_measures_released_weights():
    """Losses come after settling: measuring leaves nothing pending and equals measuring again."""
    optimizer = tfdp_rec.LazyDPSGD(6.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=64, noise=QUICK)
    model = make_model(optimizer)
    for batch in batches().take(3):
        model.train_on_batch(batch)
    assert not optimizer.releasable
    first = per_example_losses(model, CANARIES.references, NEGATIVES)
    assert optimizer.releasable
    np.testing.assert_array_equal(first, per_example_losses(model, CANARIES.references, NEGATIVES, batch_size=512))


def test_measure_is_the_definition_on_the_models_own_losses():
    model = make_model(keras.optimizers.SGD(0.1))
    callback = Exposure(CANARIES, NEGATIVES, batch_size=100)
    exposures = callback.measure(model)
    losses = model.per_example_loss({**CANARIES.features, **NEGATIVES}, training=False).numpy()
    references = model.per_example_loss({**CANARIES.references, **NEGATIVES}, training=False).numpy()
    expected = exposure_interpolation(losses[CANARIES.repeats == 30], references)
    np.testing.assert_allclose(exposures[30], expected, atol=0.1)
    extrapolated = Exposure(CANARIES, NEGATIVES, extrapolate=True)
    model.context_table.embeddings.assign(tf.random.normal(model.context_table.embeddings.shape))
    model.scores.embeddings.assign(tf.random.normal(model.scores.embeddings.shape))
    assert np.all(np.isfinite(extrapolated.measure(model)[1]))


@pytest.mark.slow
def test_every_counts_epochs():
    model = make_model(tfdp_rec.EANA(1.0, l2_norm_clip=1.0, noise_multiplier=0.1, expected_batch_size=64, noise=QUICK))
    callback = Exposure(CANARIES, NEGATIVES, every=2)
    model.fit(batches(), steps_per_epoch=1, epochs=5, verbose=0, callbacks=[callback])
    assert [epoch for epoch, _ in callback.history] == [1, 3, 4]


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(TypeError, match="Canaries"):
        Exposure({"context": [1]})
    with pytest.raises(ValueError, match="every"):
        Exposure(CANARIES, every=0)
    plain = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    with pytest.raises(TypeError, match="per_example_loss"):
        plain.fit(np.zeros([4, 2]), np.zeros([4, 1]), verbose=0, callbacks=[Exposure(CANARIES)])
