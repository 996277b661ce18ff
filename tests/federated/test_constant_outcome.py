"""Whether, and how soon, a device answers a round tells nothing of its clicks, whatever model the server sends.

Two devices differ in one click of their history. A server that wants to know which is which sends models that are made
for that one news: whose words are no numbers, infinite, huge, or too small for ordinary arithmetic.
"""

import time

import numpy as np
import pytest
import seeding
from catalogues import catalogue_of, named
from scipy import stats

from tfdp_rec.federated import AttentionMechanism, LabelPermutation, local
from tfdp_rec.federated.cohort import Client
from tfdp_rec.federated.participant import DeviceTerms, Participant
from tfdp_rec.federated.vector import VectorMechanism

NEWS, WORDS, TITLE, LENGTH, DIM = 80, 400, 12, 20, 64
TARGET, OTHER = 7, 8  # the news that is asked for, and the one that the second device clicked in its place
KINDS = {
    "private": (local.PrivateUpdate, {}),
    "private+user": (local.PrivateUpdate, {"user_gradient": VectorMechanism(0.1, 2.0)}),
    "gradient": (local.GradientUpdate, {"noise": VectorMechanism(0.1, 2.0)}),
}


def catalogue():
    """Every news has words of its own."""
    words = 2 + np.arange((NEWS - 1) * 5).reshape(NEWS - 1, 5)
    titles = np.concatenate([np.zeros([1, TITLE], "int64"), np.tile(words, 3)[:, :TITLE]])
    return {"title": titles.astype("int32")}


def device(target, update, folder, method):
    """One with or without the news that is asked for, alike in all else."""
    rng = np.random.default_rng(1)
    history = [*rng.integers(10, NEWS, LENGTH - 1).tolist()]
    history.insert(12, target)
    shown = tuple((tuple(range(20 + 8 * i, 28 + 8 * i)), int(rng.integers(8))) for i in range(4))
    terms = DeviceTerms(folder / f"{method}-{target}.jsonl", float("inf"), methods=(method,))
    clicks = tuple((named(*rows), click) for rows, click in shown)
    return Participant(update, Client(named(*history), clicks), terms, method)


def new_model():
    from tfdp_rec.models import news

    seeding.seed(0)
    model = news.NewsRecommender(
        news.NRMSEncoder(WORDS, 32, DIM, num_heads=4, attention_units=32), news.user_encoder("nrms", DIM, 4, 32), 5
    )
    ones = {"history": np.ones((1, LENGTH), "int32"), "candidates": np.ones((1, 3), "int32")}
    model({"news": catalogue(), **ones})
    return model


def adversarial(model, features):
    """Weights by name: the model's, and those that are made for the words of one news."""
    plain = [np.asarray(w) for w in model.trainable_variables]
    (words,) = [i for i, v in enumerate(model.trainable_variables) if v.shape == (WORDS, 32)]

    def with_rows(value):
        weights = [w.copy() for w in plain]
        weights[words][features["title"][TARGET]] = value
        return weights

    values = {"no number": np.nan, "infinite": np.inf, "huge": 3e38, "large": 1e15, "tiny": 1e-42, "zero": 0.0}
    found = {name: with_rows(value) for name, value in values.items()}
    return {"plain": plain, **found, "all tiny": [w * np.float32(1e-38) for w in plain]}


def answered(device, weights):
    """Whether the answer is of the same form, and the seconds it took (of the clock, of the processor)."""
    began = time.perf_counter(), time.process_time()
    answer = device.answer(weights)
    ended = time.perf_counter(), time.process_time()
    whole = [a.shape == w.shape and a.dtype == w.dtype for a, w in zip(answer, weights, strict=True)]
    return all(whole), ended[0] - began[0], ended[1] - began[1]


def rounds(kind, number, folder):
    """Answers `[number, 2 devices]` and seconds `[number, 2 devices, 2 clocks]` of rounds with models that change."""
    features, model = catalogue(), new_model()
    update_class, options = KINDS[kind]
    mechanism = AttentionMechanism(5, 8.0, 1e-5, padding=0.2, activation="relu")
    update = update_class(model, catalogue_of(features), mechanism, LabelPermutation(8.0, 3), LENGTH, 4, **options)
    models = list(adversarial(model, features).values())
    devices = [device(target, update, folder, kind) for target in (TARGET, OTHER)]
    rng = np.random.default_rng(2)
    for weights in models:
        for each in devices:
            answered(each, weights)
    answers, seconds = np.zeros([number, 2], bool), np.zeros([number, 2, 2])
    for index in range(number):
        weights = models[rng.integers(len(models))]
        for side in rng.permutation(2):
            answers[index, side], *seconds[index, side] = answered(devices[side], weights)
    return answers, seconds


def told_apart(seconds):
    """The p-values of three tests of two samples `[rounds, 2]`; the last looks at each round by itself."""
    first, second = seconds.T
    found = stats.ks_2samp(first, second), stats.mannwhitneyu(first, second), stats.wilcoxon(first, second)
    return np.array([each.pvalue for each in found])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_neither_answers_nor_their_times_tell_what_was_clicked(kind, tmp_path, capsys):
    """At p < 1e-3, and then once more at that, so that a false alarm is one in a hundred thousand."""
    for attempt in range(2):
        (tmp_path / str(attempt)).mkdir()
        answers, seconds = rounds(kind, 1000, tmp_path / str(attempt))
        assert answers.all()
        found = np.array([told_apart(clock) for clock in np.moveaxis(seconds, 2, 0)])
        noticed = np.array([told_apart(clock * [1.1, 1]).min() for clock in np.moveaxis(seconds, 2, 0)])
        with capsys.disabled():
            medians = np.median(seconds, axis=0).T * 1000
            for name, values, p in zip(("clock", "processor"), medians, found):
                print(f"\n{kind}, {name}: {values.round(2)} ms, p = {p.round(4)} (KS, Mann-Whitney, Wilcoxon)", end="")
        assert noticed.min() < 1e-3, "a tenth more for one of them would be noticed"
        if found.min() >= 1e-3:
            return
    raise AssertionError(f"told apart twice: {found}")
