"""What a folder that is removed has paid stays somewhere, whoever else wrote to the run folder meanwhile."""

import json

import pytest
from dp_accounting import GaussianDpEvent

from tfdp_rec.own_log.folders import LEDGER, RUN, leave_ledger
from tfdp_rec.privacy import Ledger, Snapshot


@pytest.fixture
def kept(tmp_path):
    """A folder of a run that has paid, for the run folder `out`; and one more of the same."""

    def made(name, noise=2.0):
        folder = tmp_path / name
        folder.mkdir()
        ledger = Ledger(folder / LEDGER, "user", Snapshot(100, "a log"))
        ledger.pay(GaussianDpEvent(noise), label="sums")
        ledger.close()
        (folder / RUN).write_text(json.dumps({"out": str(tmp_path / "out")}))
        return folder

    return made


def test_two_runs_in_one_folder_leave_two_ledgers(kept, tmp_path):
    one, other, out = kept("one"), kept("other", 3.0), tmp_path / "out"
    for _ in range(2):  # the second time there is nothing to add
        leave_ledger(one)
        leave_ledger(other)
    assert sorted(file.name for file in out.iterdir()) == ["ledger-2.jsonl", LEDGER]
    assert (out / LEDGER).read_bytes() == (one / LEDGER).read_bytes()
    assert (out / "ledger-2.jsonl").read_bytes() == (other / LEDGER).read_bytes()


def test_one_that_was_handed_over_and_has_grown_is_left_alone(kept, tmp_path):
    one, out = kept("one"), tmp_path / "out"
    out.mkdir()
    grown = (one / LEDGER).read_bytes() + b'{"a further": "day"}\n'
    (out / LEDGER).write_bytes(grown)
    leave_ledger(one)
    assert [file.name for file in out.iterdir()] == [LEDGER] and (out / LEDGER).read_bytes() == grown
