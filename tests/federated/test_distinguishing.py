"""The curious server's attack on one local update: which of two neighbouring histories made it?

The server knows both histories, the model and every public setting. It looks at one number of the update and says
"first" where that is above a threshold. The threshold is fixed on half of the draws; on the other half,
Clopper-Pearson bounds on its hit rate and false-alarm rate give a lower bound on epsilon that is too high by
chance with probability below 1e-6.
"""

import math

import numpy as np
import pytest
import tensorflow as tf
from catalogues import named
from scipy import stats

from experiments.news.published import PublishedGaussian
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated import AnalyticGaussian, AttentionMechanism, LabelPermutation, local
from tfdp_rec.federated.cohort import Client

DRAWS = 10_000
EPSILON, DELTA = 1.0, 1e-5
CONFIDENCE = 1e-6


def lower_bound(first, second):
    """A lower bound on epsilon from samples of one statistic under each history."""
    half = len(first) // 2
    thresholds = np.quantile(np.concatenate([first[:half], second[:half]]), np.linspace(0.01, 0.99, 99))
    hits = np.array([np.mean(first[:half] > t) for t in thresholds])
    alarms = np.array([max(np.mean(second[:half] > t), 1 / half) for t in thresholds])
    best = thresholds[np.argmax((hits - DELTA) / alarms)]
    rest = len(first) - half
    hit, alarm = (int(np.sum(s[half:] > best)) for s in (first, second))
    surely = stats.beta.ppf(CONFIDENCE / 2, hit, rest - hit + 1) if hit else 0.0
    at_most = stats.beta.ppf(1 - CONFIDENCE / 2, alarm + 1, rest - alarm) if alarm < rest else 1.0
    return math.log(max(surely - DELTA, 1e-12) / at_most)


def bound_of(scores):
    """The better of "above means first" and "below means first", either way round."""
    first, second = scores
    return max(lower_bound(sign * a, sign * b) for sign in (1, -1) for a, b in ((first, second), (second, first)))


def sent(update, history, world, count, source):
    """What the server receives: one flat update a draw, [count, number of weights]."""
    candidates, clicked = world.clients[0].clicks[0]
    draws = update.draw([Client(named(*history), ((candidates, clicked),))] * count, source)
    if isinstance(update, local.PublishedUpdate):
        noise = draws.noise.astype("float32")
        values = (draws.history, draws.padded, noise, draws.samples, draws.counted)
        step, variables = update._all_gradients, update.model.trainable_variables
    else:
        clipped = update._attention(draws.history, draws.padded).numpy()
        values = (update.mechanism.finish(clipped, draws.noise).astype("float32"), draws.samples, draws.counted)
        step, variables = update._public_gradients, update._public

    def flat(one):
        gradients = step(*[value[None] for value in one])[0]
        return tf.concat([tf.reshape(local._dense(g, v), (-1,)) for g, v in zip(gradients, variables)], 0)

    run = tf.function(lambda *given: tf.map_fn(flat, given, fn_output_signature=tf.float32))
    return run(*[tf.constant(value) for value in values]).numpy()


def statistics(updates, fit):
    """One number an update: its Fisher discriminant between the two histories, fitted on `fit` draws."""
    first, second = (u[:fit] for u in updates)
    spread = np.concatenate([first - first.mean(0), second - second.mean(0)]).std(0) + 1e-9
    direction = (first.mean(0) - second.mean(0)) / spread**2
    largest = np.argsort(np.abs(first.mean(0) - second.mean(0)) / spread)[-1]
    unit = [u / (np.linalg.norm(u, axis=1, keepdims=True) + 1e-30) for u in updates]
    aligned = unit[0][:fit].mean(0) - unit[1][:fit].mean(0)
    yield [u[fit:] @ direction for u in updates]
    yield [u[fit:, largest] for u in updates]
    yield [u[fit:] @ aligned for u in unit]
    # which rows of the word table moved at all
    yield [(np.abs(u[fit:]) > 0) @ (np.abs(first) > 0).mean(0) for u in updates]


def plain_setting(world):
    """The model as it is; one of five clicks differs."""
    return world.model(temperature=0.05), ([1, 2, 3, 4, 5], [1, 2, 3, 4, 12])


def worst_setting(world):
    """Basis vectors that send the two readers to two different corners: as far apart as attention can be."""
    model, histories = world.model(), ([1], [12])
    news = model.news_vectors(world.features)
    users = [np.array(model.encode_history(news, np.array([h + [0] * 4], "int32"))[1])[0] for h in histories]
    apart, middle = users[0] - users[1], (users[0] + users[1]) / 2
    # remove the part both share, so that the middle reader is undecided
    apart -= middle * (apart @ middle) / (middle @ middle)
    basis = np.stack([apart, -apart, -50 * middle / np.linalg.norm(middle) * np.linalg.norm(apart)])
    model.private_attention.basis.assign(basis * 60 / np.linalg.norm(apart) ** 2)
    attention = [np.array(model.private_attention(user[None]))[0] for user in users]
    assert attention[0][0] > 0.99 and attention[1][1] > 0.99
    return model, histories


def attack(world, kind, mechanism, draws_count, settings=(plain_setting, worst_setting)):
    """The largest lower bound on epsilon that any statistic finds, in any of the settings."""
    bounds = []
    for setting in settings:
        model, histories = setting(world)
        labels = LabelPermutation(math.inf, 3)
        update = kind(model, world.catalogue, mechanism, labels, world.length, 1)
        source = words.seeded(17)
        updates = [sent(update, history, world, draws_count, source) for history in histories]
        bounds += [bound_of(scores) for scores in statistics(updates, draws_count // 10)]
    return max(bounds)


def mechanism_of(calibration, epsilon=EPSILON):
    return AttentionMechanism(3, epsilon, DELTA, activation="relu", calibration=calibration)


@pytest.mark.slow
def test_ten_thousand_draws_break_the_published_update_and_not_the_corrected_one(world):
    published = attack(world, local.PublishedUpdate, mechanism_of(PublishedGaussian()), DRAWS)
    corrected = attack(world, local.PrivateUpdate, mechanism_of(AnalyticGaussian()), DRAWS)
    print(f"lower bounds on epsilon: published {published:.2f}, corrected {corrected:.2f}")
    assert published > EPSILON
    assert corrected <= EPSILON


@pytest.mark.slow
def test_a_thousand_draws_already_break_the_published_update(world):
    published = attack(world, local.PublishedUpdate, mechanism_of(PublishedGaussian()), 1000)
    corrected = attack(world, local.PrivateUpdate, mechanism_of(AnalyticGaussian()), 1000)
    assert corrected <= EPSILON < published


@pytest.mark.slow
def test_the_attack_sees_an_update_with_too_little_noise(world):
    """The corrected update with the noise of epsilon 20 does not pass for epsilon 1."""
    loud = mechanism_of(AnalyticGaussian(), 20.0)
    assert attack(world, local.PrivateUpdate, loud, 1000, [worst_setting]) > EPSILON
