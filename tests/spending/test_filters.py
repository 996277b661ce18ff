"""Filters: what an adversary that chooses after each release can tell, by integration, and what is refused."""

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from checker import checked
from counting import count
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from scipy import special, stats
from trainings import model_of, optimizer_of, rows

import tfdp_rec
from tfdp_rec.cli import main
from tfdp_rec.core.claim.composition import divergences
from tfdp_rec.core.claim.events import FailingDpEvent, PaddedDpEvent, PlannedDpEvent, PureDpEvent
from tfdp_rec.core.claim.ledger import line_text, read
from tfdp_rec.core.claim.profiles import gaussian_delta
from tfdp_rec.privacy import (
    Accountant,
    BrokenLedger,
    GaussianFilter,
    Ledger,
    PoissonSampling,
    RenyiFilter,
    Snapshot,
    Unaccounted,
    calibrate_noise,
    epsilon_of,
)

ROOT = Path(__file__).parents[2]
EPSILON, DELTA = 1.0, 1e-6
STEP = PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))
DATA = Snapshot(1000, "user")


def opened(path, limit=None, **options):
    return Ledger(path, "user", DATA, limit=limit, **options)


# The oracle: outcomes of a release under P, their losses log(p/q), and δ of a last release.


def outcomes(event):
    """(probability under P, loss) of an event's outcomes."""
    if isinstance(event, FailingDpEvent):
        return np.array([event.delta, 1 - event.delta]), np.array([np.inf, 0.0])
    q = getattr(event, "sampling_probability", 1.0)
    z = getattr(event, "event", event).noise_multiplier
    y, width = np.linspace(-9 * z, 1 + 9 * z, 3001, retstep=True)
    p = (1 - q) * stats.norm.pdf(y, 0, z) + q * stats.norm.pdf(y, 1, z)
    return p * width, np.log1p(q * np.expm1((2 * y - 1) / (2 * z * z)))


def delta_of(event, epsilon):
    """∫ (p - e^ε q)+ at any real ε, exactly."""
    if isinstance(event, FailingDpEvent):
        return event.delta + (1 - event.delta) * np.maximum(-np.expm1(epsilon), 0)
    if isinstance(event, PoissonSampledDpEvent):
        q = event.sampling_probability
        ratio = (np.exp(epsilon) - (1 - q)) / q
        above = q * gaussian_delta(np.log(np.maximum(ratio, 1e-300)), 1.0, event.event.noise_multiplier)
        return np.where(ratio > 0, above, -np.expm1(epsilon))
    return gaussian_delta(epsilon, 1.0, event.noise_multiplier)


def told(tree, epsilon):
    """δ(ε) of an adaptive course: (event, [(least loss so far, what follows)]), or an event, or None for no more.

    A loss is added to those before; what follows is chosen by the loss of its own release, from the last entry on whose
    threshold the loss reaches.
    """
    epsilon = np.asarray(epsilon, np.float64)
    if tree is None:
        return np.maximum(-np.expm1(epsilon), 0)
    if not isinstance(tree, tuple):
        return delta_of(tree, epsilon)
    event, branches = tree
    weights, losses = outcomes(event)
    found = np.zeros_like(epsilon)
    for (low, then), high in zip(branches, [low for low, _ in branches[1:]] + [np.inf], strict=True):
        chosen = (losses >= low) & (losses < high) & (weights > 0)
        if not chosen.any():
            continue
        if epsilon.ndim:
            x = np.linspace(epsilon.min() - 12, epsilon.max() + 12, 6001)
            value = told(then, x)
            for weight, loss in zip(weights[chosen], losses[chosen], strict=True):
                found += weight * np.interp(epsilon - loss, x, value)
        else:
            found += np.sum(weights[chosen] * told(then, epsilon - losses[chosen]))
    return found + weights[np.isinf(losses)].sum()


def paths(tree, before=()):
    """Every sequence of events in a course."""
    if tree is None:
        yield before
    elif not isinstance(tree, tuple):
        yield (*before, tree)
    else:
        for _, then in tree[1]:
            yield from paths(then, (*before, tree[0]))


def filled_up(make, excess):
    """The dearest event of a family that still fits: `make(x)` for the least x."""
    low, high = 1e-3, 1e5
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if excess(make(middle)) <= 0 else (middle, high)
    return make(high)


FIRST = GaussianDpEvent(6.0)
FAMILIES = {
    "gaussian": GaussianDpEvent,
    "rare": lambda x: PoissonSampledDpEvent(min(1.0, 1e-3 / x), GaussianDpEvent(0.5)),
    "sampled": lambda x: PoissonSampledDpEvent(0.02, GaussianDpEvent(x)),
    "failing": lambda x: FailingDpEvent(0.999e-6 / max(x, 1.0)),
}


def worst(first, choices, epsilon=EPSILON):
    """δ(ε) of the best adversary: after each outcome the choice that tells most."""
    weights, losses = outcomes(first)
    return float(np.sum(weights * np.max([told(each, epsilon - losses) for each in choices], axis=0)))


@pytest.mark.fast_cases("families0-1.85e-06")
@pytest.mark.parametrize(
    "families, at_least", [(("gaussian", "failing"), 1.85e-6), (("rare", "sampled", "gaussian"), 1.9e-6)]
)
def test_a_choice_after_a_look_exceeds_a_ledger_of_fixed_payments(tmp_path, families, at_least):
    def excess(event):  # pld's grid rounds ε up
        return worst(FIRST, [event], EPSILON - 2e-3) - DELTA

    choices = [filled_up(FAMILIES[family], excess) for family in families]
    for number, choice in enumerate(choices):
        with opened(tmp_path / f"{number}.jsonl") as ledger:
            ledger.pay(FIRST)
            ledger.pay(choice)
            assert ledger.epsilon(DELTA) <= 1.0
        assert worst(FIRST, [choice]) <= DELTA, "fixed beforehand it holds"
    assert worst(FIRST, choices) > at_least


LIMITS = {
    "renyi": RenyiFilter(EPSILON, DELTA),
    "low order": RenyiFilter(EPSILON, DELTA, order=16.0),
    "with failures": RenyiFilter(EPSILON, DELTA, failing=5e-7),
    "gaussian": GaussianFilter(EPSILON, DELTA),
    "gaussian with failures": GaussianFilter(EPSILON, DELTA, failing=5e-7),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_choice_after_a_look_stays_within_a_filter(tmp_path, name):
    """The same adversary; each choice takes all that the filter has left."""
    limit, choices = LIMITS[name], []
    for number, family in enumerate(FAMILIES.values()):
        with opened(tmp_path / f"{number}.jsonl", limit) as ledger:
            ledger.pay(FIRST)
            if limit.failing:
                ledger.pay(FailingDpEvent(limit.failing))
            choice = filled_up(family, lambda e: limit.used(dp_accounting.ComposedDpEvent([FIRST, e])) - 1)
            try:
                ledger.pay(choice)
            except ValueError:
                continue  # a family that this filter has no room or price for
            choices.append(choice)
            with pytest.raises(ValueError, match="would exceed it"):
                ledger.pay(GaussianDpEvent(50.0))
            assert ledger.epsilon(DELTA) == EPSILON
    assert len(choices) == (1 if name.startswith("gaussian") else 2)
    found = limit.failing + (1 - limit.failing) * worst(FIRST, choices)
    assert 0.01 * DELTA < found <= DELTA
    assert found > 0.99 * DELTA or not name.startswith("gaussian"), "Gaussians alone cost nothing more"


@pytest.mark.parametrize("name", ["renyi", "with failures", "gaussian with failures"])
@pytest.mark.parametrize("seed", range(3))
def test_no_random_adversary_exceeds_the_budget(tmp_path, name, seed):
    """Three releases, each event drawn at random by what was seen; what the ledger refuses is not made."""
    random, limit, count = np.random.default_rng(seed), LIMITS[name], iter(range(10**6))

    def admitted(before):
        """An event that a ledger admits after others; None if it refuses ten."""
        for _ in range(10):
            family = FAMILIES[random.choice(list(FAMILIES))]
            event = family(float(np.exp(random.uniform(0, 4))))
            with opened(tmp_path / f"{next(count)}.jsonl", limit) as ledger:
                for earlier in before:
                    ledger.pay(earlier)
                try:
                    ledger.pay(event)
                except ValueError:
                    continue
                return event
        return None

    def course(before, depth):
        event = admitted(before)
        if event is None or depth == 1:
            return event
        thresholds = [-np.inf, *np.sort(random.normal(0, 0.3, 1))]
        return event, [(low, course((*before, event), depth - 1)) for low in thresholds]

    for _ in range(3):
        tree = course((), 3)
        assert float(told(tree, EPSILON)) <= DELTA


def test_the_oracle_agrees_with_dp_accounting_on_a_fixed_course():
    for events in ([GaussianDpEvent(8.0), GaussianDpEvent(5.0), GaussianDpEvent(9.0)], [GaussianDpEvent(5.0), STEP]):
        tree = events[-1]
        for event in reversed(events[:-1]):
            tree = (event, [(-np.inf, tree)])
        delta = float(told(tree, 0.5))
        assert epsilon_of(dp_accounting.ComposedDpEvent(events), delta) == pytest.approx(0.5, abs=1e-3)


# What a limit is.


@pytest.mark.parametrize("epsilon, delta", [(0.1, 1e-6), (1.0, 1e-6), (8.0, 1e-6), (3.0, 1e-9), (20.0, 1e-4)])
def test_a_full_filter_is_within_its_budget_and_near_it(epsilon, delta):
    limit = RenyiFilter(epsilon, delta)
    assert compute_epsilon([limit.order], [limit.limit * (1 + 1e-6)], delta)[0] <= epsilon
    assert compute_epsilon([limit.order], [limit.limit * (1 + 1e-5)], delta)[0] > epsilon * (1 - 1e-5)
    gaussians = GaussianFilter(epsilon, delta)
    noise = (gaussians.limit * (1 + 1e-6)) ** -0.5
    assert gaussian_delta(epsilon, 1.0, noise) <= delta < gaussian_delta(epsilon, 1.0, noise * 0.999)
    with_failures = RenyiFilter(epsilon, delta, failing=delta / 2, order=limit.order)
    assert compute_epsilon([limit.order], [with_failures.limit * (1 + 1e-6)], delta / 2)[0] <= epsilon


def test_the_order_is_that_of_which_most_fits():
    found = {RenyiFilter.order_for(e, 1e-6, STEP): e for e in (1.0, 3.0, 8.0)}
    for order, epsilon in found.items():
        least = math.ceil(order * 0.9)
        used = [RenyiFilter(epsilon, 1e-6, order=o).used(STEP) for o in RdpAccountant().orders if least < o < 60]
        assert RenyiFilter(epsilon, 1e-6, order=order).used(STEP) <= min(used)
    assert RenyiFilter(8.0, 1e-6).order == RenyiFilter.order_for(8.0, 1e-6, GaussianDpEvent(7.0))


@pytest.mark.parametrize("order", [2.5, 4.0, 17.0])
def test_the_price_is_dp_accountings_divergence_at_the_order(order):
    events = [GaussianDpEvent(3.0), STEP, SelfComposedDpEvent(STEP, 40), LaplaceDpEvent(4.0)]
    limit = RenyiFilter(8.0, 1e-6, order=max(order, 2.9))
    for event in (*events, dp_accounting.ComposedDpEvent(events)):
        theirs = RdpAccountant([limit.order]).compose(event).rdp[0]
        assert theirs <= limit.used(event) * limit.limit == pytest.approx(theirs, rel=1e-6)


def test_what_is_used_is_rounded_up():
    """The sum of many small divergences is not below the same in exact arithmetic."""
    order, noise = 4.0, 1000.0
    limit = RenyiFilter(8.0, 1e-6, order=order)
    exact = order / (2 * noise**2)
    assert limit.used(SelfComposedDpEvent(GaussianDpEvent(noise), 10**6)) * limit.limit >= 10**6 * exact
    assert limit.used(PoissonSampledDpEvent(1e-5, GaussianDpEvent(50.0))) > 0


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"epsilon": 0.0, "delta": 1e-6}, "positive"),
        ({"epsilon": math.inf, "delta": 1e-6}, "positive"),
        ({"epsilon": 1.0, "delta": 0.0}, "delta must be"),
        ({"epsilon": 1.0, "delta": 1e-6, "failing": 1e-6}, "below delta"),
        ({"epsilon": 1.0, "delta": 1e-6, "failing": -1e-9}, "at least 0"),
        ({"epsilon": 1.0, "delta": 1e-6, "order": 1.0}, "order must be"),
        ({"epsilon": 1.0, "delta": 1e-6, "order": math.nan}, "order must be"),
        ({"epsilon": 1.0, "delta": 1e-6, "order": 5000.0}, "order must be"),
        ({"epsilon": 1.0, "delta": 1e-6, "order": 4.0}, "leave order out"),
    ],
)
def test_what_is_no_budget_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        RenyiFilter(**settings)


@pytest.mark.parametrize("noise", [1e-300, 1e-160, 1e-20, 1e-3])
@pytest.mark.parametrize("probability", [1e-300, 1e-9, 0.5, 1.0])
def test_next_to_no_noise_is_never_free(noise, probability):
    for limit in (RenyiFilter(8.0, 1e-6), RenyiFilter(8.0, 1e-6, order=4.0), GaussianFilter(8.0, 1e-6)):
        for event in (GaussianDpEvent(noise), PoissonSampledDpEvent(probability, GaussianDpEvent(noise))):
            try:
                assert limit.used(event) > 1
            except ZeroDivisionError:  # of dp_accounting, and no payment either
                assert noise == 1e-300


@pytest.mark.parametrize("order", [1.5, 4.0, 60.0])
@pytest.mark.parametrize("epsilon", [1e-9, 0.3, 5.0, 900.0])
def test_a_release_of_pure_epsilon_costs_what_randomised_response_does(order, epsilon):
    """By integration over its two outcomes, and with padding over its three; no more than epsilon."""
    found = divergences(PureDpEvent(epsilon), (order,))[0]
    p = np.array([-np.log1p(np.exp(-epsilon)), -epsilon - np.log1p(np.exp(-epsilon))])
    exact = special.logsumexp(order * p + (1 - order) * p[::-1]) / (order - 1)
    assert exact - 1e-9 <= found <= min(epsilon, exact) * (1 + 1e-9) + 1e-9
    padded = divergences(PaddedDpEvent(PureDpEvent(epsilon), 0.25), (order,))[0]
    other = np.log(0.25 * 0.5 + 0.75 * np.exp(p))  # the fixed item answers either way alike
    least = special.logsumexp(order * other + (1 - order) * other[::-1]) / (order - 1)
    assert least - 1e-9 <= padded <= found + 1e-9


def test_padding_lowers_the_divergence_of_a_gaussian_and_bounds_it():
    """Against integration: the fixed item at one of the two means, the worse."""
    for noise, padding, order in ((1.0, 0.5, 4.0), (0.4, 0.1, 2.0), (3.0, 0.9, 16.0)):
        y = np.linspace(-20 * noise, 1 + 20 * noise, 20_001)
        p, q = (stats.norm.logpdf(y, mean, noise) for mean in (1.0, 0.0))
        for fixed in (p, q):
            a, b = (np.logaddexp(np.log(padding) + fixed, np.log1p(-padding) + each) for each in (p, q))
            for top, bottom in ((a, b), (b, a)):
                inside = special.logsumexp(order * top + (1 - order) * bottom) + np.log(y[1] - y[0])
                exact = inside / (order - 1)
                bound = divergences(PaddedDpEvent(GaussianDpEvent(noise), padding), (order,))[0]
                assert exact <= bound + 1e-9 <= order / (2 * noise**2) + 1e-8


def test_a_filter_of_divergences_admits_releases_of_pure_epsilon(tmp_path):
    events = [PureDpEvent(0.1), PaddedDpEvent(GaussianDpEvent(9.0), 0.5), GaussianDpEvent(9.0)]
    with opened(tmp_path / "renyi.jsonl", RenyiFilter(8.0, 1e-6)) as ledger:
        for event in events:
            ledger.pay(event)
        assert 0 < ledger.used < 1 and ledger.epsilon(1e-6) == 8.0
        with pytest.raises(ValueError, match="would exceed it"):
            ledger.pay(PureDpEvent(9.0))
    with opened(tmp_path / "gaussian.jsonl", GaussianFilter(8.0, 1e-6)) as ledger:
        for event in events[:2]:
            with pytest.raises(ValueError, match="it is no Gaussian"):
                ledger.pay(event)


def test_a_divergence_that_is_no_number_is_not_free(monkeypatch):
    monkeypatch.setattr(RdpAccountant, "rdp", property(lambda self: np.array([math.nan])))
    limit = RenyiFilter(8.0, 1e-6, order=4.25)
    assert limit.used(GaussianDpEvent(123.0)) == math.inf


# A ledger that is a filter.


PLAN = PlannedDpEvent(GaussianDpEvent(9.0), 10, 5, 2, plan="p")
UNPRICED = [
    dp_accounting.NonPrivateDpEvent(),
    GaussianDpEvent(0.0),
    PLAN,
    FailingDpEvent(1e-12),
    PoissonSampledDpEvent(0.1, LaplaceDpEvent(9.0)),
]


@pytest.mark.parametrize("event", UNPRICED, ids=lambda event: str(event)[:30])
@pytest.mark.parametrize("limit", [RenyiFilter(8.0, 1e-6), GaussianFilter(8.0, 1e-6)], ids=["renyi", "gaussian"])
def test_what_has_no_price_is_refused_and_nothing_is_written(tmp_path, limit, event):
    with opened(tmp_path / "ledger.jsonl", limit) as ledger:
        text = (tmp_path / "ledger.jsonl").read_bytes()
        with pytest.raises(ValueError, match="no price in a filter") as refusal:
            ledger.pay(dp_accounting.ComposedDpEvent([GaussianDpEvent(9.0), event]))
        assert len(str(refusal.value)) < 500 and str(refusal.value).endswith(".")
        assert (tmp_path / "ledger.jsonl").read_bytes() == text and ledger.used == 0


def test_what_is_no_gaussian_is_refused_by_the_filter_of_gaussians(tmp_path):
    with opened(tmp_path / "a.jsonl", GaussianFilter(8.0, 1e-6)) as ledger:
        for event in (STEP, LaplaceDpEvent(9.0)):
            with pytest.raises(ValueError, match="it is no Gaussian"):
                ledger.pay(event)
    with opened(tmp_path / "b.jsonl", RenyiFilter(8.0, 1e-6)) as ledger:
        ledger.pay(STEP, 10, steps=10)
        ledger.pay(LaplaceDpEvent(9.0))
        ledger.pay(dp_accounting.NoOpDpEvent())
        assert 0 < ledger.used < 1


@pytest.mark.parametrize("count", [-5, 0.5, math.nan])
def test_a_composition_of_less_than_nothing_is_refused(tmp_path, count):
    """It would have been a refund."""
    for limit in (None, GaussianFilter(8.0, 1e-6)):
        with opened(tmp_path / f"{limit is None}.jsonl", limit) as ledger:
            ledger.pay(GaussianDpEvent(4.0))
            with pytest.raises(ValueError):
                ledger.pay(SelfComposedDpEvent(GaussianDpEvent(2.0), count))
            assert len(ledger.paid) == 1


def test_a_filter_is_one_from_its_first_line_on(tmp_path):
    limit, path = RenyiFilter(8.0, 1e-6, failing=1e-7, order=4.5), tmp_path / "ledger.jsonl"
    with opened(path, limit) as ledger:
        ledger.pay(GaussianDpEvent(4.0))
        ledger.pay(FailingDpEvent(4e-8))
    first = json.loads(path.read_text().splitlines()[0])
    assert first["format"] == "tfdp_rec ledger 3", "which earlier versions refuse to read"
    assert read(path).limit == limit
    with opened(path) as ledger:  # goes on as what it is
        assert ledger.limit == limit and ledger.epsilon(1e-6) == read(path).epsilon(1e-6) == 8.0
        assert ledger.used == pytest.approx(0.4, rel=1e-5)
        assert ledger.epsilon(1e-7) == math.inf, "the claim is of one δ"
        assert ledger.epsilon(1e-5) == 8.0
    opened(path, limit).close()


@pytest.mark.parametrize(
    "begun, opened_as",
    [
        (None, RenyiFilter(8.0, 1e-6)),
        (RenyiFilter(8.0, 1e-6), RenyiFilter(8.0, 1e-6, order=4.0)),
        (RenyiFilter(8.0, 1e-6), RenyiFilter(9.0, 1e-6)),
        (RenyiFilter(8.0, 1e-6), RenyiFilter(8.0, 1e-6, failing=1e-7)),
        (RenyiFilter(8.0, 1e-6), GaussianFilter(8.0, 1e-6)),
    ],
)
def test_a_ledger_stays_what_it_was_begun_as(tmp_path, begun, opened_as):
    path = tmp_path / "ledger.jsonl"
    opened(path, begun).close()
    with pytest.raises(ValueError, match="kind never changes") as refusal:
        opened(path, opened_as)
    assert len(str(refusal.value)) < 500
    opened(path).close()  # and nobody holds it


@pytest.mark.parametrize(
    "change",
    [
        {"format": "tfdp_rec ledger 2"},
        {"limit": {"kind": "RenyiFilter", "epsilon": 8.0, "delta": 0.0, "failing": 0.0, "order": 4.0}},
        {"limit": {"kind": "Nobody", "epsilon": 8.0}},
        {"limit": None},
    ],
)
def test_a_first_line_that_says_what_no_filter_says_is_broken(tmp_path, change):
    path = tmp_path / "ledger.jsonl"
    opened(path, RenyiFilter(8.0, 1e-6)).close()
    line = {**json.loads(path.read_text()), **change}
    path.write_bytes(line_text({key: value for key, value in line.items() if key != "hash"}))
    with pytest.raises(BrokenLedger, match="Line 1"):
        read(path)


def test_entries_beyond_a_filter_claim_nothing(tmp_path):
    """As another program might write them: the chain is whole, the budget is not."""
    path = tmp_path / "ledger.jsonl"
    with opened(path, GaussianFilter(1.0, 1e-6)) as ledger:
        ledger.pay(GaussianDpEvent(5.0))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    loud = {**lines[1], "number": 2, "previous": lines[1].pop("hash")}
    loud["event"]["noise_multiplier"] = 1.0
    del loud["hash"]
    with open(path, "ab") as file:
        file.write(line_text(loud))
    assert read(path).epsilon(1e-6) == math.inf


def test_what_was_not_run_is_given_back_and_can_be_paid_again(tmp_path):
    limit = RenyiFilter(1.0, 1e-6)
    with opened(tmp_path / "ledger.jsonl", limit) as ledger:
        many = int(1 / limit.used(GaussianDpEvent(20.0)))
        block = ledger.pay(GaussianDpEvent(20.0), many, steps=many)
        with pytest.raises(ValueError, match="would exceed it"):
            ledger.pay(GaussianDpEvent(20.0), 2)
        ledger.give_back(block, 5, 5)
        ledger.pay(GaussianDpEvent(20.0), 5)
        with pytest.raises(ValueError, match="would exceed it"):
            ledger.pay(GaussianDpEvent(20.0), 2)


@pytest.mark.parametrize("delta", [math.nan, -1.0, 1.0, 2.0])
def test_no_claim_is_made_at_a_delta_that_is_no_probability(tmp_path, delta):
    """The claim was the budget from 1 on."""
    with opened(tmp_path / "l.jsonl", RenyiFilter(1.0, 1e-6)) as ledger:
        with pytest.raises(ValueError, match="delta must be at least 0 and below 1"):
            ledger.epsilon(delta)
        assert ledger.epsilon(0.0) == math.inf


def test_each_item_has_the_whole_budget(tmp_path):
    limit = GaussianFilter(1.0, 1e-6)
    half = GaussianDpEvent((limit.limit / 2) ** -0.5)
    with opened(tmp_path / "ledger.jsonl", limit) as ledger:
        for window in (("1", "2"), ("2", "3"), ("3", "4")):
            ledger.pay(half, about=window)
        assert ledger.used == pytest.approx(1.0, abs=1e-5)
        for about in (("2",), ("4", "3"), None):
            with pytest.raises(ValueError, match="would exceed it"):
                ledger.pay(half, about=about)
        ledger.pay(half, about=("1",))
    with opened(tmp_path / "b.jsonl", limit) as ledger:  # the dearest item is not that of most payments
        for item in ("often", "often", "often", "often", "dear", "dear"):
            ledger.pay(half if item == "dear" else GaussianDpEvent(90.0), about=(item,))
        with pytest.raises(ValueError, match="would exceed it"):
            ledger.pay(GaussianDpEvent(40.0), about=("dear",))
        ledger.pay(GaussianDpEvent(40.0), about=("often",))


def test_two_threads_are_not_both_admitted_to_the_last_place(tmp_path, monkeypatch):
    limit = GaussianFilter(1.0, 1e-6)
    most = GaussianDpEvent(limit.limit**-0.5)
    with opened(tmp_path / "ledger.jsonl", limit) as ledger:
        both, used = threading.Barrier(2), type(ledger)._append

        def slow(self, fields):
            if fields["kind"] == "pay":
                try:
                    both.wait(0.5)  # whoever was admitted waits for the other to be
                except threading.BrokenBarrierError:
                    pass
            return used(self, fields)

        monkeypatch.setattr(type(ledger), "_append", slow)
        refused = []

        def pay():
            try:
                ledger.pay(most)
            except ValueError as refusal:
                refused.append(refusal)

        threads = [threading.Thread(target=pay) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(ledger.paid) == len(refused) == 1


@pytest.mark.slow
def test_two_processes_are_not_both_admitted(tmp_path):
    path = tmp_path / "ledger.jsonl"
    program = (
        "import sys; from tfdp_rec.privacy import *; from dp_accounting import GaussianDpEvent\n"
        "Ledger(sys.argv[1], 'user', Snapshot(1000, 'user')).pay(GaussianDpEvent(5.0))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with opened(path, GaussianFilter(1.0, 1e-6)) as ledger:
        ledger.pay(GaussianDpEvent(5.0))
        during = subprocess.run([sys.executable, "-c", program, path], capture_output=True, env=environment)
        assert b"in use" in during.stderr
    after = subprocess.run([sys.executable, "-c", program, path], capture_output=True, env=environment)
    assert b"would exceed it" in after.stderr and len(read(path).paid) == 1


# Training under one.


SAMPLING = PoissonSampling(10_000, 200, unit="user")
USERS = Snapshot(10_000, "user")


def under(path, limit=None, noise=1.0, **options):
    ledger = Ledger(path, "user", USERS, limit=limit)
    return Accountant(GaussianDpEvent(noise), SAMPLING, 1e-6, ledger=ledger, **options)


def test_an_accountant_claims_the_budget_and_makes_the_steps_that_fit(tmp_path):
    limit = RenyiFilter(3.0, 1e-6)
    accountant = under(tmp_path / "ledger.jsonl", limit)
    most = accountant.max_steps(3.0)
    assert most == int(1 / limit.used(SAMPLING.compose(GaussianDpEvent(1.0), 1)))
    assert accountant.epsilon() == accountant.epsilon(most) == 3.0 and accountant.epsilon(most + 1) == math.inf
    count(accountant, GaussianDpEvent(1.0), most - 7)
    assert accountant.max_steps(3.0) == most
    with pytest.raises(ValueError, match="would exceed it"):
        count(accountant, GaussianDpEvent(1.0), 8)
    count(accountant, GaussianDpEvent(1.0), 7)
    assert accountant.max_steps(3.0) == accountant.steps == most and accountant.max_steps(2.9) == most
    said = " ".join(accountant.statement().split())
    assert "(epsilon = 3, delta = 1e-06)-differential privacy" in said
    assert "filter: payments may depend on earlier releases, and the claim is its budget" in said
    assert f"a filter of Rényi divergences of order {limit.order:g}" in said
    assert "weights that were released before" not in said and "exact losses" in said and "TF Privacy" not in said
    fixed = Accountant(GaussianDpEvent(1.0), SAMPLING, 1e-6, "rdp", ledger=tmp_path / "fixed.jsonl")
    said = " ".join(fixed.statement().split())
    assert "payments fixed in advance" in said and "weights that were released before" in said and "odometer" in said


def test_another_delta_a_smaller_target_and_steps_without_a_price_are_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, "user", USERS, limit=GaussianFilter(3.0, 1e-6)):
        pass
    with pytest.raises(ValueError, match="it is no Gaussian"):
        Accountant(GaussianDpEvent(1.0), SAMPLING, 1e-6, ledger=path)
    path = tmp_path / "renyi.jsonl"
    with Ledger(path, "user", USERS, limit=RenyiFilter(3.0, 1e-6)):
        pass
    with pytest.raises(ValueError, match="claims nothing at delta"):
        Accountant(GaussianDpEvent(1.0), SAMPLING, 1e-7, ledger=path)
    with Ledger(path, "user", USERS) as ledger:
        with pytest.raises(ValueError, match="claims its whole budget, however little"):
            calibrate_noise(2.9, 1e-6, SAMPLING, 100, ledger=ledger)
        assert Accountant(GaussianDpEvent(1.0), SAMPLING, 1e-6, ledger=ledger).max_steps(2.9) == 0


def test_history_from_before_a_filter_is_not_in_it(tmp_path):
    accountant = under(tmp_path / "ledger.jsonl", RenyiFilter(3.0, 1e-6))
    before = Accountant(GaussianDpEvent(1.0), SAMPLING, 1e-6)
    count(before, GaussianDpEvent(1.0), 3)
    accountant.spending.merge(before.spending.history)
    with pytest.raises(Unaccounted, match="3 steps were made that"):
        accountant.epsilon()
    assert accountant.spending.payments.ledger.paid == []


def test_the_noise_for_the_next_job_is_found_from_what_is_left(tmp_path):
    limit = RenyiFilter(3.0, 1e-6)
    with Ledger(tmp_path / "ledger.jsonl", "user", USERS, limit=limit) as ledger:
        ledger.pay(GaussianDpEvent(5.0), label="counts")
        for days in (3, 2, 1):
            before = ledger.used
            noise = calibrate_noise(3.0, 1e-6, SAMPLING, 200, ledger=ledger, share=1 / days)
            step = SAMPLING.compose(GaussianDpEvent(noise), 200)
            assert limit.used(step) == pytest.approx((1 - before) / days, rel=5e-3)
            ledger.pay(step.event, 200, steps=200)
        assert 0.99 < ledger.used <= 1
        with pytest.raises(ValueError, match="No noise multiplier"):
            calibrate_noise(3.0, 1e-6, SAMPLING, 10**9, ledger=ledger)
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="share must be"):
            calibrate_noise(3.0, 1e-6, SAMPLING, 200, share=share)
    with opened(tmp_path / "fixed.jsonl") as ledger:
        with pytest.raises(ValueError, match="a fraction of a filter's rest"):
            calibrate_noise(3.0, 1e-6, SAMPLING, 200, "rdp", ledger=ledger, share=0.5)
        ledger.pay(GaussianDpEvent(5.0))
        held = calibrate_noise(3.0, 1e-6, SAMPLING, 200, "rdp", ledger=ledger)
        assert held == pytest.approx(
            calibrate_noise(3.0, 1e-6, SAMPLING, 200, "rdp", spent=[(GaussianDpEvent(5.0), "counts")]), rel=2e-3
        )


def test_the_command_says_which_kind_a_ledger_is(tmp_path, capsys):
    path, fixed = tmp_path / "ledger.jsonl", tmp_path / "fixed.jsonl"
    with opened(path, GaussianFilter(2.0, 1e-6)) as ledger:
        ledger.pay(GaussianDpEvent(9.0), label="counts")
    with opened(fixed) as ledger:
        ledger.pay(GaussianDpEvent(9.0), label="counts")
    assert main(["ledger", "total", str(path), "--delta", "1e-6"]) == 0
    said = capsys.readouterr().out
    assert "epsilon = 2 at delta = 1e-06" in said and "filter: payments may depend on earlier releases" in said
    assert main(["ledger", "total", str(path), "--delta", "1e-7"]) == 0 and "epsilon = inf" in capsys.readouterr().out
    for action in ("show", "verify"):
        assert main(["ledger", action, str(path)]) == 0 and "filter: payments" in capsys.readouterr().out
    assert main(["ledger", "show", str(fixed)]) == 0 and "payments fixed in advance" in capsys.readouterr().out


def test_the_command_begins_a_filter(tmp_path, capsys):
    for options, limit in (
        (["--epsilon", "8", "--delta", "1e-6"], RenyiFilter(8.0, 1e-6)),
        (["--epsilon", "3", "--delta", "1e-6", "--gaussians"], GaussianFilter(3.0, 1e-6)),
    ):
        path = str(tmp_path / f"{len(options)}.jsonl")
        assert main(["ledger", "begin", path, *options]) == 0 and "filter: payments" in capsys.readouterr().out
        assert read(path).limit == limit
        assert main(["ledger", "begin", path, *options]) == 2 and "exists" in capsys.readouterr().err
        opened(path).close()  # any unit: payments say theirs
    assert main(["ledger", "begin", str(tmp_path / "none.jsonl"), "--epsilon", "8"]) == 2
    assert not (tmp_path / "none.jsonl").exists()


def trained(plan, steps):
    model = model_of(optimizer_of(plan=plan))
    model.fit(plan.batches(rows), steps_per_epoch=steps, verbose=0, callbacks=[plan.budget()])
    return int(model.optimizer.iterations)


@pytest.mark.slow
def test_plans_under_a_filter_make_their_steps_and_no_more(tmp_path):
    """The second plan's noise and steps may depend on what the first released."""
    sampling, limit = PoissonSampling(500, 25, unit="user"), RenyiFilter(4.0, 1e-4)
    with Ledger(tmp_path / "ledger.jsonl", "user", Snapshot(500, "user"), limit=limit) as ledger:
        options = {"sampling": sampling, "delta": 1e-4, "ledger": ledger}
        assert trained(tfdp_rec.PrivatePlan(noise_multiplier=2.0, steps=5, **options), 8) == 5
        first = ledger.used
        assert ledger.steps == 5 and first == pytest.approx(limit.used(sampling.compose(GaussianDpEvent(2.0), 5)))
        plan = tfdp_rec.PrivatePlan(epsilon=4.0, steps=20, **options)
        assert trained(plan, 7) == 7
        assert ledger.used == pytest.approx(
            first + limit.used(sampling.compose(GaussianDpEvent(plan.noise_multiplier), 7)), rel=1e-6
        )
        assert trained(plan, 40) == pytest.approx(13, abs=1) and 0.9 < ledger.used <= 1
        assert plan.accountant.epsilon() == 4.0
        with pytest.warns(UserWarning, match="budget is spent"):
            tfdp_rec.PrivatePlan(epsilon=4.0, steps=20, **options)
        with pytest.raises(ValueError, match="plan a larger epsilon"):
            tfdp_rec.PrivatePlan(epsilon=3.0, steps=20, **options)


@pytest.mark.slow
def test_the_checker_knows_a_filter(tmp_path):
    path = tmp_path / "ledger.jsonl"
    accountant = under(path, RenyiFilter(3.0, 1e-6))
    accountant.spend(GaussianDpEvent(20.0), "popularity counts")
    count(accountant, GaussianDpEvent(2.0), 300)
    accountant.close()
    assert checked(path, 1e-6, tmp_path) == 3.0
    with pytest.raises(AssertionError):
        checked(path, 1e-7, tmp_path)
    with opened(tmp_path / "gaussians.jsonl", GaussianFilter(3.0, 1e-6)) as ledger:
        ledger.pay(GaussianDpEvent(ledger.limit.limit**-0.5))
    assert checked(tmp_path / "gaussians.jsonl", 1e-6, tmp_path) == pytest.approx(3.0, abs=1e-3)
