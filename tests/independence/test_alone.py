"""The package's losses, norms and clipped sum are those of examples that were kept apart by construction."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import seeding
from alone import assert_clipped_alone, gradients_alone
from helpers import double_precision
from zoo import ZOO, built

from experiments.adafest.text_classifier import TextClassifier
from experiments.generated.clicks import SyntheticCriteo
from experiments.generated.knowledge_graph import SyntheticKG
from tfdp_rec.models import DLRM, PCTR, KGEntity, TwoTower
from tfdp_rec.models.canary_table import CanaryTable

VECTORISED = ("mlp", "dlrm")
IN_A_LOOP = ("two_tower", "gru")  # gathers from a table by shared ids; lists of a loop: neither converts
ATTENDING = ("transformer", "text")
TESTS = Path(__file__).parents[1]


@pytest.fixture
def float64():
    with double_precision():
        yield


@pytest.mark.fast_cases("mlp")
@pytest.mark.parametrize("name", VECTORISED)
def test_a_vectorised_loss_of_single_examples_is_clipped_alike(name, float64):
    assert assert_clipped_alone(*built(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IN_A_LOOP, *ATTENDING])
def test_examples_in_a_loop_are_clipped_alike(name, float64):
    assert not assert_clipped_alone(*built(name))


@pytest.mark.fast_cases("two_tower")
@pytest.mark.parametrize("name", IN_A_LOOP)
def test_what_does_not_convert_says_so(name, float64):
    with pytest.raises((ValueError, TypeError)):
        gradients_alone(*built(name), vectorised=True)


def test_every_model_of_the_zoo_is_compared():
    assert {*VECTORISED, *IN_A_LOOP, *ATTENDING} == set(ZOO)


def clicks():
    model = PCTR(buckets=(300, 200, 50) + (10,) * 23, hidden=[8, 8])
    model.compile("sgd", loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return model, SyntheticCriteo(model.buckets, seed=1).examples(5).fetch(slice(None))


def dlrm():
    rng = np.random.default_rng(0)
    model = DLRM([7, 11, 5], width=4, dense_features=3, bottom=[6], top=[8, 5])
    model.compile("sgd", "binary_crossentropy")
    inputs = {"dense": rng.normal(size=[5, 3]).astype("float32"), "ids": rng.integers(0, 5, [5, 3], "int32")}
    return model, (inputs, rng.integers(0, 2, [5, 1]).astype("float32"))


def canaries():
    return CanaryTable(6, 3), np.arange(5)


def texts():
    model = TextClassifier(30, max_length=6, width=8, heads=2, blocks=1)
    model.compile("sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(2)
    return model, (rng.integers(0, 30, [5, 6]), rng.integers(0, 2, [5]))


def entities():
    kg = SyntheticKG(num_individuals=50, vocabulary_size=40, num_topics=4, context_length=6, max_activities=9)
    sizes = dict.fromkeys(("entities", "unigrams", "bigrams"), 41)
    model = KGEntity(sizes, num_labels=41, width=8, num_heads=2, context_length=6, num_blocks=1)
    return model, {**kg.fetch(np.arange(5), seed=0), "negatives": np.arange(1, 20)}


def movies():
    rng = np.random.default_rng(3)
    model = TwoTower(vocabulary=list(range(1, 21)), width=8, hidden=4, ks=(1, 2))
    batch = {"context": rng.integers(1, 21, [5, 3]), "label": rng.integers(1, 21, 5)}
    return model, {**batch, "negatives": np.arange(1, 21)}


SLOWER = [pytest.param(made, marks=pytest.mark.slow) for made in (clicks, entities)]


@pytest.mark.fast_cases("canaries")
@pytest.mark.parametrize("made", [dlrm, canaries, texts, movies, *SLOWER])
def test_a_model_of_the_package_clips_examples_as_if_they_were_alone(made):
    seeding.seed(4)
    model, batch = made()
    model.per_example_loss(batch, training=True)  # builds it
    assert_clipped_alone(model, batch, rtol=1e-4)


@pytest.mark.slow
def test_attention_is_vectorised_without_the_kernels_that_crash():
    """TensorFlow 2.21 ends the process over `MultiHeadAttention` in `tf.vectorized_map`, if oneDNN's kernels are on."""
    program = (
        "from alone import assert_clipped_alone; from zoo import built; from helpers import double_precision\n"
        f"with double_precision():\n    for name in {ATTENDING}: assert assert_clipped_alone(*built(name)), name\n"
        "print('compared')"
    )
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.endswith("compared\n"), done.stderr[-2000:]
