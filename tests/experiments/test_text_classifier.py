"""The text classifier of the study: padding, exact clipping, learning, saving."""

import keras
import numpy as np
import pytest

import tfdp_rec
from experiments.adafest.text_classifier import TextClassifier
from experiments.bench.baselines import clipped_sum_by
from tfdp_rec.noise import KeyedNoise


def test_padding_changes_nothing():
    model = TextClassifier(50, max_length=10, width=16, heads=4, blocks=2)
    sentence = np.array([[7, 9, 3]])
    padded = np.pad(sentence, [(0, 0), (0, 5)])
    np.testing.assert_allclose(model(sentence), model(padded), atol=1e-5)
    assert np.isfinite(model(np.zeros([1, 4], int))).all()


@pytest.mark.slow  # tests/independence/test_alone.py has its clip too
def test_the_token_table_is_the_only_table_and_is_clipped_exactly():
    model = TextClassifier(50, max_length=6, width=8, heads=2, blocks=1)
    model.compile(
        tfdp_rec.AdaFEST(
            0.1, l2_norm_clip=1.0, noise_multiplier=1.0, contribution_clip=1.0, contribution_noise_multiplier=1.0,
            threshold=5.0, expected_batch_size=8,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    ids = np.random.default_rng(0).integers(0, 50, [8, 6])
    batch = (ids, ids[:, 0] % 2)
    fast, slow = (
        clipped_sum_by(s, model, batch, l2_norm_clip=0.5)
        for s in ("bookkeeping", "per_example")
    )
    np.testing.assert_allclose(fast.norms, slow.norms, rtol=1e-4)
    model.train_on_batch(*batch)
    assert list(model.optimizer.tables) == [model.tokens.embeddings.path]


@pytest.mark.slow
def test_adafest_learns_a_planted_word():
    rng = np.random.default_rng(1)
    ids = rng.integers(3, 200, [4000, 12])
    labels = rng.integers(0, 2, 4000)
    ids[np.arange(4000), rng.integers(0, 12, 4000)] = 1 + labels
    model = TextClassifier(200, max_length=12, width=16, heads=2, blocks=1)
    optimizer = tfdp_rec.AdaFEST(
        1.0, l2_norm_clip=1.0, noise_multiplier=0.3, contribution_clip=1.0, contribution_noise_multiplier=1.0,
        threshold=10.0, expected_batch_size=400, dense_optimizer=keras.optimizers.Adam(3e-3), noise=KeyedNoise(4),
    )  # fmt: skip
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    sampling = tfdp_rec.data.PoissonSampling(4000, 400)
    model.fit(sampling.batches(lambda i: (ids[i], labels[i]), seed=0), steps_per_epoch=80, verbose=0)
    accuracy = (np.argmax(model.predict(ids, verbose=0), axis=1) == labels).mean()
    assert accuracy > 0.8


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="multiple of heads"):
        TextClassifier(10, width=10, heads=4)


def test_it_saves_and_loads(tmp_path):
    model, ids = TextClassifier(30, max_length=6, width=8, heads=2, blocks=1), np.arange(12).reshape(2, 6)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(ids), model(ids), rtol=1e-6)
    assert again.get_config() == model.get_config()
