"""Local updates: what they may depend on, what they send, and cohorts against single clients."""

import dataclasses
import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from catalogues import named
from scipy import stats

from experiments.news.published import PublishedLabelPermutation
from tfdp_rec.core.claim.profiles import gaussian_delta
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated import AttentionMechanism, ClientAccountant, LabelPermutation, grid, local, vector
from tfdp_rec.federated import mechanism as mechanism_module
from tfdp_rec.federated.cohort import Client, Draws, client_of, with_private_labels
from tfdp_rec.federated.simulation import FedAdam, Simulation
from tfdp_rec.federated.vector import PureVectorMechanism, VectorMechanism

PRIVATE = AttentionMechanism(3, 5.0, 1e-5, padding=0.2, activation="relu")
OFF = AttentionMechanism(3, math.inf, activation="relu")


@functools.cache
def shared_model(world):
    return world.model()


@functools.cache
def shared_update(world, kind, mechanism, labels, settings):
    """One update per setting for all tests: tracing is what takes the time."""
    return kind(shared_model(world), world.catalogue, mechanism, labels, world.length, world.samples, **dict(settings))


def update_of(world, kind, mechanism=PRIVATE, labels=None, **settings):
    return shared_update(world, kind, mechanism, labels or LabelPermutation(2.0, 3), tuple(settings.items()))


def fresh_update(world, kind, mechanism=PRIVATE, labels=None, **settings):
    labels = labels or LabelPermutation(2.0, 3)
    return kind(world.model(), world.catalogue, mechanism, labels, world.length, world.samples, **settings)


def kinds(epsilon=5.0):
    return {
        "private": (local.PrivateUpdate, {}),
        "user gradient": (local.PrivateUpdate, {"user_gradient": VectorMechanism(0.1, epsilon)}),
        "published": (local.PublishedUpdate, {}),
        "gradient": (local.GradientUpdate, {"noise": VectorMechanism(0.1, epsilon)}),
        "pure gradient": (local.GradientUpdate, {"noise": PureVectorMechanism(0.1, epsilon)}),
    }


def silence(patch):
    for module in (vector, mechanism_module):
        for name in ("whole_gaussian", "whole_laplace"):
            patch.setattr(module, name, lambda scale, source, shape: np.zeros(shape))


def one_of(draws, index):
    return Draws(**{f.name: getattr(draws, f.name)[index : index + 1] for f in dataclasses.fields(draws)})


def by_name(update, gradients):
    return {v.path.partition("/")[2]: g for v, g in zip(update.model.trainable_variables, gradients)}


@pytest.mark.parametrize("name", kinds())
def test_a_cohort_sends_the_mean_of_its_clients(world, name, monkeypatch, eagerly):
    silence(monkeypatch)
    kind, settings = kinds()[name]
    update = update_of(world, kind, **settings)
    draws = update.draw(world.clients[:3], words.seeded(2))
    together, loss = update.gradients(draws)
    singly = [update.gradients(one_of(draws, i)) for i in range(3)]
    assert loss == pytest.approx(np.mean([s[1] for s in singly]), rel=1e-5)
    for index, gradient in enumerate(together):
        np.testing.assert_allclose(gradient, np.mean([s[0][index] for s in singly], axis=0), atol=2e-6)
    assert max(np.abs(g).max() for g in together) > 1e-3


@pytest.mark.slow
def test_the_corrected_update_is_a_function_of_the_released_attention_alone(world, monkeypatch):
    """Two different histories, the same released attention: not one bit of the update differs."""
    update = update_of(world, local.PrivateUpdate)
    draws = update.draw(world.clients[:1], words.seeded(3))
    other = dataclasses.replace(draws, history=draws.history[:, ::-1] % 12 + 1)
    released = PRIVATE.release(np.array([[0.5, 0.3, 0.2]]), words.seeded(1))
    monkeypatch.setattr(AttentionMechanism, "finish", lambda *arguments: released)
    first, second = update.gradients(draws)[0], update.gradients(other)[0]
    assert all(np.array_equal(a, b) for a, b in zip(first, second))
    published = update_of(world, local.PublishedUpdate)
    first, second = published.gradients(draws)[0], published.gradients(other)[0]
    assert not all(np.array_equal(a, b) for a, b in zip(first, second))


@pytest.mark.slow
def test_the_corrected_update_leaves_the_user_encoder_alone_unless_its_gradient_is_noised(world):
    plain = update_of(world, local.PrivateUpdate)
    draws = plain.draw(world.clients, words.seeded(2))
    for path, gradient in by_name(plain, plain.gradients(draws)[0]).items():
        assert ("user_encoder" in path) == (not gradient.any()), path
    noised = update_of(world, local.PrivateUpdate, user_gradient=VectorMechanism(0.1, 5.0))
    for path, gradient in by_name(noised, noised.gradients(draws)[0]).items():
        assert gradient.any(), path


def test_the_basis_gradient_is_the_slope_of_the_loss_at_a_fixed_attention(world):
    update = update_of(world, local.PrivateUpdate)
    draws = update.draw(world.clients, words.seeded(2))
    model = update.model
    news = np.array(model.news_vectors(world.features), dtype=np.float64)
    weights = np.array(model.encode_history(news.astype("float32"), draws.history, draws.padded)[0])
    released = PRIVATE.finish(weights, draws.noise)

    def loss(basis):
        scores = np.einsum("md,mskd->msk", released @ basis, news[draws.samples])
        return (np.log(np.exp(scores).sum(-1)) - scores[..., 0]).mean()

    basis = np.array(model.private_attention.basis, dtype=np.float64)
    slopes = np.zeros_like(basis)
    for place in np.ndindex(basis.shape):
        step = np.zeros_like(basis)
        step[place] = 1e-5
        slopes[place] = (loss(basis + step) - loss(basis - step)) / 2e-5
    found = by_name(update, update.gradients(draws)[0])["private_attention/basis"]
    np.testing.assert_allclose(found, slopes, atol=2e-6)


@pytest.mark.parametrize("clip", (1e-3, 1e3))
@pytest.mark.parametrize("kind", (VectorMechanism, PureVectorMechanism))
def test_a_clients_gradient_is_clipped_and_noised_to_scale(world, kind, clip, eagerly):
    noise = kind(clip, 5.0)
    update = update_of(world, local.GradientUpdate, OFF, noise=noise)
    draws = update.draw(world.clients[:1], words.seeded(2))
    sent = np.concatenate([g.ravel() for g in update.gradients(draws, words.seeded(9))[0]])
    again = np.concatenate([g.ravel() for g in update.gradients(draws, words.seeded(10))[0]])
    spread = (sent - again).std() / math.sqrt(2)
    assert spread == pytest.approx(noise.scale * (math.sqrt(2) if kind is PureVectorMechanism else 1), rel=0.12)
    plain = update_of(world, local.GradientUpdate, OFF, noise=kind(clip, math.inf))
    raw = np.concatenate([g.ravel() for g in plain.gradients(draws)[0]])
    expected = raw * min(1.0, clip / np.linalg.norm(raw, ord=noise.order))
    sums = update._singly(draws.history, draws.samples, draws.counted)[0]
    silent = np.concatenate([g.ravel() for g in local.average_with_noise(kind(clip, math.inf), sums, 1)])
    np.testing.assert_allclose(silent, expected, rtol=1e-3, atol=1e-6 + noise.grid)


@pytest.mark.parametrize("kind", (VectorMechanism, PureVectorMechanism))
def test_clipped_vectors_are_no_further_apart_than_the_noise_is_for(kind, monkeypatch):
    """Opposite vectors reach 2C; the noise of each mechanism is exactly what that distance needs."""
    mechanism = kind(0.3, 2.0)
    wild = np.random.default_rng(1).normal(size=(300, 6)) * 10.0 ** np.arange(-3, 3)
    with monkeypatch.context() as patched:
        silence(patched)
        clipped = mechanism.release(wild)
    gaps = np.linalg.norm(clipped[:, None] - clipped[None], ord=mechanism.order, axis=-1)
    assert 1.5 * 0.3 < gaps.max() <= 2 * 0.3 * (1 + 1e-9)
    sensitivity = 2 * 0.3
    if kind is PureVectorMechanism:
        assert sensitivity / mechanism.scale == pytest.approx(2.0)
    else:
        assert gaussian_delta(2.0, sensitivity, mechanism.scale) == pytest.approx(1e-5, rel=1e-4)


@pytest.mark.parametrize("kind", (VectorMechanism, PureVectorMechanism))
@pytest.mark.parametrize("size", (1e-25, 1e-15, 1.0, 1e15, 1e30))
def test_a_clipped_gradient_is_never_longer_than_the_clip_whatever_its_size(kind, size):
    noise, rng = kind(1e-6, 5.0), np.random.default_rng(3)
    for count in (3, 1_000, 100_000):
        whole = (size * rng.normal(size=(1, count))).astype("float32")
        weights = keras.Variable(np.zeros(count, "float32"))
        losses = functools.partial(tf.linalg.matvec, b=weights.value)
        sums, _ = local.clip_and_sum(losses, (whole,), [weights], noise)
        norm = np.linalg.norm(np.asarray(sums[0], "float64"), ord=noise.order)
        expected = min(noise.clip, np.linalg.norm(np.asarray(whole[0], "float64"), ord=noise.order))
        rounded = noise.grid * count ** (1 / noise.order)
        assert expected * (1 - 1e-5) - rounded <= norm <= expected


@pytest.mark.parametrize("kind", (VectorMechanism, PureVectorMechanism))
def test_clips_so_small_that_norms_vanish_are_refused(kind):
    """At C = 1e-26 gradients of 1e-21 were sent 400,000 times too long: their squares are zero in float32."""
    with pytest.raises(ValueError, match="at least 1e-06"):
        kind(1e-26, 5.0)


@pytest.mark.parametrize("kind", (VectorMechanism, PureVectorMechanism))
def test_the_noise_of_a_sum_is_that_of_separate_releases(kind):
    mechanism, count = kind(0.5, 3.0), 5
    together = mechanism.sum_noise(count, (40_000,), words.seeded(3))
    apart = np.sum([mechanism.sum_noise(1, (40_000,), words.seeded(10 + i)) for i in range(count)], axis=0)
    assert stats.ks_2samp(together, apart).pvalue > 1e-6
    assert stats.ks_2samp(together * 1.1, apart).pvalue < 1e-6


@pytest.mark.parametrize("clip", (1.0, 0.3))
@pytest.mark.parametrize("kind", (VectorMechanism, PureVectorMechanism))
def test_what_is_released_is_on_a_grid_that_tells_nothing_of_the_data(kind, clip):
    """Where data and noise met in floats, 15% of the outputs near 0 of x = 0 were none of x = 1."""
    mechanism = kind(clip, 2.0)
    assert 2**20 <= mechanism.scale / mechanism.grid < 2**21 and math.frexp(mechanism.grid)[0] == 0.5
    near = []
    for x in (np.zeros(100_000), np.ones(100_000), np.random.default_rng(2).normal(size=100_000)):
        steps = mechanism.release(x[:, None], words.seeded(5)) / mechanism.grid
        assert np.array_equal(steps, np.floor(steps))
        assert not np.signbit(steps[steps == 0]).any(), "a zero has no sign either"
        near.append(steps[np.abs(steps) < 2**18].astype(np.int64) % 8)
        whole = mechanism.grid * np.trunc(x / mechanism.grid)
        sent = local.average_with_noise(mechanism, [whole], 1, words.seeded(5))[0]
        assert np.array_equal(sent / mechanism.grid, np.floor(sent / mechanism.grid)), "in float32, too"
    for low in near:  # every step is as likely as those beside it
        assert stats.chisquare(np.bincount(low, minlength=8)).pvalue > 1e-6


@pytest.mark.parametrize("kind", (VectorMechanism, PureVectorMechanism))
def test_gradients_are_on_the_grid_before_they_are_added_up(kind):
    """Rounded as a sum, one client could move it by more steps than its clip is long."""
    noise, rng = kind(1.0, 5.0), np.random.default_rng(3)
    whole, weights = rng.normal(size=(7, 50)).astype("float32"), keras.Variable(np.zeros(50, "float32"))
    losses = functools.partial(tf.linalg.matvec, b=weights.value)
    singly = [local.clip_and_sum(losses, (whole[i : i + 1],), [weights], noise)[0][0] for i in range(7)]
    assert all(np.array_equal(np.trunc(g / noise.grid), g / noise.grid) for g in singly)
    together = local.clip_and_sum(losses, (whole,), [weights], noise)[0][0]
    assert together.dtype == tf.float64 and np.array_equal(together, sum(singly))


@pytest.mark.parametrize("kind", (VectorMechanism, PureVectorMechanism))
def test_a_release_has_the_noise_that_is_paid_for(kind):
    """By its distribution; a scale that is wrong by 6% is noticed."""
    mechanism = kind(0.5, 3.0)
    law = (stats.laplace if kind is PureVectorMechanism else stats.norm)(scale=mechanism.scale)
    noise = mechanism.release(np.full((100_000, 1), 0.25), words.seeded(8))[:, 0] - 0.25
    assert stats.kstest(noise, law.cdf).pvalue > 1e-6
    for wrong in (0.94, 1.06):
        assert stats.kstest(wrong * noise, law.cdf).pvalue < 1e-6


def test_whole_laplace_noise_reaches_every_step_and_far_out():
    """Of the lowest words and the highest: no step is out of reach, and the largest is 45 scales away."""
    scale = 1.5 * 2**20
    digits = grid._digit(np.arange(2**20, dtype=np.uint64) << np.uint64(44), scale)
    assert np.array_equal(np.unique(digits), np.arange(1024))
    far = grid.whole_laplace(scale, lambda count: np.array([1, 2**64 - 1, 2**64 - 1, 0], np.uint64), (1,))
    assert 44 * scale < far < 46 * scale


def test_a_gradient_that_is_not_finite_counts_as_zero(world, eagerly):
    update = fresh_update(world, local.GradientUpdate, OFF, noise=VectorMechanism(1.0, 5.0))
    variable = update.model.user_encoder.trainable_variables[0]
    variable.assign(np.full(variable.shape, np.nan, "float32"))
    draws = update.draw(world.clients[:2], words.seeded(2))
    assert all(np.isfinite(g).all() for g in update.gradients(draws, words.seeded(1))[0])


def test_accounts_of_every_form(world):
    client = world.clients[0]
    totals = {}
    for name, (kind, settings) in kinds().items():
        accountant = ClientAccountant()
        update_of(world, kind, **settings).charge(client, accountant)
        totals[name] = accountant.epsilon(1e-5, disjoint=True)
    assert totals["private"] == pytest.approx(5.0, rel=1e-3)
    assert 5.1 < totals["user gradient"] < 10.0
    assert totals["published"] == math.inf
    assert totals["gradient"] == pytest.approx(5.0, rel=1e-3)
    assert totals["pure gradient"] == pytest.approx(5.0, rel=1e-3)


def test_declared_categories_are_neither_padded_nor_relabelled_and_spend_nothing(world):
    declared = frozenset(named(*range(1, 7)))
    free = Client(named(1, 2, 3), ((named(1, 2, 3, 8, 9, 10), 1),), declared)
    mixed = Client(named(1, 2, 8), ((named(1, 2, 3, 8, 9, 10), 1),), declared)
    mechanism = AttentionMechanism(3, 0.1, 1e-5, padding=0.6)
    update = update_of(world, local.PrivateUpdate, mechanism, LabelPermutation(0.01, 3))
    source = words.seeded(1)
    many = [update.draw([free, mixed], source) for _ in range(60)]
    assert not any(d.noise[0].any() or d.padded[0].any() for d in many)
    assert all(d.noise[1].any() for d in many)
    assert not any(d.padded[1, :2].any() for d in many) and any(d.padded[1, 2] for d in many)
    assert all((d.samples[:, 0, 0] == 2).all() for d in many)
    accountant = ClientAccountant()
    update.charge(free, accountant)
    assert accountant.epsilon(1e-5) == 0.0


def test_every_round_and_every_client_pads_anew(world):
    update = update_of(world, local.PrivateUpdate, dataclasses.replace(PRIVATE, padding=0.5))
    padded = np.array([update.draw(world.clients, words.os_entropy).padded for _ in range(60)])
    assert len(np.unique(padded.reshape(60, -1), axis=0)) >= 59  # of 30 coins each
    counts = padded.sum(0)
    assert ((counts > 4) & (counts < 56)).all(), "every position is padded in some rounds and not in others"
    assert sum(len(np.unique(rounds, axis=0)) == 1 for rounds in padded) <= 1


def test_labels_drawn_once_are_kept_and_paid_once(world):
    labels = LabelPermutation(0.01, 3)
    clients = [with_private_labels(client, labels, words.seeded(i)) for i, client in enumerate(world.clients)]
    assert all(client.label_epsilon == math.inf for client in clients), "a seed's labels can be drawn again"
    clients = [dataclasses.replace(client, label_epsilon=0.01) for client in clients]
    moved = [a != b for c, d in zip(world.clients, clients) for a, b in zip(c.clicks, d.clicks)]
    assert sum(moved) > len(moved) / 2
    update = update_of(world, local.PrivateUpdate, PRIVATE, labels)
    source = words.seeded(1)
    first = [update.draw(clients, source).samples for _ in range(5)]
    assert all(np.array_equal(samples[..., 0], first[0][..., 0]) for samples in first)
    assert not all(np.array_equal(samples, first[0]) for samples in first), "negatives are drawn anew"
    simulation = Simulation(fresh_update(world, local.PrivateUpdate, PRIVATE, labels), clients, 6)
    simulation.run(3)
    history = ClientAccountant()
    history.spend_history(PRIVATE.event, 3)
    assert simulation.client_epsilon(0, 1e-5) == pytest.approx(history.epsilon(1e-5))
    whole = ClientAccountant()
    simulation.update.charge(clients[0], whole, 3)
    both = whole.epsilon(1e-5)
    assert history.epsilon(1e-5) < both <= history.epsilon(1e-5) + 0.011
    with pytest.raises(ValueError, match="already"):
        with_private_labels(clients[0], labels)


def test_fedadam_follows_its_formula_by_hand():
    adam = FedAdam(eta=0.1, eta_l=2.0, beta_1=0.5, beta_2=0.75, tau=0.01)
    weights = adam.apply([np.array([1.0])], [np.array([0.3])], 1)
    m, v = 0.5 * -0.6, 0.25 * 0.36
    rate = 0.1 * math.sqrt(1 - 0.75**2) / (1 - 0.5**2)
    assert weights[0][0] == pytest.approx(1 + rate * m / (math.sqrt(v) + 0.01))
    second = adam.apply(weights, [np.array([0.1])], 2)
    m, v = 0.5 * m + 0.5 * -0.2, 0.75 * v + 0.25 * 0.04
    rate = 0.1 * math.sqrt(1 - 0.75**3) / (1 - 0.5**3)
    assert second[0][0] == pytest.approx(weights[0][0] + rate * m / (math.sqrt(v) + 0.01))


@pytest.mark.slow
def test_a_simulation_learns_and_charges_who_answered(world):
    update = fresh_update(world, local.PrivateUpdate, OFF, LabelPermutation(math.inf, 3))
    simulation = Simulation(update, world.clients, 3, FedAdam(eta=0.02, tau=1e-4))
    simulation.run(40)
    simulation.run(20)
    assert len(simulation.losses) == 60
    assert np.mean(simulation.losses[-10:]) < np.mean(simulation.losses[:10]) - 0.1
    assert simulation.answers.sum() == 180
    assert simulation.worst_epsilon(1e-5) == math.inf
    private = Simulation(fresh_update(world, local.PrivateUpdate), world.clients, 6)
    private.run(2)
    accountant = ClientAccountant()
    accountant.spend_history(PRIVATE.event, 2)
    accountant.spend_labels(LabelPermutation(2.0).event, 2)
    assert private.worst_epsilon(1e-5) == pytest.approx(accountant.epsilon(1e-5, disjoint=True))
    assert private.worst_epsilon(1e-5) > 5.5
    private.source = words.seeded(3)
    assert private.worst_epsilon(1e-5) == math.inf, "a seed's noise can be drawn again"


def test_the_most_that_a_client_has_spent_is_not_that_of_one_who_pays_less_for_an_answer(world):
    update = fresh_update(world, local.PrivateUpdate, PRIVATE, LabelPermutation(0.1, 3))
    new = dataclasses.replace(world.clients[0], history=())  # a client without a history pays for labels alone
    simulation = Simulation(update, [new, *world.clients], 3)
    simulation.answers[:] = [9, 8, *[7] * (len(world.clients) - 1)]
    spent = [simulation.client_epsilon(i, 1e-5) for i in range(len(simulation.clients))]
    assert spent[0] < spent[1] == max(spent) == simulation.worst_epsilon(1e-5)


def test_a_round_that_is_cut_off_while_it_is_written_is_counted(world, monkeypatch):
    simulation = Simulation(fresh_update(world, local.PrivateUpdate), world.clients, 3)

    def cut(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulation.optimizer, "apply", cut)
    with pytest.raises(KeyboardInterrupt):
        simulation.run(1)
    assert simulation.answers.sum() == 3


def test_labels_drawn_once_by_a_permutation_that_does_not_hold_have_no_bound(world):
    labels = PublishedLabelPermutation(0.1, 3)
    client = with_private_labels(world.clients[0], labels)
    accountant = ClientAccountant()
    update_of(world, local.PrivateUpdate).charge(client, accountant)
    assert client.label_epsilon == math.inf == accountant.epsilon(1e-5)


def test_no_client_answers_more_often_than_it_may(world):
    update = fresh_update(world, local.PrivateUpdate)
    with pytest.raises(ValueError, match="most_answers must be at least 1"):
        Simulation(update, world.clients, 4, most_answers=0)
    simulation = Simulation(update, world.clients, 4, most_answers=2)
    simulation.run(2)
    with pytest.raises(ValueError, match="fewer than 2 times"):
        simulation.run(2)
    assert simulation.answers.max() == 2
    accountant = ClientAccountant()
    accountant.spend_history(PRIVATE.event, 2)
    accountant.spend_labels(LabelPermutation(2.0).event, 2)
    assert simulation.worst_epsilon(1e-5) == pytest.approx(accountant.epsilon(1e-5, disjoint=True))


def test_arguments_that_do_not_fit_are_refused(world):
    with pytest.raises(ValueError, match="num_basis"):
        update_of(world, local.PrivateUpdate, AttentionMechanism(4, 1.0))
    with pytest.raises(ValueError, match="cohort_size"):
        Simulation(update_of(world, local.PrivateUpdate), world.clients, 7)
    for sizes in ((10**6, 2), (0, 2), (5, 0), (5, 10**4)):
        with pytest.raises(ValueError, match="at most 10,000 news|at least 1"):
            local.PrivateUpdate(shared_model(world), world.catalogue, PRIVATE, LabelPermutation(2.0, 3), *sizes)
    with pytest.raises(ValueError, match="impressions"):
        client_of([])
    for name, change in (("l2_norm_clip", (0.0, 1.0)), ("epsilon", (1.0, 0.0)), ("delta", (1.0, 1.0, 0.0))):
        with pytest.raises(ValueError, match=name):
            VectorMechanism(*change)
    for name, change in (("l1_norm_clip", (math.inf, 1.0)), ("epsilon", (1.0, -1.0))):
        with pytest.raises(ValueError, match=name):
            PureVectorMechanism(*change)
