"""A device in training: what it pays, what it refuses, and that neither depends on what was clicked."""

import dataclasses
import datetime
import json
import math

import numpy as np
import pytest
from catalogues import catalogue_of, named
from dp_accounting import GaussianDpEvent
from scipy import stats

from experiments.news.published import PublishedLabelPermutation
from tfdp_rec.core.claim.events import REPLACE, PureDpEvent
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.datasets.mind.files import Impression
from tfdp_rec.federated import AttentionMechanism, ClientAccountant, LabelPermutation, local
from tfdp_rec.federated.accounting import UNIT
from tfdp_rec.federated.cohort import Client, client_of, draw
from tfdp_rec.federated.participant import DATA, BudgetSpent, DeviceTerms, Participant, Refused
from tfdp_rec.federated.vector import VectorMechanism
from tfdp_rec.privacy import BrokenLedger, Ledger

TWO = ((named(1, 2, 3, 4, 5, 6), 0), (named(7, 8, 9, 10, 11, 12), 1))


@pytest.fixture(scope="module")
def model(world):
    return world.model()


@pytest.fixture
def update(world, model):
    def make(epsilon=8.0, label=8.0, kind=local.PrivateUpdate, features=None, labels=LabelPermutation, **more):
        attention = AttentionMechanism(3, epsilon, 1e-5, padding=0.2, activation="relu")
        catalogue = world.catalogue if features is None else catalogue_of(features)
        return kind(model, catalogue, attention, labels(label, 3), world.length, world.samples, **more)

    return make


def allows(tmp_path, budget=math.inf, **terms):
    return DeviceTerms(tmp_path / "ledger.jsonl", budget, **terms)


def test_every_round_keeps_its_own_price(update, world, tmp_path):
    """Rounds at ε 18, 9, 6 ... 1.5 under a budget of 20: what was granted is what it really cost."""
    true, granted = ClientAccountant(), 0
    for epsilon in (18, 9, 6, 4.5, 3.6, 3, 2.6, 2.2, 2.0, 1.8, 1.65, 1.5):
        chosen = update(epsilon, label=0.5)
        try:
            Participant(chosen, world.clients[0], allows(tmp_path, 20.0)).pay_round()
        except BudgetSpent:
            continue
        granted += 1
        true.spend_history(chosen.mechanism.event)
    true.spend_labels(PureDpEvent(0.5))
    assert true.epsilon(1e-5) <= 20 and granted >= 1
    assert read(tmp_path / "ledger.jsonl").epsilon(1e-5) == pytest.approx(true.epsilon(1e-5), rel=1e-3)


def test_raw_gradients_are_never_forgotten(update, world, tmp_path):
    raw = update(kind=local.GradientUpdate, noise=VectorMechanism(0.1, math.inf))
    terms = allows(tmp_path, methods=("private", "gradient"))
    Participant(raw, world.clients[0], terms, "gradient").pay_round()
    Participant(update(), world.clients[0], terms).pay_round()
    assert read(tmp_path / "ledger.jsonl").epsilon(1e-5) == math.inf
    with pytest.raises(BudgetSpent):
        Participant(update(), world.clients[0], allows(tmp_path, 1e6)).pay_round()


def test_a_click_that_is_a_label_and_history_pays_for_both(update, world, tmp_path):
    chosen = update(8.0, label=8.0)
    Participant(chosen, world.clients[0], allows(tmp_path)).pay_round()
    true = ClientAccountant()
    true.spend_history(chosen.mechanism.event)
    true.spend_labels(chosen.labels.event)
    assert read(tmp_path / "ledger.jsonl").epsilon(1e-5) == pytest.approx(true.epsilon(1e-5), rel=1e-3)
    assert true.epsilon(1e-5) > 15 > true.epsilon(1e-5, disjoint=True)


def test_a_label_belongs_to_its_candidates(update, tmp_path):
    chosen = update(label=0.01)
    both = Participant(chosen, Client(named(1, 2), TWO), allows(tmp_path))
    both.pay_round()
    later = Participant(chosen, Client(named(1, 2), TWO[1:]), allows(tmp_path))
    later.pay_round()
    assert later.data.clicks == both.data.clicks[1:]
    new = ((named(2, 3, 4, 5, 6, 7), 3),)
    other = Participant(chosen, Client(named(1, 2), new + TWO), allows(tmp_path))
    other.pay_round()
    assert other.data.clicks[1:] == both.data.clicks
    drawn = [paid for paid in read(tmp_path / "ledger.jsonl").paid if paid.label == "labels"]
    assert [paid.about for paid in drawn] == [tuple(sorted(named(*range(1, 13)))), tuple(sorted(new[0][0]))]
    assert [len(paid.settings["labels"]) for paid in drawn] == [2, 1], "none is drawn twice"


def test_labels_are_drawn_once_whatever_asks_and_paid_once(update, world, tmp_path):
    """A join that builds a participant for every call: the label a round uses is the one that was paid for."""
    chosen = update(2.0, label=0.01)
    many = Client(named(1, 2), tuple((named(*range(1, 13)), 3) for _ in range(2)))
    seen = set()
    for _ in range(5):
        asked = Participant(chosen, many, allows(tmp_path))
        asked.pay_round()
        seen.add(chosen.draw([asked.data]).samples[0, :, 0].tobytes())
        assert asked.data.label_epsilon == 0.0
    assert len(seen) == 1
    paid = read(tmp_path / "ledger.jsonl").paid
    assert [p.label for p in paid].count("labels") == 1 and [p.label for p in paid].count("round") == 5


def test_two_clicks_on_the_same_candidates_at_two_times_pay_twice(update, tmp_path):
    """They cannot be told apart once the order changes, so both pay for both draws."""
    chosen = update(2.0, label=1.0, kind=local.PrivateUpdate)
    for clicks in (TWO[:1], TWO[:1] * 2, TWO[:1] * 2):
        Participant(chosen, Client((), clicks), allows(tmp_path)).pay_round()
    assert read(tmp_path / "ledger.jsonl").epsilon(0.0) == pytest.approx(2.0)


def test_what_was_granted_stands_in_the_ledger(update, world, tmp_path):
    Participant(update(3.0, label=1.0), world.clients[0], allows(tmp_path)).pay_round()
    labels, paid = read(tmp_path / "ledger.jsonl").paid
    assert paid.settings["attention"]["epsilon"] == 3.0 and paid.settings["update"] == "PrivateUpdate"
    assert labels.event == PureDpEvent(1.0) and len(labels.settings["labels"]) == 2
    assert paid.unit == "click" and paid.adjacency == "replace-one"


# The node decides.


def test_a_server_gets_no_method_noise_or_budget_that_the_node_did_not_allow(update, world, tmp_path):
    client = world.clients[0]
    raw = update(kind=local.GradientUpdate, noise=VectorMechanism(0.1, math.inf))
    with pytest.raises(Refused, match="asks for method gradient"):
        Participant(raw, client, allows(tmp_path), "gradient").pay_round()
    dear = allows(tmp_path, round_epsilon=10.0)
    with pytest.raises(Refused, match="round-epsilon is 10"):
        Participant(update(8.0, label=8.0), client, dear).pay_round()
    with pytest.raises(Refused, match="round-epsilon is 10"):
        Participant(update(math.inf, label=1.0), client, dear).pay_round()
    with pytest.raises(BudgetSpent):
        Participant(update(8.0, label=1.0), client, allows(tmp_path, 5.0)).pay_round()
    assert read(tmp_path / "ledger.jsonl").paid == []
    Participant(update(8.0, label=1.0), client, dear).pay_round()


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "lacks ledger and budget-epsilon"),
        ({"ledger": "l"}, "lacks budget-epsilon"),
        ({"budget-epsilon": 1}, "lacks ledger"),
        ({"ledger": "l", "budget-epsilon": -1}, "must be positive"),
        ({"ledger": "l", "budget-epsilon": 1, "round-epsilon": float("nan")}, "must be positive"),
        ({"ledger": "l", "budget-epsilon": 1, "budget-delta": 1}, "budget-delta"),
    ],
)
def test_a_node_that_was_told_no_terms_takes_part_in_nothing(config, message):
    with pytest.raises(ValueError, match=message):
        DeviceTerms.from_node(config)


def test_the_runs_configuration_has_no_say_in_terms():
    from tfdp_rec.federated.settings import FederatedSettings

    run = FederatedSettings.from_run({"budget_epsilon": math.inf, "ledgers": "/elsewhere", "method": "gradient"})
    assert not {"budget_epsilon", "ledgers", "ledger", "round_epsilon", "methods"} & set(dataclasses.asdict(run))


# Whether there is an answer does not depend on the clicks.


def poisoned(world, model):
    """Weights under which every news with word 23 is no number, and features where news 3 has it."""
    features = {name: value.copy() for name, value in world.features.items()}
    features["title"][features["title"] == 23] = 22
    features["title"][3] = 23
    weights = [np.array(v) for v in model.trainable_variables]
    (table,) = [i for i, v in enumerate(model.trainable_variables) if v.shape[0] == 24]
    weights[table][23] = np.nan
    return features, weights


@pytest.mark.fast_cases("private+user")
@pytest.mark.parametrize("kind", ["private", "private+user", "gradient"])
def test_a_model_that_is_no_number_for_some_news_gets_an_answer_from_everybody(update, world, tmp_path, kind):
    model = update().model
    features, weights = poisoned(world, model)
    before = [np.array(v) for v in model.trainable_variables]
    noise = VectorMechanism(0.1, 5.0)
    options = {"gradient": {"kind": local.GradientUpdate, "noise": noise}, "private+user": {"user_gradient": noise}}
    chosen = update(features=features, **options.get(kind, {}))
    try:
        for history, shown in ((named(1, 2, 3), TWO), (named(1, 2, 4), TWO), (named(3) * 5, TWO[1:]), ((), TWO)):
            asked = Participant(chosen, Client(history, shown), allows(tmp_path, methods=(kind,)), kind)
            answer = asked.answer(weights)
            assert [a.shape for a in answer] == [w.shape for w in weights]
            assert all(np.isfinite(a[np.isfinite(w)]).all() for a, w in zip(answer, weights))
        everywhere = [np.full_like(w, np.nan) for w in weights]
        Participant(chosen, Client(named(1, 2), TWO), allows(tmp_path, methods=(kind,)), kind).answer(everywhere)
    finally:
        for variable, value in zip(model.trainable_variables, before):
            variable.assign(value)


def test_the_attention_of_news_that_are_no_numbers_is_that_of_the_anonymous_news(update, world, eagerly):
    model = update().model
    features, weights = poisoned(world, model)
    before = [np.array(v) for v in model.trainable_variables]
    for variable, value in zip(model.trainable_variables, weights):
        variable.assign(value)
    try:
        chosen = update(features=features)
        bad = np.array([[1, 3, 2, 0, 0]], "int32")
        padded = np.array([[False, True, False, False, False]])
        expected = chosen._encode(bad, padded).numpy()
        np.testing.assert_allclose(chosen._encode(bad, np.zeros_like(padded)).numpy(), expected, atol=1e-6)
    finally:
        for variable, value in zip(model.trainable_variables, before):
            variable.assign(value)


def test_weights_of_another_model_are_refused_before_anything_is_paid(update, world, tmp_path):
    asked = Participant(update(), world.clients[0], allows(tmp_path))
    weights = [np.array(v) for v in asked.update.model.trainable_variables]
    text = [*weights[:-1], np.full(weights[-1].shape, "weights")]
    for wrong in (weights[:-1], [*weights, weights[0]], [*weights[:-1], weights[-1][..., None]], text):
        with pytest.raises(Refused, match="another model"):
            asked.answer(wrong)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_short_impressions_train_and_pay(update, tmp_path):
    shown = ((named(1), 0), (named(2, 3), 1), (named(4, 5, 6), 0), (named(7, 8, 9, 10), 2))
    chosen = update(label=2.0)
    chosen.samples_per_client = 4
    asked = Participant(chosen, Client(named(1, 2), shown), allows(tmp_path))
    asked.pay_round()
    drawn = chosen.draw([asked.data])
    assert drawn.counted.tolist() == [[0.0, 1.0, 1.0, 1.0]]
    for slot, (candidates, _) in enumerate(shown[1:], 1):
        label, *negatives = named(*drawn.samples[0, slot])
        assert label in candidates and set(negatives) == set(candidates) - {label}, "all the others, over and over"
    labels = [paid for paid in read(tmp_path / "ledger.jsonl").paid if paid.label == "labels"]
    assert labels[0].about == tuple(sorted(named(*range(2, 11)))), "one news alone is no choice, and costs nothing"
    published = update(label=2.0, kind=local.PublishedUpdate, labels=PublishedLabelPermutation)
    published.draw([Client(named(1, 2), shown)])


def test_the_training_draws_noise_has_the_mechanisms_scale():
    """Kills a draw of half the noise: the draw itself, not the mechanism, is looked at."""
    mechanism = AttentionMechanism(4, 3.0, 1e-5, padding=0.1, activation="relu")
    clients = [Client(named(1, 2, 3), ()) for _ in range(4000)]
    noise = draw(clients, lambda ids: [1] * len(ids), mechanism, LabelPermutation(1.0, 2), 5, 1, words.seeded(7)).noise
    assert noise.shape == (4000, 4)
    assert stats.kstest(noise.ravel(), stats.norm(scale=mechanism.noise_scale).cdf).pvalue > 1e-6
    for wrong in (0.5, 0.9, 1.1):
        assert stats.kstest(wrong * noise.ravel(), stats.norm(scale=mechanism.noise_scale).cdf).pvalue < 1e-6


def test_an_update_releases_the_attention_with_the_noise_that_was_drawn(update, world, monkeypatch, eagerly):
    chosen, handed = update(epsilon=2.0), []
    finish = AttentionMechanism.finish
    monkeypatch.setattr(
        AttentionMechanism, "finish", lambda self, a, noise: (handed.append(np.array(noise)), finish(self, a, noise))[1]
    )
    draws = chosen.draw([world.clients[0]], words.seeded(3))
    chosen.gradients(draws)
    np.testing.assert_array_equal(handed[0], draws.noise)
    assert chosen.round_events(world.clients[0])[0].event == GaussianDpEvent(
        chosen.mechanism.noise_scale / math.sqrt(2)
    )


def test_the_ledger_holds_no_click(update, world, tmp_path):
    """Labels are releases; the history and the true clicks are nowhere in the file."""
    secret = Client(named(11, 12), ((named(*range(1, 13)), 6),))
    texts = []
    for click in (6, 2):
        (tmp_path / str(click)).mkdir()
        data = dataclasses.replace(secret, clicks=((secret.clicks[0][0], click),))
        Participant(update(label=1e-6), data, allows(tmp_path / str(click)), source=words.seeded(5)).pay_round()
        lines = [json.loads(line) for line in (tmp_path / str(click) / "ledger.jsonl").read_text().splitlines()]
        for line in lines:
            for key in ("hash", "previous", "session", "ledger", "id"):
                line.pop(key, None)
        texts.append(lines)
    assert texts[0] == texts[1], "same draw, same ledger, whatever was clicked"
    assert read(tmp_path / "2" / "ledger.jsonl").epsilon(1e-5) == math.inf, "a seed's labels can be drawn again"


# What was clicked is the device's own record, whatever a catalogue says.


def changed(world, order, without=()):
    """The fixture's catalogue with its news in another order, some of them gone."""
    rows = [0, *(row for row in order if row not in without)]
    features = {name: value[rows] for name, value in world.catalogue.features.items()}
    return dataclasses.replace(world.catalogue, ids=tuple(world.catalogue.ids[row] for row in rows), features=features)


def test_a_label_is_the_same_wherever_its_news_stand_in_todays_catalogue(update, world, tmp_path):
    """A row more at the top, once: each day another name for the same click, and another label drawn."""
    spent = []
    for day in range(5):
        order = [(row + day) % 12 + 1 for row in range(12)]
        catalogue = changed(world, order, without={day + 1})
        chosen = update(1.0, label=1.0)
        today = local.PrivateUpdate(chosen.model, catalogue, chosen.mechanism, chosen.labels, 5, 2)
        shown = (TWO[0][0][day:] + TWO[0][0][:day], -day % 6)
        asked = Participant(today, Client(named(9), (shown,)), allows(tmp_path))
        asked.pay_round()
        spent.append(asked.data.clicks[0][0][asked.data.clicks[0][1]])
    assert len(set(spent)) == 1, "one private label, by its id"
    paid = read(tmp_path / "ledger.jsonl").paid
    assert [p.label for p in paid].count("labels") == 1 and [p.label for p in paid].count("round") == 5


def test_draws_whose_candidates_overlap_pay_together(update, tmp_path):
    """A record whose list of candidates was cut still tells of the same click."""
    chosen = update(math.inf, label=1.0)
    chosen.round_events = lambda client: ()
    for left in (6, 5, 4, 3):
        click = (TWO[0][0][:left], 0)
        Participant(chosen, Client((), (click,)), allows(tmp_path)).pay_round()
    assert read(tmp_path / "ledger.jsonl").epsilon(0.0) == pytest.approx(4.0)


def test_news_that_the_catalogue_lacks_are_noised_and_paid_for_as_the_anonymous_news(update, world, eagerly):
    """Once: no noise and no payment for a history of expired news, and no label for a click on one."""
    chosen, without = update(2.0, label=0.5), changed(world, range(1, 13), {3, 4})
    today = local.PrivateUpdate(chosen.model, without, chosen.mechanism, chosen.labels, 5, 2)
    expired = Client(named(3, 4), ((named(4, 5, 6, 7), 0),))
    drawn = [today.draw([expired], words.seeded(seed)) for seed in range(200)]
    assert np.std([each.noise for each in drawn]) == pytest.approx(today.mechanism.noise_scale, rel=0.2)
    assert all((each.history[0, :2] != 0).all() for each in drawn)
    assert 0 < np.mean([each.padded[0, :2] for each in drawn]) < 0.5 and not drawn[0].padded[0, 2:].any()
    assert all(each.counted[0].tolist() == [1.0, 0.0] for each in drawn)
    assert len({int(each.samples[0, 0, 0]) for each in drawn}) > 1, "the label is drawn among all candidates"
    assert today.round_events(expired) and expired.spends_on_labels
    places, known = np.array([[11, 11, 0, 0, 0]], "int32"), np.array([[1, 1, 0, 0, 0]], "int32")
    assert today.rows(named(3, 4)) == [11, 11]
    as_anonymous = chosen._encode(known, known != 0).numpy()
    np.testing.assert_allclose(today._encode(places, np.zeros((1, 5), bool)).numpy(), as_anonymous, atol=1e-5)


def test_what_is_declared_is_an_unbounded_entry_and_counts_once_it_is_withdrawn(update, world, tmp_path):
    chosen = update(2.0, label=1.0)
    declared = Client(named(1, 2), TWO, frozenset(named(1, 7, 12)))
    Participant(chosen, declared, allows(tmp_path, 10.0)).pay_round()
    Participant(chosen, declared, allows(tmp_path, 10.0)).pay_round()
    exact = [paid.about for paid in read(tmp_path / "ledger.jsonl").paid if paid.label == "declared"]
    assert exact == [("N1",)], "7 and 12 were shown, and 1 was clicked"
    assert read(tmp_path / "ledger.jsonl").epsilon(1e-5) == math.inf
    with pytest.raises(BudgetSpent, match="to inf"):
        Participant(chosen, dataclasses.replace(declared, declared=frozenset()), allows(tmp_path, 10.0)).pay_round()


# The ledger is there, or the device takes part in nothing.


def test_a_training_ledger_that_is_gone_or_older_is_refused(update, world, tmp_path):
    asked = Participant(update(), world.clients[0], allows(tmp_path))
    asked.pay_round()
    path = tmp_path / "ledger.jsonl"
    older = path.read_bytes()
    assert (tmp_path / "ledger.jsonl.mark").stat().st_mode & 0o777 == 0o600
    Participant(update(), world.clients[0], allows(tmp_path)).pay_round()
    newest = path.read_bytes()
    path.write_bytes(older)
    with pytest.raises(BrokenLedger, match="older backup"):
        asked.pay_round()
    path.unlink()
    with pytest.raises(BrokenLedger, match="is gone"):
        asked.pay_round()
    assert not path.exists()
    path.write_bytes(newest)
    (tmp_path / "ledger.jsonl.mark").write_text("{")
    with pytest.raises(BrokenLedger, match="holds no mark"):
        asked.pay_round()


def test_a_training_ledger_without_the_memory_of_it_is_refused_once_it_has_paid(update, world, tmp_path):
    """An older backup beside a removed mark was gone on with: 23.4 told of 29.1."""
    path, mark = tmp_path / "ledger.jsonl", tmp_path / "ledger.jsonl.mark"
    Ledger(path, UNIT, DATA, REPLACE).close()  # a kill before the first mark
    device = Participant(update(), world.clients[0], allows(tmp_path))
    device.pay_round()
    older = path.read_bytes()
    device.pay_round()
    path.write_bytes(older)
    mark.unlink()
    with pytest.raises(BrokenLedger, match="gone from beside it"):
        device.pay_round()
    assert path.read_bytes() == older and not mark.exists()


def test_the_mark_is_there_before_the_first_payment(update, world, tmp_path, monkeypatch):
    """So no kill leaves a device that has paid and remembers nothing."""
    monkeypatch.setattr(Ledger, "pay", lambda *payment, **fields: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        Participant(update(), world.clients[0], allows(tmp_path)).pay_round()
    assert json.loads((tmp_path / "ledger.jsonl.mark").read_text())["lines"] == 1


def test_an_impression_that_the_log_holds_twice_draws_one_label(update, tmp_path, monkeypatch):
    """A file that was appended to twice: two labels of the same click were drawn for one payment."""
    time, other = datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 2)
    shown = Impression("u", time, named(1, 2), named(4, 5, 6, 7), (2,))
    again = dataclasses.replace(shown, candidates=named(7, 6, 5, 4), clicks=(0,))
    later = dataclasses.replace(shown, time=other)
    data = client_of([shown, shown, again, later])
    assert data.clicks == ((named(4, 5, 6, 7), 2),) * 2
    Participant(update(), data, allows(tmp_path)).pay_round()
    drawn = [p.settings["labels"] for p in read(tmp_path / "ledger.jsonl").paid if p.label == "labels"]
    assert [len(labels) for labels in drawn] == [2]


def test_a_device_that_begins_a_ledger_says_so_in_its_log(update, world, tmp_path, caplog):
    """Without its ledger and what it remembers of it, it begins anew, and that does not show elsewhere."""
    begun = []
    for number in range(4):
        caplog.clear()
        Participant(update(), world.clients[0], allows(tmp_path)).pay_round()
        begun.append("ledger.jsonl is begun. If this device has paid before" in caplog.text)
        if number == 1:
            (tmp_path / "ledger.jsonl").unlink()
            (tmp_path / "ledger.jsonl.mark").unlink()
        if number == 2:
            (tmp_path / "ledger.jsonl").write_bytes(b"")
            (tmp_path / "ledger.jsonl.mark").unlink()
    assert begun == [True, False, True, True]


@pytest.mark.parametrize(
    "asked",
    [
        {"history": 10**6}, {"history": 0}, {"history": 5.5}, {"samples": 10**6}, {"negatives": 10**6}, {"dim": 10**6},
        {"num_basis": 10**6}, {"num_basis": 1}, {"seed": -1}, {"samples": 100, "negatives": 100},
    ],
)  # fmt: skip
def test_sizes_that_a_server_asks_for_have_limits_before_anything_is_paid(asked, tmp_path):
    """`history=10**6` was granted once, and would take all memory."""
    from experiments.generated.news_readers import SyntheticNews
    from tfdp_rec.federated import build
    from tfdp_rec.federated.settings import FederatedSettings

    SyntheticNews(num_users=2, num_news=20, num_days=1, candidates=5, history_length=3).write(tmp_path)
    node = {"partition-id": 0, "data": str(tmp_path), "ledger": str(tmp_path / "l.jsonl"), "budget-epsilon": 1e9}
    with pytest.raises(ValueError, match="must be a whole number from|at most 10,000 news"):
        build.participant(FederatedSettings.from_run({"dim": 8, **asked}), node)
    assert not (tmp_path / "l.jsonl").exists()
