"""Thirty days of one device, in training and in serving, with a catalogue that changes every day: ledger = truth.

The oracle knows what was clicked and what was drawn, by ids; of rows, catalogues and ledgers it knows nothing.
"""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.claim.profiles import epsilon_of_releases
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.datasets.mind.files import NewsCatalogue
from tfdp_rec.federated import AttentionMechanism, LabelPermutation, labels, local, serving
from tfdp_rec.federated.client import PrivateClient
from tfdp_rec.federated.cohort import Client
from tfdp_rec.federated.participant import DeviceTerms, Participant

DAYS, SHOWN = 30, 6
DELTA = 1e-5


class Press:
    """What is printed: some articles a day, most of which are gone some days later."""

    def __init__(self, seed):
        self.rng, self.printed = np.random.default_rng(seed), []

    def articles(self, day):
        """Today's new ones."""
        new = [f"day {day} article {number}" for number in range(int(self.rng.integers(SHOWN, 2 * SHOWN)))]
        self.printed += new
        return new

    def catalogue(self, new):
        """Grown, shrunk and put in another order: (ids, features)."""
        old = [news for news in self.printed if news not in new and self.rng.random() < self.rng.choice([0.1, 0.6])]
        ids = [*new, *old]
        self.rng.shuffle(ids)
        titles = self.rng.integers(2, 23, size=(len(ids) + 1, 4)).astype("int32")
        titles[0] = 0
        return ("", *ids), {"title": titles, "category": np.ones(len(ids) + 1, "int32")}


class Oracle:
    """What was told of each click, by what is released about ids."""

    def __init__(self):
        self.rounds, self.draws = Counter(), {}

    def worst(self):
        """Of the click that most was told of: all rounds, and the draws of its own label."""
        return max(epsilon_of_releases(dict(self.rounds + Counter(own)), DELTA) for own in self.draws.values())


def seen_draws(monkeypatch, seen):
    sample = labels.LabelPermutation.sample

    def watched(self, count, clicked, source=words.os_entropy):
        if self.epsilon < 100:
            seen.append(self.event)
        return sample(self, count, clicked, source)

    monkeypatch.setattr(labels.LabelPermutation, "sample", watched)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["candidates apart", "candidates that overlap"])
def test_thirty_days_of_training_are_in_the_ledger_as_they_were(overlap, world, tmp_path, monkeypatch):
    press, oracle, seen, model = Press(1), Oracle(), [], world.model()
    weights = [v.numpy() for v in model.trainable_variables]
    history, record, by_news, unknown = ["read before"], [], {}, 0
    seen_draws(monkeypatch, seen)
    tf.config.run_functions_eagerly(True)
    try:
        for day in range(DAYS):
            new = press.articles(day)
            ids, features = press.catalogue(new)
            catalogue = NewsCatalogue(ids, features, (), ("", "news"), ("",))
            shown = press.rng.choice(press.printed if overlap else new, SHOWN, replace=False).tolist()
            record.append((tuple(shown), int(press.rng.integers(SHOWN))))
            history.append(shown[record[-1][1]])
            # what the server asks for changes too
            mechanism = AttentionMechanism(3, float(press.rng.choice([1.0, 3.0])), 1e-5, padding=0.2, activation="relu")
            permutation = LabelPermutation(float(press.rng.choice([0.5, 2.0])), 3)
            update = local.PrivateUpdate(model, catalogue, mechanism, permutation, 40, 2)
            before, unknown = len(seen), unknown + sum(news not in ids for news in history)
            terms = DeviceTerms(tmp_path / "ledger.jsonl", 1e6)
            device = Participant(update, Client(tuple(history), tuple(record)), terms)
            device.answer(weights) if day % 6 == 5 else device.pay_round()
            oracle.rounds[mechanism.event] += 1
            drawn = seen[before:]
            assert drawn == [permutation.event], "one label a day: that of today's click, and no other once more"
            oracle.draws[day] = {permutation.event: 1}
            for news in shown:
                by_news.setdefault(news, Counter())[permutation.event] += 1
    finally:
        tf.config.run_functions_eagerly(False)
    found = read(tmp_path / "ledger.jsonl").epsilon(DELTA)
    together = max(epsilon_of_releases(dict(oracle.rounds + own), DELTA) for own in by_news.values())
    assert found == pytest.approx(together, rel=1e-3), "what overlaps pays together"
    assert oracle.worst() <= found * (1 + 1e-3)
    if not overlap:
        assert found == pytest.approx(oracle.worst(), rel=1e-3), "and what does not is the truth of the worst click"
    clicked = [news for shown, _ in record for news in shown]
    assert overlap == (max(Counter(clicked).values()) > 1) and unknown > 100


@pytest.mark.slow
def test_thirty_days_of_serving_are_in_the_ledger_as_they_were(world, tmp_path):
    press, mechanism = Press(2), AttentionMechanism(3, 2.0, 1e-5, padding=0.2)
    made, today = tmp_path / "made", tmp_path / "today"
    serving.export_client(world.model(), world.catalogue, made, mechanism, history_length=5, tflite=False)
    width = np.load(made / "news.npz")["vectors"].shape[1]
    clicks, told, unknown = [], Counter(), 0
    for day in range(DAYS):
        ids, _ = press.catalogue(press.articles(day))
        shutil.rmtree(today, ignore_errors=True)
        shutil.copytree(made, today)
        vectors = press.rng.normal(size=(len(ids), width)).astype("float32")
        np.savez(today / "news.npz", ids=np.array(ids), vectors=vectors)
        about = json.loads((today / "bundle.json").read_text())
        about["model"] = f"of the week {day // 7}"
        (today / "bundle.json").write_text(json.dumps(about))
        phone = PrivateClient(today, tmp_path / "ledger.jsonl", budget_epsilon=60.0)
        if day and day % 7 == 0:
            phone.attention()  # another model, the same clicks: another answer
            told.update(clicks[-5:])
        news = str(press.rng.choice(press.printed))
        unknown += news not in ids
        clicks.append((day, news))
        phone.record(news)
        first = phone.attention()
        assert np.array_equal(first, phone.attention())
        told.update(clicks[-5:])
        phone.close()
        assert first.std() > 0
    worst = epsilon_of_releases({mechanism.event: max(told.values())}, DELTA)
    assert read(tmp_path / "ledger.jsonl").epsilon(DELTA) == pytest.approx(worst, rel=1e-6)
    counts = Counter(item for paid in read(tmp_path / "ledger.jsonl").paid for item in paid.about)
    ids = [click[2] for click in json.loads((tmp_path / "ledger.jsonl.clicks").read_text())["clicks"]]
    assert {ids[day]: count for (day, _), count in told.items()} == counts, "each click by itself"
    assert 5 < unknown < 25, "many of the clicks were on news that were gone that day"
