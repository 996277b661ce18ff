"""Paths on which the record said less than was spent: each test told a smaller ε before its mending."""

import dp_accounting
import keras
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from trainings import DELTA, accountant_of, bare_model, model_of, rows, train

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.claim.statement import round_up
from tfdp_rec.privacy import (
    Accountant,
    FixedOrder,
    Ledger,
    PoissonSampling,
    Snapshot,
    Unaccounted,
    optimised_correlation,
)

# Ids.


def test_two_uses_with_one_id_are_refused():
    """The second was left out: ε = .3 was told for 4.3."""
    counted = accountant_of()
    counted.spend(GaussianDpEvent(20.0), "counts", id="of Monday")
    with pytest.raises(ValueError, match="Two expenses have the id 'of Monday'"):
        counted.spend(GaussianDpEvent(1.0), "terms", id="of Monday")
    other = accountant_of()
    other.spend(GaussianDpEvent(1.0), "terms", id="of Monday")
    with pytest.raises(ValueError, match="Two expenses have the id 'of Monday'"):
        counted.spending.merge(other.spending.history)
        counted.epsilon()


def test_a_payment_pays_for_the_event_that_it_names(tmp_path):
    """A use of multiplier 1 was taken for paid by a payment for multiplier 20 with the same id."""
    with accountant_of(ledger=tmp_path / "ledger.jsonl").spending.payments.ledger as ledger:
        ledger.pay(GaussianDpEvent(20.0), label="counts", id="of Monday")
    other = accountant_of()
    other.spend(GaussianDpEvent(1.0), "terms", id="of Monday")
    counted = accountant_of(ledger=tmp_path / "ledger.jsonl")
    counted.spending.merge(other.spending.history)
    with pytest.raises(Unaccounted, match="1 steps or uses .'terms'. were made"):
        counted.epsilon()


# Plans.

UNITS, BATCH, STEPS, SIGMA = 20, 4, 15, 3.0
PLAN = optimised_correlation(steps=STEPS, separation=5, participations=3)


def planned(tmp_path):
    """A ledger, a model, an order, and a function that makes accountants on them."""
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": SIGMA, "expected_batch_size": BATCH, "correlation": PLAN}
    order, model = FixedOrder(UNITS, BATCH), model_of(tfdp_rec.DPFTRL(0.1, **settings))
    ledger = Ledger(tmp_path / "ledger.jsonl", order.unit, Snapshot(UNITS, order.unit), order.adjacency)
    return ledger, model, order, lambda: Accountant(model.optimizer.dp_event(), order, 1e-2, "rdp", ledger=ledger)


def test_the_price_of_a_plan_does_not_come_back_while_others_go_on_from_it(tmp_path):
    """Two accountants of one ledger: the first gave back what the second stood on, and ε = 0 was told for 5 steps."""
    ledger, model, order, accountant = planned(tmp_path)
    first, second = accountant(), accountant()
    first.follow(model)
    first.spending.pay_ahead(first.event, 1, 5, model.optimizer)
    train(model, 5, PrivacyBudget(second, 100.0), sampling=order)
    first.give_back_rest()
    once = epsilon_of(PLAN.dp_event(SIGMA), 1e-2, "rdp")
    assert ledger.epsilon(1e-2, "rdp") == pytest.approx(once) == pytest.approx(second.epsilon())
    second.close()


def test_a_plan_whose_steps_all_came_back_keeps_its_price(tmp_path):
    """The ledger's total was right; the accountant's was 0."""
    ledger, model, order, accountant = planned(tmp_path)
    counted = accountant()
    counted.spending.payments.pay_steps(model.optimizer.dp_event(), STEPS)
    ledger.give_back(ledger.paid[-1].number, 0, STEPS)
    assert counted.epsilon() == pytest.approx(read(ledger.path).epsilon(1e-2, "rdp")) and counted.epsilon() > 1.0
    counted.close()


def test_epsilon_is_never_rounded_down():
    assert round_up(2.7120000004) == 2.713 and round_up(0.1 + 0.2) == 0.3 and round_up(8.0) == 8.0


# Data that grow.


def a_day(model, num_units, steps=4, **options):
    """An accountant of a training on data of so many units."""
    sampling = PoissonSampling(num_units, 25)
    accountant = Accountant(GaussianDpEvent(1.0), sampling, 1e-4, "rdp", **options)
    train(model, steps, PrivacyBudget(accountant, 100.0), sampling=sampling)
    return accountant


def of_both_days():
    first, second = PoissonSampling(500, 25), PoissonSampling(5000, 25)
    events = [each.compose(GaussianDpEvent(1.0), 4) for each in (first, second)]
    return epsilon_of(dp_accounting.ComposedDpEvent(events), 1e-4, "rdp")


@pytest.mark.fast_cases("ledger")
@pytest.mark.parametrize("way", ["same", "grown", "saved", "ledger"])
def test_steps_keep_the_sampling_that_drew_them(tmp_path, way):
    """The second day's accountant priced the first day's steps by its own number of units: 5.1 became .12."""

    def kept(num_units):
        snapshot = Snapshot(num_units, "example")
        one = way == "ledger" and Ledger(tmp_path / "ledger.jsonl", "example", snapshot, data_changed=True)
        return {"ledger": one} if one else {}

    model = model_of()
    first = a_day(model, 500, **kept(500))
    assert first.epsilon() == pytest.approx(first.epsilon(4)) and first.steps == 4
    if way == "ledger":
        first.spending.payments.ledger.close()
    elif way == "grown":
        model = model.grow_into(bare_model())
    elif way == "saved":
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    second = a_day(model, 5000, **kept(5000))
    assert second.steps == 4 and second.epsilon() == pytest.approx(of_both_days())
    if way != "ledger":
        first = Accountant(GaussianDpEvent(1.0), PoissonSampling(500, 25), 1e-4, "rdp")
        first.follow(model)
        assert first.steps == 4 and first.epsilon() == pytest.approx(of_both_days())


@pytest.mark.parametrize("saved", [False, True])
def test_steps_that_no_sampling_drew_have_no_epsilon(tmp_path, saved):
    model = model_of()
    model.fit(*rows(range(100)), batch_size=25, verbose=0)
    if saved:
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    counted = accountant_of(model)
    assert counted.epsilon() == counted.epsilon(7) == np.inf and counted.max_steps(8.0) == 0
    said = " ".join(counted.statement().split())
    assert "none: epsilon is infinite, since no sampling drew the batches" in said and "proof of its draw" not in said
    assert "4 steps on batches that no sampling drew" in said
    with pytest.raises(ValueError, match="carry no proof that they were sampled"):
        model.fit(*rows(range(100)), batch_size=25, verbose=0, callbacks=[PrivacyBudget(counted, 100.0)])
    with pytest.raises(ValueError, match="budget"):
        train(model, 1, PrivacyBudget(counted, 100.0), sampling=counted.sampling)


@pytest.mark.parametrize("ledger", [False, True])
def test_steps_for_one_unit_are_not_stated_for_another(tmp_path, ledger):
    """Row-level steps were told as (2.95, 1e-6) for one user, who had 200 rows: at least 83."""
    model, by_row = model_of(), PoissonSampling(500, 25)
    train(model, 4, sampling=by_row)
    model.add_uses([(GaussianDpEvent(5.0), "counts of rows")])
    by_user = PoissonSampling(50, 25, unit="user")
    kept = {"ledger": Ledger(tmp_path / "ledger.jsonl", "user", Snapshot(50, "user"))} if ledger else {}
    counted = Accountant(GaussianDpEvent(1.0), by_user, DELTA, "rdp", **kept)
    counted.follow(model)
    for tell in (counted.epsilon, counted.statement):
        with pytest.raises(Unaccounted, match="made for another unit, one example, and this accountant"):
            tell()
    with pytest.raises(Unaccounted, match="another unit"):
        train(model, 1, PrivacyBudget(counted, 100.0), sampling=by_user)
    assert not ledger or not kept["ledger"].paid, "a use was paid for before the steps were refused"
    assert accountant_of(model, sampling=by_row).epsilon() > 0


def test_what_prices_a_step_is_fixed_once_batches_were_drawn():
    """A sampling of 50,000 units drew from 1,000, for .1003 told and 5.1 spent."""
    for sampling in (PoissonSampling(500, 25), FixedOrder(500, 25)):
        sampling.batches(rows)
        for name in ("num_units", "expected_batch_size", "unit", "name"):
            with pytest.raises(AttributeError, match=f"{name} of a {type(sampling).__name__} is fixed"):
                setattr(sampling, name, 1000)
    graph = PoissonSampling(500, 25)
    graph.graph_batches(lambda indices: {"id": indices})
    with pytest.raises(AttributeError, match="is fixed"):
        graph.num_units = 1000


def test_a_sampling_of_ones_own_keeps_what_it_likes():
    class Counting(PoissonSampling):
        def __init__(self):
            self.unit, self.drawn = "user", 0
            super().__init__(500, 25)
            self.unit = "user"

        def index_batches(self, seed=None, position=0):
            for batch in super().index_batches(seed, position):
                self.drawn += 1
                yield batch

    sampling = Counting()
    next(iter(sampling.batches(rows)))
    assert sampling.drawn >= 1 and sampling.unit == "user"
