"""The accountant against dp_accounting itself, and against what an accountant must never do."""

import math

import dp_accounting
import pytest
from counting import count
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)

from tfdp_rec.core.claim import composition
from tfdp_rec.core.claim.entries import Entries
from tfdp_rec.core.claim.events import PureDpEvent
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.privacy import Accountant, FixedOrder, PoissonSampling, calibrate_noise, epsilon_of

DELTA = 1e-6
USERS = PoissonSampling(num_units=110_794, expected_batch_size=1024, unit="user")


def accountant(event=None, sampling=USERS, by="rdp", **options):
    return Accountant(event or GaussianDpEvent(1.0), sampling, DELTA, by, **options)


def direct_epsilon(by, probability, noise, steps):
    library = {"rdp": dp_accounting.rdp.RdpAccountant, "pld": dp_accounting.pld.PLDAccountant}[by]()
    step = dp_accounting.PoissonSampledDpEvent(probability, GaussianDpEvent(noise))
    return library.compose(step, steps).get_epsilon(DELTA)


@pytest.mark.slow_cases("0.8-300-pld")
@pytest.mark.parametrize("by", ["rdp", "pld"])
@pytest.mark.parametrize("noise, steps", [(0.8, 300), (1.3, 2000)])
def test_epsilon_is_dp_accountings(by, noise, steps):
    ours = accountant(GaussianDpEvent(noise), by=by).epsilon(steps)
    direct = direct_epsilon(by, 1024 / 110_794, noise, steps)
    assert ours == pytest.approx(direct, rel=1e-6) and (by == "pld" or ours >= direct)


def sampled(noise, probability=0.01):
    return PoissonSampledDpEvent(probability, GaussianDpEvent(noise))


@pytest.mark.parametrize(
    "event",
    [
        ComposedDpEvent([GaussianDpEvent(20.0), SelfComposedDpEvent(sampled(1.0), 1000)]),
        ComposedDpEvent([sampled(2.0), SelfComposedDpEvent(ComposedDpEvent([sampled(2.0), GaussianDpEvent(9.0)]), 7)]),
        ComposedDpEvent([sampled(2.0, 1.0), sampled(1.0, 0.0), NoOpDpEvent()]),
        ComposedDpEvent([GaussianDpEvent(4.0), LaplaceDpEvent(3.0), PoissonSampledDpEvent(0.2, LaplaceDpEvent(2.0))]),
        ComposedDpEvent([]),
        NoOpDpEvent(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("by", ["rdp", "pld"])
def test_what_is_remembered_of_a_curve_changes_no_epsilon(by, event):
    library = {"rdp": dp_accounting.rdp.RdpAccountant, "pld": dp_accounting.pld.PLDAccountant}[by]()
    if not library.supports(event):
        with pytest.raises(ValueError, match="cannot account for"):
            epsilon_of(event, 1e-5, by)
        return
    direct = library.compose(event).get_epsilon(1e-5)
    assert [epsilon_of(event, 1e-5, by) for _ in range(2)] == pytest.approx([direct, direct], rel=1e-6)


def test_the_figures_of_the_main_job():
    assert accountant(GaussianDpEvent(1.0)).epsilon(2000) == pytest.approx(3.0, abs=0.05)
    assert accountant(GaussianDpEvent(0.8)).epsilon(2000) == pytest.approx(5.1, abs=0.05)


def test_orders_whose_series_do_not_end_are_left_out_without_a_word(caplog):
    noisy = Accountant(GaussianDpEvent(1.0321), PoissonSampling(3200, 512), 1e-6, "rdp")  # where few of them do
    assert 5 < noisy.epsilon(20) < 10 and not caplog.records


@pytest.mark.parametrize("by", ["rdp", "pld"])
def test_two_gaussians_on_one_batch_are_one(by):
    pair = accountant(ComposedDpEvent([GaussianDpEvent(3.0), GaussianDpEvent(4.0)]), by=by)
    assert pair.epsilon(500) == pytest.approx(direct_epsilon(by, 1024 / 110_794, 2.4, 500), rel=1e-6)


def test_epsilon_rises_with_steps_and_falls_with_noise():
    by_steps = [accountant().epsilon(steps) for steps in (0, 1, 10, 100, 1000)]
    by_noise = [accountant(GaussianDpEvent(noise)).epsilon(100) for noise in (0.5, 1, 2, 4)]
    assert by_steps[0] == 0 and by_steps == sorted(by_steps) and len(set(by_steps)) == 5
    assert by_noise == sorted(by_noise, reverse=True)


@pytest.mark.parametrize("event", [NonPrivateDpEvent(), GaussianDpEvent(0.0), ComposedDpEvent([NonPrivateDpEvent()])])
@pytest.mark.parametrize("by", ["rdp", "pld"])
@pytest.mark.parametrize("sampling", [USERS, FixedOrder(1000, 10)])
def test_without_a_guarantee_epsilon_is_infinite(event, by, sampling):
    counted = accountant(event, sampling, by)
    assert counted.epsilon(steps=1) == math.inf
    assert counted.max_steps(target_epsilon=100.0) == 0
    count(counted, event, 1)
    if sampling is USERS:
        count(counted, GaussianDpEvent(5.0), 10)
    assert counted.epsilon() == math.inf, "one step without a guarantee spoils all"


@pytest.mark.parametrize("by, noise, target", [("rdp", 1.0, 1.5), ("rdp", 1.0, 8.0), ("pld", 3.0, 0.5)])
def test_max_steps_is_the_last_that_fits(by, noise, target):
    counted = accountant(GaussianDpEvent(noise), by=by)
    most = counted.max_steps(target)
    assert counted.epsilon(most) <= target < counted.epsilon(most + 1)


def test_the_most_steps_of_all_fit_as_well():
    """10⁹ was the answer where 7.4 · 10⁸ fitted and a billion did not."""
    asked = []
    assert composition.most_steps(lambda steps: asked.append(steps) or steps / 7.4e8, 1.0, 0) == 740_000_000
    assert composition.most_steps(lambda steps: 0.0, 1.0, 0) == 10**9 and max(asked) <= 10**9



def test_max_steps_after_other_spending_and_other_noise():
    counted = accountant()
    alone = counted.max_steps(4.0)
    counted.spend(GaussianDpEvent(10.0), "popularity counts")
    with_counts = counted.max_steps(4.0)
    count(counted, GaussianDpEvent(0.9), 300)
    count(counted, GaussianDpEvent(1.0), 1)
    after_loud_steps = counted.max_steps(4.0)
    assert 301 < after_loud_steps < with_counts < alone
    assert counted.epsilon(after_loud_steps) <= 4.0 < counted.epsilon(after_loud_steps + 1)


def test_max_steps_ends_at_what_is_enough_and_is_not_more_where_less_fits():
    counted = accountant()
    most = counted.max_steps(4.0)
    assert counted.max_steps(4.0, enough=most - 7) == most - 7
    assert counted.max_steps(4.0, enough=most + 7) == counted.max_steps(4.0) == most
    count(counted, GaussianDpEvent(1.0), 9)
    assert counted.max_steps(4.0, enough=5) == most and counted.max_steps(4.0, enough=most - 7) == most - 7


def test_max_steps_where_none_fits():
    counted = accountant(GaussianDpEvent(0.3))
    assert counted.max_steps(0.5) == 0
    count(counted, GaussianDpEvent(0.3), 7)
    assert counted.max_steps(0.5) == 7


def test_steps_of_two_noises_are_composed_piece_by_piece():
    counted = accountant(GaussianDpEvent(2.0))
    count(counted, GaussianDpEvent(2.0), 100)
    count(counted, GaussianDpEvent(1.0), 50)
    library = dp_accounting.rdp.RdpAccountant()
    for noise, steps in ((2.0, 100), (1.0, 50 + 25)):
        library.compose(dp_accounting.PoissonSampledDpEvent(USERS.probability, GaussianDpEvent(noise)), steps)
    assert counted.steps == 150
    assert counted.epsilon(175) == pytest.approx(library.get_epsilon(DELTA), rel=1e-6)
    assert counted.epsilon(100) == accountant(GaussianDpEvent(2.0)).epsilon(100), "a look back"


def test_spending_once_costs_what_it_costs_alone():
    counted = accountant()
    counted.spend(GaussianDpEvent(4.0), "counts")
    assert counted.epsilon() == pytest.approx(direct_epsilon("rdp", 1.0, 4.0, 1), rel=1e-6)


def test_a_history_read_twice_is_counted_once():
    counted, again = accountant(), accountant()
    count(counted, counted.event, 10)
    for _ in range(2):
        again.spending.merge(counted.spending.history)
    assert again.steps == 10
    count(counted, counted.event, 5)
    again.spending.merge(counted.spending.history)
    assert again.steps == 15


def test_releases_of_a_person_under_hardly_any_noise_have_no_finite_epsilon():
    releases = ComposedDpEvent([GaussianDpEvent(1e-4), PureDpEvent(0.5)])
    assert math.isinf(epsilon_of(releases, DELTA))


def test_a_history_adds_its_uses_once_each_under_the_id_of_its_own():
    """A use that was made again under an equal event and label, before a state was read, was counted once."""
    counted, again = accountant(), accountant()
    counted.spend(GaussianDpEvent(20.0), "counts")
    for noise, label in ((2.0, "terms"), (20.0, "counts"), (2.0, "terms")):
        again.spend(GaussianDpEvent(noise), label)
    for _ in range(2):
        again.spending.merge(counted.spending.history)
    assert sorted(label for _, label in again.spent_besides) == ["counts", "counts", "terms", "terms"]
    for _ in range(2):
        counted.spending.merge(again.spending.history)
    assert counted.epsilon(0) == again.epsilon(0) and len(counted.spent_besides) == 4


def test_a_use_with_an_id_is_counted_once_whichever_program_counts_it():
    counted, again = accountant(), accountant()
    for each in (counted, again, again):
        each.spend(GaussianDpEvent(20.0), "counts", id="of Monday")
    again.spending.merge(counted.spending.history)
    assert again.spent_besides == [(GaussianDpEvent(20.0), "counts")]


@pytest.mark.parametrize("by", ["rdp", "pld"])
@pytest.mark.parametrize("event", [GaussianDpEvent(math.inf), LaplaceDpEvent(math.inf), GaussianDpEvent(1e300)])
def test_noise_without_an_end_is_refused_in_words(event, by):
    for make in (lambda inner: inner, lambda inner: PoissonSampledDpEvent(0.1, inner)):
        with pytest.raises(ValueError, match="noise_multiplier must be from 0 to"):
            epsilon_of(make(event), DELTA, by)


@pytest.mark.parametrize("epsilon", [500.0, 800.0, 1e6])
def test_a_release_of_any_pure_epsilon_has_a_price(epsilon):
    """It was an OverflowError from 710 on."""
    found = epsilon_of(ComposedDpEvent([PureDpEvent(epsilon), PureDpEvent(1.0)]), DELTA)
    assert epsilon <= found <= epsilon + 1.0


def test_a_history_survives_json():
    counted = accountant()
    count(counted, GaussianDpEvent(1.0), 40)
    count(counted, ComposedDpEvent([GaussianDpEvent(3.0), GaussianDpEvent(1.0)]), 2)
    counted.spend(dp_accounting.LaplaceDpEvent(9.0), "how many")
    again = accountant()
    again.spending.merge(Entries.loads(counted.spending.history.dumps()))
    assert (again.steps, again.epsilon()) == (42, counted.epsilon())


@pytest.mark.parametrize("delta", [0, 1, -1e-9, 2, math.nan])
def test_delta_out_of_range(delta):
    with pytest.raises(ValueError, match="delta must be above 0 and below 1"):
        Accountant(GaussianDpEvent(1.0), USERS, delta)


def test_a_delta_that_promises_nothing_is_refused_unless_insisted_on():
    with pytest.raises(ValueError, match="allow_large_delta=True"):
        Accountant(GaussianDpEvent(1.0), USERS, delta=1e-4)
    assert Accountant(GaussianDpEvent(1.0), USERS, 1e-4, "rdp", allow_large_delta=True).epsilon(10) > 0


def test_unknown_sampling_event_and_accountant_are_refused():
    with pytest.raises(TypeError, match="sampling must be"):
        Accountant(GaussianDpEvent(1.0), 0.01, DELTA)
    with pytest.raises(TypeError, match="event must be"):
        Accountant(1.1, USERS, DELTA)
    with pytest.raises(ValueError, match="not an event this accountant knows"):
        Accountant(dp_accounting.UnsupportedDpEvent(), USERS, DELTA)
    with pytest.raises(ValueError, match='must be "pld" or "rdp"'):
        Accountant(GaussianDpEvent(1.0), USERS, DELTA, accountant="moments")
    with pytest.raises(ValueError, match="noise_multiplier must be from 0"):
        Accountant(GaussianDpEvent(-1.0), USERS, DELTA)
    with pytest.raises(ValueError, match='try accountant="pld"'):
        accountant(dp_accounting.LaplaceDpEvent(1.0), by="rdp")
    with pytest.raises(ValueError, match="epsilon must be positive"):
        accountant().max_steps(0)
    with pytest.raises(ValueError, match="steps must be a whole number"):
        accountant().epsilon(steps=-1)


@pytest.mark.parametrize("by, target, steps", [("rdp", 1.0, 500), ("rdp", 8.0, 3000), ("pld", 0.4, 400)])
def test_calibrated_noise_fits_the_budget_and_hardly_more(by, target, steps):
    noise = calibrate_noise(target, DELTA, USERS, steps, accountant=by)
    assert accountant(GaussianDpEvent(noise), by=by).epsilon(steps) <= target
    assert accountant(GaussianDpEvent(noise * 0.998), by=by).epsilon(steps) > target


@pytest.mark.slow
def test_calibration_computes_few_prices_and_one_on_the_fine_grid(monkeypatch):
    """Each takes from a tenth of a second to some seconds."""
    grids, by_pld = [], composition._pld_epsilon
    monkeypatch.setattr(composition, "_pld_epsilon", lambda e, d, grid: grids.append(grid) or by_pld(e, d, grid))
    noise = calibrate_noise(8.0, 1e-6, PoissonSampling(20_000, 500), 200)
    assert grids.count(1e-4) == 1 and len(grids) < 9
    assert 7.995 < accountant(GaussianDpEvent(noise), PoissonSampling(20_000, 500), "pld").epsilon(200) <= 8.0


@pytest.mark.fast_cases("7.99")
@pytest.mark.parametrize("used", [7.7, 7.99])
def test_a_rest_that_a_quick_price_overlooks_is_used(used):
    """RDP alone prices what is spent above the budget, PLD does not: the second of two days, say."""
    spent = GaussianDpEvent(noise_of_one_release(used, 1e-6))
    sampling = PoissonSampling(100_000, 1000)
    found = calibrate_noise(8.0, 1e-6, sampling, 100, spent=[(spent, "a day before")])
    steps = sampling.compose_history([(GaussianDpEvent(found), 100)])
    assert 7.99 < epsilon_of(ComposedDpEvent([spent, steps]), 1e-6) <= 8


def test_calibration_of_two_gaussians_with_other_spending():
    def step(noise):
        return ComposedDpEvent([GaussianDpEvent(noise), GaussianDpEvent(5 * noise)])

    spent = [(GaussianDpEvent(20.0), "popularity counts")]
    noise = calibrate_noise(2.0, DELTA, USERS, 1000, "rdp", make_event=step, spent=spent)
    counted = accountant(step(noise))
    counted.spend(*spent[0])
    assert counted.epsilon(1000) <= 2.0 < counted.epsilon(1010)


def test_calibration_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="No noise multiplier"):
        calibrate_noise(1.0, DELTA, USERS, 10, "rdp", spent=[(GaussianDpEvent(0.5), "loud counts")])
    with pytest.raises(ValueError, match="epsilon must be positive"):
        calibrate_noise(-1.0, DELTA, USERS, 10)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        calibrate_noise(1.0, DELTA, USERS, 0)


def test_a_hopeless_mechanism_is_still_accounted_for_and_never_too_low():
    loud = ComposedDpEvent([USERS.compose(GaussianDpEvent(0.1), 2000)])
    assert 1000 < epsilon_of(loud, DELTA, "pld") <= epsilon_of(loud, DELTA, "rdp") < math.inf


@pytest.mark.slow
def test_pld_with_the_wider_grid_stays_an_upper_bound_near_the_fine_one(monkeypatch):
    event = USERS.compose(GaussianDpEvent(0.6), 200)
    fine = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4).compose(event).get_epsilon(DELTA)
    assert fine <= epsilon_of(event, DELTA, "pld", coarser=16.0) < fine + 0.01
    monkeypatch.setattr(composition, "_PLD_FINE_UP_TO", fine / 3)
    assert fine < epsilon_of(event, DELTA, "pld") < fine + 0.01


@pytest.mark.parametrize("noise", [1e4, 1e5, 1e7])
def test_rounding_never_makes_huge_noise_free(noise):
    """In double precision a step's divergence may come out as less than it is, or negative."""
    sampling, delta = PoissonSampling(100_000, 1024), 1e-12
    q, steps = sampling.probability, 2000
    total_variation = steps * math.log1p(q**2 * math.expm1(noise**-2))  # of the order 2, exact
    assert epsilon_of(sampling.compose(GaussianDpEvent(noise), steps), delta, "rdp") > 0
    assert total_variation > delta**2, "the bound that would allow an epsilon of 0"


def test_a_budget_too_small_for_the_grid_is_refused_in_words():
    sampling = PoissonSampling(100_000, 1024)
    for by in ("pld", "rdp"):
        with pytest.raises(ValueError, match="No noise multiplier|cannot show an epsilon as small"):
            calibrate_noise(1e-4, 1e-6, sampling, 2000, by)


def test_laplace_steps_are_accounted_for_by_pld_and_never_for_nothing():
    event = dp_accounting.LaplaceDpEvent(4.0)
    sampling = PoissonSampling(1000, 10)
    with pytest.raises(ValueError, match="cannot account for"):
        epsilon_of(sampling.compose(event, 10), 1e-4, "rdp")
    counted = Accountant(event, sampling, 1e-4, "pld")
    most = counted.max_steps(0.5)
    assert counted.epsilon(most) <= 0.5 < counted.epsilon(most + 1)
    noise = calibrate_noise(0.5, 1e-4, sampling, most, make_event=dp_accounting.LaplaceDpEvent)
    assert noise == pytest.approx(4.0, rel=0.02)
