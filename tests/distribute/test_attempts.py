"""The count of attempts: never below what was dispatched, whatever is killed when, and each at the price of its day."""

import subprocess
import sys
import threading

import pytest
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.ledger import BrokenLedger, Ledger, Snapshot, read
from tfdp_rec.core.ground.files import hold
from tfdp_rec.distribute.attempts import LEDGER, Attempts, open_attempts
from tfdp_rec.distribute.checkpoint import Checkpoints
from tfdp_rec.privacy import PoissonSampling

ONE, TWO = GaussianDpEvent(1.0), GaussianDpEvent(2.0)
SAMPLING = PoissonSampling(1000, 10, unit="user")


def attempts_in(folder, sampling=SAMPLING, data_changed=False):
    return open_attempts(str(folder), sampling, data_changed)


def on_disk(folder):
    return read(folder / LEDGER).steps


def runs(attempts):
    return [(entry.event, entry.steps) for entry in attempts.paid_entries()]


def test_no_more_are_made_than_were_reserved():
    attempts = Attempts()
    block = attempts.reserve(ONE, 3)
    assert [attempts.take(block) for _ in range(5)] == [True, True, True, False, False]
    assert attempts.count == 3 and not len(attempts.paid_entries())


def test_earlier_steps_are_those_of_a_ledger(tmp_path):
    with pytest.raises(ValueError, match="earlier_steps are steps in ledger="):
        open_attempts(str(tmp_path), SAMPLING, False, earlier=3)
    with Ledger(tmp_path / "own.jsonl", "user", Snapshot(1000, "user"), SAMPLING.adjacency) as ledger:
        attempts = open_attempts(None, SAMPLING, False, ledger)
        attempts.reserve(ONE, 4)
        assert open_attempts(None, SAMPLING, False, ledger, earlier=3).count == 1
        for earlier in (-1, 1.5):
            with pytest.raises(ValueError, match="whole number of at least 0"):
                open_attempts(None, SAMPLING, False, ledger, earlier=earlier)
        with pytest.raises(ValueError, match="holds 4 steps, fewer than the 5"):
            open_attempts(None, SAMPLING, False, ledger, earlier=5)


def test_a_block_is_paid_for_before_its_first_attempt(tmp_path):
    attempts = attempts_in(tmp_path)
    block = attempts.reserve(ONE, 10)
    assert on_disk(tmp_path) == 10  # a coordinator killed now has made at most these
    attempts.take(block)
    assert attempts.count == 1 and on_disk(tmp_path) == 10
    attempts.close()
    assert attempts.count == on_disk(tmp_path) == 1


def test_what_was_not_made_is_given_back_with_the_next_block(tmp_path):
    attempts = attempts_in(tmp_path)
    first = attempts.reserve(ONE, 10)
    for _ in range(4):
        attempts.take(first)
    second = attempts.reserve(TWO, 5)
    assert on_disk(tmp_path) == 9
    assert not attempts.take(first)  # a step of the block before that is only tried again now
    attempts.take(second)
    attempts.close()
    assert runs(attempts) == [(ONE, 4), (TWO, 1)] == runs(attempts_in(tmp_path))


def test_a_count_that_is_read_again_goes_on(tmp_path):
    killed = attempts_in(tmp_path)
    killed.reserve(ONE, 10)
    killed._payments.ledger.close()  # as by a kill: nothing is given back
    again = attempts_in(tmp_path)
    again.take(again.reserve(ONE, 5))
    again.close()
    assert again.count == 11 and runs(again) == [(ONE, 10), (ONE, 1)]


def test_threads_share_a_block_exactly():
    attempts = Attempts()
    block = attempts.reserve(ONE, 1000)
    taken = []
    worker = lambda: taken.extend(attempts.take(block) for _ in range(400))  # noqa: E731
    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 1000 and len(taken) == 1600


def test_the_past_keeps_its_price_when_the_data_grow(tmp_path):
    """200 steps at q = 0.1, the data grown a hundredfold: the past was priced under the new sampling, at a tenth."""
    small, large = PoissonSampling(1000, 100, unit="user"), PoissonSampling(100_000, 100, unit="user")
    attempts = attempts_in(tmp_path, small)
    block = attempts.reserve(ONE, 200)
    assert all(attempts.take(block) for _ in range(200))
    attempts.close()
    spent = Accountant(ONE, small, 1e-6, "rdp").epsilon(200)
    with pytest.raises(BrokenLedger, match="data_changed=True"):
        attempts_in(tmp_path, large)
    grown = attempts_in(tmp_path, large, data_changed=True)
    assert [entry.sampling for entry in grown.paid_entries()] == [small.get_state()]
    assert spent > 10 and read(tmp_path / LEDGER).epsilon(1e-6, "rdp") == pytest.approx(spent)


def test_what_has_no_guarantee_costs_infinity_ever_after(tmp_path):
    attempts = attempts_in(tmp_path)
    attempts.take(attempts.reserve(NonPrivateDpEvent(), 1))
    attempts.close()
    assert read(tmp_path / LEDGER).epsilon(1e-6) == float("inf")
    assert runs(attempts_in(tmp_path)) == [(NonPrivateDpEvent(), 1)]


def test_a_directory_has_one_trainer_in_and_across_processes(tmp_path):
    attempts = attempts_in(tmp_path)
    with pytest.raises(ValueError, match="is in use"):
        attempts_in(tmp_path)
    attempts.close()
    attempts_in(tmp_path)


class OneNumber:
    """A server's state."""

    def __init__(self):
        self.value = "7"

    def files(self):
        return ["0-0"]

    def save(self, folder):
        with open(f"{folder}/0-0", "w") as file:
            file.write(self.value)

    def restore(self, folder):
        with open(f"{folder}/0-0") as file:
            self.value = file.read()


@pytest.fixture
def trained(tmp_path):
    """A directory in which 40 attempts were made, with a checkpoint."""
    attempts, checkpoints = attempts_in(tmp_path), Checkpoints(str(tmp_path), [OneNumber()], {"mechanism": "some"})
    block = attempts.reserve(ONE, 30)
    assert all(attempts.take(block) for _ in range(30))
    older = (tmp_path / LEDGER).read_bytes()
    block = attempts.reserve(ONE, 10)
    assert all(attempts.take(block) for _ in range(10))
    checkpoints.save(attempts.count, attempts.mark)
    attempts.close()
    return tmp_path, checkpoints, older


def test_a_ledger_that_saw_the_checkpoint_is_taken(trained):
    folder, checkpoints, _ = trained
    attempts = attempts_in(folder)
    attempts.refuse_forgetting(checkpoints)
    assert attempts.count == 40 and checkpoints.restore() == 40


@pytest.mark.parametrize("how", ["deleted", "older", "another"])
def test_a_ledger_that_was_deleted_or_put_back_is_refused(trained, how):
    folder, checkpoints, older = trained
    (folder / LEDGER).unlink()
    if how == "older":
        (folder / LEDGER).write_bytes(older)
    attempts = attempts_in(folder)
    if how == "another":
        block = attempts.reserve(ONE, 50)
        assert all(attempts.take(block) for _ in range(50))
    with pytest.raises(BrokenLedger, match="Restore the (newest|right)"):
        attempts.refuse_forgetting(checkpoints)


@pytest.mark.parametrize("steps", [30, 40, 50])
def test_a_peers_ledger_is_refused_behind_the_checkpoint_and_ahead_of_it(trained, tmp_path_factory, steps):
    """Another training's ledger on the same data, given as `ledger=`: it lacks what the checkpoint has seen."""
    folder, checkpoints, _ = trained
    path = tmp_path_factory.mktemp("peer") / LEDGER
    with Ledger(path, SAMPLING.unit, Snapshot(SAMPLING.num_units, SAMPLING.unit), SAMPLING.adjacency) as peers:
        block = (peer := open_attempts(None, SAMPLING, False, peers)).reserve(ONE, steps)
        assert all(peer.take(block) for _ in range(steps))
        peer.close()
        again = open_attempts(str(folder), SAMPLING, False, peers)
        with pytest.raises(BrokenLedger, match="Restore the (newest|right)"):
            again.refuse_forgetting(checkpoints)
    own = Ledger(folder / LEDGER, SAMPLING.unit, Snapshot(SAMPLING.num_units, SAMPLING.unit), SAMPLING.adjacency)
    right = open_attempts(str(folder), SAMPLING, False, own)
    right.refuse_forgetting(checkpoints)
    assert right.count == checkpoints.restore() == 40 and runs(right) == [(ONE, 40)]


@pytest.mark.parametrize("name", ["server-0/0-0", "training.json"])
@pytest.mark.parametrize("how", ["a bit", "gone"])
def test_a_checkpoint_with_a_flipped_bit_is_refused_by_the_files_name(trained, name, how):
    folder, checkpoints, _ = trained
    (found,) = folder.glob(f"*/{name}")
    if how == "gone" and name == "training.json":
        pytest.skip("a checkpoint is its header")
    if how == "gone":
        found.unlink()
    else:
        content = bytearray(found.read_bytes())
        content[len(content) // 2] ^= 1
        found.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} was changed after it was written") as refused:
        checkpoints.restore()
    assert "\n" not in str(refused.value)


def test_a_checkpoint_of_another_training_is_refused(trained):
    folder, _, _ = trained
    with pytest.raises(ValueError, match="its mechanism is some, here it is other"):
        Checkpoints(str(folder), [OneNumber()], {"mechanism": "other"}).restore()


def test_a_directory_belongs_to_one_process_as_long_as_it_lives(tmp_path):
    script = "import sys, tfdp_rec.core.ground.files as f; f.hold(sys.argv[1]); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        try:
            assert other.stdout.readline() == "1\n"
            with pytest.raises(ValueError, match="Another process trains"):
                hold(str(tmp_path))
        finally:
            other.kill()
    hold(str(tmp_path))
    hold(str(tmp_path))  # again by the same process: a second trainer, which goes on from the first
