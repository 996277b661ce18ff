"""docs/ledger-a-day.md runs as it stands: one ledger a unit, and the checker of docs/ledger.md agrees with each."""

import pathlib
import re

import pytest
from checker import checked
from dp_accounting import GaussianDpEvent

from tfdp_rec.core.claim.events import REPLACE
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.federated import AttentionMechanism
from tfdp_rec.privacy import Accountant, BrokenLedger, Ledger, PoissonSampling, Snapshot

pytestmark = pytest.mark.slow  # three searches by PLD, a hundred answers
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "ledger-a-day.md"


@pytest.fixture(scope="module")
def day(world, tmp_path_factory):
    """What the page's program leaves behind: its names, in the folder that it ran in."""
    from tfdp_rec.federated import serving

    folder = tmp_path_factory.mktemp("day")
    mechanism = AttentionMechanism(3, 2.0, 1e-5, padding=0.2)
    serving.export_client(world.model(), world.catalogue, folder / "bundle", mechanism, history_length=5, tflite=False)
    names = {"bundle": folder / "bundle"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)):
            exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), names)
    return folder, names


def test_the_users_ledger_is_the_accountants_and_the_checkers(day, tmp_path):
    folder, names = day
    path = folder / "ledger.jsonl"
    assert names["epsilon"] == pytest.approx(checked(path, 1e-6, tmp_path), rel=1e-8)  # sums of FFTs
    assert names["epsilon"] == pytest.approx(read(path).epsilon(1e-6), rel=1e-9)
    paid = [(payment.label, payment.steps) for payment in read(path).paid]
    assert paid == [("training", 20), ("training", 15), ("popularity counts", 0)]


def test_it_is_what_was_done_and_no_more(day):
    """The oracle: twenty steps at 1/40, fifteen at 1/60, a count; as two accountants that know of no ledger."""
    folder, names = day
    noise = GaussianDpEvent(names["plan"].noise_multiplier)
    small, large = (PoissonSampling(units, 100, unit="user") for units in (4_000, 6_000))
    morning = Accountant(noise, small, 1e-6)
    oracle = Accountant(noise, large, 1e-6)
    oracle.spend(morning.dp_event(20), "the morning")
    oracle.spend(GaussianDpEvent(30.0), "popularity counts")
    assert names["epsilon"] == pytest.approx(oracle.epsilon(15), rel=1e-6)
    assert int(names["model"].optimizer.iterations) == names["model"].optimizer.privacy_history.snapshot().steps == 35
    assert (folder / "servable").is_dir() and (folder / "morning.keras").is_file()


def test_the_phones_ledger_is_its_own(day, tmp_path):
    folder, names = day
    path = folder / "phone.jsonl"
    assert len(read(path).paid) == 100 and names["phone_epsilon"] > 1
    assert names["phone_epsilon"] == pytest.approx(checked(path, 1e-5, tmp_path), rel=2e-3)
    with pytest.raises(BrokenLedger, match="no single epsilon holds for both"):
        Ledger(folder / "ledger.jsonl", "click", Snapshot(None, "clicks"), REPLACE)
