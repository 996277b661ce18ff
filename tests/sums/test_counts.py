"""Private counts: what one user gives is at most 1 in ℓ₂, by brute force; the event is dp-accounting's."""

import functools
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.data import Interactions
from tfdp_rec.datasets.log import Catalogue, log_of
from tfdp_rec.privacy import Accountant, PoissonSampling, private_counts
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.sums.counts import item_weights
from tfdp_rec.sums.fixed_point import ONE
from tfdp_rec.sums.total import Summand, total

CATALOGUE = Catalogue([3, 1, 4, 15, 9, 2, 6])
HISTORY = st.lists(st.sampled_from([3, 1, 4, 15, 9, 2, 6, 77]), max_size=12)


def exact(histories, typical=None, catalogue=CATALOGUE):
    given = functools.partial(item_weights, typical=typical)
    return total(log_of(histories), catalogue, Summand(given, len(catalogue)))


@settings(deadline=None)
@given(st.lists(HISTORY, min_size=1, max_size=6), st.integers(0, 5), HISTORY, st.sampled_from([None, 1, 3, 20]))
def test_one_user_more_less_or_other_moves_the_counts_by_at_most_one(histories, at, other, typical):
    at %= len(histories)
    emptied = histories[:at] + [[]] + histories[at + 1 :]
    moved = exact(histories, typical) - exact(emptied, typical)
    assert sum(int(step) ** 2 for step in moved) <= ONE**2
    swapped = histories[:at] + [other] + histories[at + 1 :]
    moved = exact(swapped, typical) - exact(emptied, typical)
    assert sum(int(step) ** 2 for step in moved) <= ONE**2


@pytest.mark.parametrize("typical", [None, 20])
def test_a_user_of_a_hundred_thousand_items_gives_no_more(typical):
    catalogue = Catalogue(np.arange(1, 100_001))
    given = exact([catalogue.ids], typical, catalogue)
    squares = int((given.astype(object) ** 2).sum())
    assert squares <= ONE**2
    if typical is None:
        assert Fraction(squares, ONE**2) > Fraction(99, 100)  # and uses what there is


def test_weights_are_those_of_the_definition():
    assert (exact([[3, 1, 3, 77]]) / ONE).round(5).tolist() == [0.70711, 0.70711, 0, 0, 0, 0, 0]
    given = exact([[3, 1, 4, 15]], typical=1) / ONE  # √1/4 rather than 1/√4
    assert given[:4] == pytest.approx(0.25, abs=1e-6)


def test_with_a_typical_user_long_histories_give_less():
    catalogue = Catalogue(np.arange(1, 1001))
    for length in (1, 5, 19, 20, 21, 144, 1000):
        norm = np.linalg.norm(exact([catalogue.ids[:length]], 20, catalogue) / ONE)
        assert norm == pytest.approx(min(1, (20 / length) ** 0.5), rel=2e-3)


def test_counts_come_with_noise_and_the_event_of_that_noise():
    people = [[3]] * 400 + [[1, 4]] * 100
    counted = private_counts(people, CATALOGUE, noise_multiplier=2.0, words=seeded(0))
    assert counted.event == NonPrivateDpEvent()  # noise that can be drawn again hides nothing
    assert counted.values[:3] == pytest.approx([400, 70.7, 70.7], abs=12)
    one, other = (private_counts(people, CATALOGUE, noise_multiplier=2.0) for _ in range(2))
    assert one.event == GaussianDpEvent(2.0) and (one.values != other.values).mean() > 0.9


def test_an_accountant_pays_for_noise_that_can_be_drawn_again_without_a_guarantee():
    accountant = Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10, unit="user"), delta=1e-6)
    private_counts([[3]], CATALOGUE, noise_multiplier=2.0, accountant=accountant)
    assert accountant.epsilon() < 4
    private_counts([[3]], CATALOGUE, noise_multiplier=2.0, accountant=accountant, words=seeded(0))
    assert accountant.epsilon() == np.inf


def test_a_log_is_counted_by_its_own_numbers_alone_and_nothing_is_paid_for_others():
    log = Interactions.read({"u": [0, 1, 2], "i": [318, 318, 3]}, user="u", item="i", items=[318, 296, 3])
    assert private_counts(log, log.catalogue, noise_multiplier=1e-3).values == pytest.approx([2, 0, 1], abs=0.02)
    accountant = Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10, unit="user"), delta=1e-6)
    with pytest.raises(ValueError, match="the numbers 1 to 3"):
        private_counts(log, Catalogue([318, 296, 3]), noise_multiplier=1.0, accountant=accountant)
    assert not accountant.spent_besides
    with pytest.raises(ValueError, match="the numbers 1 to 3"):
        SpectralRecommender([318, 296, 3], 1.0, 1e-6).fit(log)


def test_a_dict_is_no_list_of_histories_and_an_id_that_is_missing_is_unknown():
    with pytest.raises(TypeError, match="keys would be taken for users"):
        private_counts({1: [3]}, CATALOGUE, noise_multiplier=1.0)
    counted = private_counts([[3, None], [None], [1, float("nan")]], CATALOGUE, noise_multiplier=1e-3)
    assert counted.values == pytest.approx([1, 1, 0, 0, 0, 0, 0], abs=0.02)


@pytest.mark.parametrize("change, words", [({"noise_multiplier": 0}, "noise_multiplier"), ({"typical": 0}, "typical")])
def test_bad_arguments_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        private_counts([[3]], CATALOGUE, **{"noise_multiplier": 1.0, **change})


SPELLINGS = [
    {3, 1}, frozenset([1, 3]), {1: 0, 3: 0}.keys(), (1, 3), [1.0, 3.0, None], [3.0, 1.0], [1, 3, float("nan")],
    np.ma.array([1, 3, 2], mask=[0, 0, 1]), [1.0, 3.0, 2.5], np.array([1, 3, 2.5, np.inf, -np.inf]), [1, 3, 2**70, "2"],
    [1, 3, "two"], ["1", "3", "2.5"], [b"1", b"3", b"\xff"], ["1", "3", str(2**70)], np.array([1, 3, 2.5], np.float16),
]  # fmt: skip


@pytest.mark.filterwarnings("error")  # a warning would tell of the user, as an error does
@pytest.mark.parametrize("history", SPELLINGS)
def test_each_way_to_name_items_counts_them(history):
    """Sets counted as users without items, and 2.5 as 2."""
    catalogue = Catalogue([1, 2, 3])
    found, listed = (private_counts([one] * 50, catalogue, noise_multiplier=1e-3) for one in (history, [1, 3]))
    assert found.values == pytest.approx(listed.values, abs=0.1) and listed.values[0] > 10


@pytest.mark.parametrize("history", [iter([1, 3]), {1: 0}.values(), 3, (each for each in [1])])
def test_what_numpy_cannot_go_through_is_refused(history):
    with pytest.raises(TypeError, match="give each user's items as a list or an array"):
        private_counts([[1], history], CATALOGUE, noise_multiplier=1.0)
