"""Looking for the worst neighbours by gradient ascent, and the whole serving mechanism on what was found."""

import itertools
import math

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from scipy import stats

from experiments.news.published import PublishedGaussian
from tfdp_rec.federated import AttentionMechanism
from tfdp_rec.federated.mechanism import l1_sensitivity, l2_sensitivity
from tfdp_rec.models import news
from tfdp_rec.models.news.layers import PrivateAttention

DIM = 6


class Searcher:
    """A random user encoder; histories are free vectors, neighbours differ in the first."""

    def __init__(self, num_basis, theta, seed, length=3):
        self.length = length
        seeding.seed(seed)
        self.encoder = news.user_encoder("nrms", DIM, 2, 4)
        self.attention = PrivateAttention(num_basis, theta)
        self.anonymous = tf.random.stateless_normal((1, DIM), (seed, 1))
        rng = np.random.default_rng(seed)
        self.first = tf.Variable(rng.normal(size=(1, length, DIM)), dtype=tf.float32)
        self.other = tf.Variable(rng.normal(size=(1, 1, DIM)), dtype=tf.float32)
        self.weights(self.first)
        self.attention.basis.assign(2 * tf.random.stateless_normal(self.attention.basis.shape, (seed, 2)))
        self.places = {}

    def weights(self, history):
        return self.attention(self.encoder(history))

    def neighbour(self):
        return tf.concat([self.other, self.first[:, 1:]], axis=1)

    def gap(self, order):
        difference = self.weights(self.first) - self.weights(self.neighbour())
        return tf.norm(difference, ord=order)

    def places_of(self, which, history):
        """Where a history of two basis vectors stands on the line x + y = 1, for each way to pad it."""
        if which not in self.places:
            masks = np.array([*itertools.product((False, True), repeat=self.length)])
            weights = self.weights(tf.where(masks[:, :, None], self.anonymous, history)).numpy()
            self.places[which] = masks, (weights[:, 0] - weights[:, 1]) / math.sqrt(2)
        return zip(*self.places[which])

    def ascend(self, order, steps=120):
        adam = keras.optimizers.Adam(0.2)
        variables = [keras.Variable(v) for v in (self.first, self.other)]
        self.first, self.other = (v.value for v in variables)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = -self.gap(order)
            gradients = tape.gradient(loss, [self.first, self.other])
            adam.apply_gradients(zip(gradients, variables))
            return -loss

        return max(float(step()) for _ in range(steps))


@pytest.mark.fast_cases("5-0.5-2")
@pytest.mark.parametrize("num_basis, theta, seed", ((3, 1.0, 1), (5, 0.5, 2)))
def test_gradient_ascent_reaches_but_never_exceeds_the_sensitivity(num_basis, theta, seed):
    found = Searcher(num_basis, theta, seed).ascend(2)
    assert found <= l2_sensitivity(theta) * (1 + 1e-5)
    assert found > 1.2 * theta, "the search is too weak to see that theta alone is not enough"
    absolute = Searcher(num_basis, theta, seed).ascend(1)
    assert absolute <= l1_sensitivity(num_basis, theta) * (1 + 1e-5)
    assert absolute > 1.2 * theta


def served_delta(mechanism, searcher, epsilon):
    """h_epsilon of the served vector before normalising, over every padding of both histories, B = 2, theta = 1.

    Attention lies on the line x + y = 1; noise across that line is the same for both histories and drops out.
    """
    scale, padding = mechanism.noise_scale, mechanism.padding
    grid = np.linspace(-9 * scale - 1, 9 * scale + 1, 20_001)
    densities = []
    for which, history in enumerate((searcher.first, searcher.neighbour())):
        density = np.zeros_like(grid)
        for mask, place in searcher.places_of(which, history):
            chance = np.prod(np.where(mask, padding, 1 - padding))
            density += chance * stats.norm.pdf(grid, place, scale)
        densities.append(density)
    one, two = densities
    step = grid[1] - grid[0]
    return max(np.maximum(0, a - math.exp(epsilon) * b).sum() * step for a, b in ((one, two), (two, one)))


@pytest.mark.parametrize("length", (1, 3))
def test_the_whole_serving_mechanism_keeps_its_promise_on_the_worst_histories(length):
    """Of a single click, the worst case is an anonymous news that looks like the other click."""
    searcher = Searcher(2, 1.0, 7, length)
    assert searcher.ascend(2) > 1.4
    if length == 1:
        searcher.anonymous = searcher.other[:, 0]
    for epsilon, delta, padding in itertools.product((0.1, 1.0, 5.0, 10.0), (1e-5, 1e-3), (0.0, 0.2, 0.5)):
        private = AttentionMechanism(2, epsilon, delta, padding=padding)
        assert served_delta(private, searcher, epsilon) <= delta * (1 + 1e-3)
        published = AttentionMechanism(2, epsilon, delta, padding=padding, calibration=PublishedGaussian())
        if epsilon >= 5.0 and delta == 1e-5 and (length == 1 or padding == 0.0):
            assert served_delta(published, searcher, epsilon) > 10 * delta


def plane_delta(points, padding, scale, epsilon):
    """h_epsilon(padding N(a) + (1-padding) N(m) | padding N(a) + (1-padding) N(n)) on the plane of a, m, n."""
    origin, *others = points
    basis = np.linalg.qr(np.stack([o - origin for o in others], axis=1))[0][:, :2]
    anonymous, one, two = ((p - origin) @ basis for p in points)
    axis = np.linspace(-7 * scale - 1.5, 7 * scale + 1.5, 700)
    x = np.stack(np.meshgrid(axis, axis), axis=-1)

    def density(center):
        return np.exp(-((x - center) ** 2).sum(-1) / (2 * scale**2)) / (2 * math.pi * scale**2)

    shared = padding * density(anonymous)
    excess = (1 - padding) * (density(one) - math.exp(epsilon) * density(two)) - math.expm1(epsilon) * shared
    return np.maximum(0, excess).sum() * (axis[1] - axis[0]) ** 2


@pytest.mark.fast_cases("0.5-5")
@pytest.mark.parametrize("num_basis", (3, 5))
@pytest.mark.parametrize("theta", (0.5, 1.0))
def test_any_three_attention_vectors_keep_the_promise(num_basis, theta):
    """The anonymous news, the click and the other click may give any three vectors of K."""
    from tfdp_rec.federated.mechanism import clip

    rng = np.random.default_rng(num_basis)
    corners = clip(np.eye(num_basis), theta)
    triples = [corners[[0, 1, 2]], *(clip(rng.dirichlet(np.full(num_basis, 0.2), 3), theta) for _ in range(3))]
    caught = False
    for epsilon, delta, padding in ((1.0, 1e-3, 0.2), (5.0, 1e-5, 0.5), (10.0, 1e-5, 0.2)):
        private = AttentionMechanism(num_basis, epsilon, delta, theta, padding)
        published = AttentionMechanism(num_basis, epsilon, delta, theta, padding, calibration=PublishedGaussian())
        for triple in triples:
            assert plane_delta(triple, padding, private.noise_scale, epsilon) <= delta * 1.01
            caught |= plane_delta(triple, padding, published.noise_scale, epsilon) > delta * 1.01
    assert caught
