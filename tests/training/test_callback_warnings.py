"""A private fit that nothing counts says so, once; one that is counted says nothing."""

import warnings

import pytest
from settling import batches, model_of

import tfdp_rec
from tfdp_rec.privacy import Accountant, Unaccounted


def said(fit):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit()
    return [str(w.message) for w in caught if "epsilon" in str(w.message)]


def sampling():
    return tfdp_rec.data.PoissonSampling(num_units=20, expected_batch_size=4)


def accountant_of(model, scheme):
    return Accountant(model.optimizer.dp_event(), scheme, delta=0.01, accountant="rdp")


def test_an_uncounted_fit_says_so_once():
    model = model_of()
    (word,) = said(lambda: model.fit(batches(), verbose=0))
    assert "Accountant(model.optimizer.dp_event(), sampling" in word and "PrivacyBudget(accountant" in word
    assert len(word) < 500 and word.endswith(".")
    assert not said(lambda: model.fit(batches(), verbose=0))


def test_an_accountant_that_follows_later_counts_what_was_made():
    """As the warning says; and of batches that nobody sampled, it says no epsilon."""
    model = model_of()
    assert said(lambda: model.fit(batches(), verbose=0))
    accountant = accountant_of(model, sampling())
    accountant.follow(model)
    assert accountant.steps == int(model.optimizer.iterations.numpy()) > 0
    with pytest.raises(Unaccounted):
        accountant.epsilon()


def test_one_that_is_followed_says_nothing():
    model = model_of()
    accountant_of(model, sampling()).follow(model)
    assert not said(lambda: model.fit(batches(), verbose=0))


def test_one_under_a_budget_says_nothing():
    model = model_of()
    secret = tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    model.compile(secret, loss="mse")
    accountant = accountant_of(model, sampling())
    accountant.asserted = "the tests"
    budget = tfdp_rec.callbacks.PrivacyBudget(accountant, target_epsilon=100.0)
    assert not said(lambda: model.fit(batches(), verbose=0, callbacks=[budget]))


@pytest.mark.parametrize("optimizer", ["EANA", "sgd"])
def test_what_claims_no_epsilon_says_nothing(optimizer):
    model = model_of(tfdp_rec.EANA) if optimizer == "EANA" else model_of()
    if optimizer == "sgd":
        model.compile("sgd", loss="mse")
    assert not said(lambda: model.fit(batches(), verbose=0))
