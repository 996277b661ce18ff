"""Rounds of a cluster's training, without a cluster: what is taken is counted, and nothing is released in between."""

import threading
from types import SimpleNamespace

import pytest
from dp_accounting import GaussianDpEvent

from tfdp_rec.distribute.attempts import Attempts, open_attempts
from tfdp_rec.distribute.rounds import Rounds
from tfdp_rec.distribute.trainer import ParameterServerTrainer
from tfdp_rec.privacy import PoissonSampling

SAMPLING = PoissonSampling(1000, 10, unit="user")


def rounds_of(attempts, dispatch):
    """Rounds without a cluster; `dispatch(attempt, number)` stands for the workers."""
    rounds = Rounds(None, None, None, optimizer=None, source=None, attempts=attempts, watch=None)
    rounds._event, rounds._rate, rounds.counted = lambda: GaussianDpEvent(1.0), lambda: 0.0, []
    rounds._count, rounds._dispatch = rounds.counted.append, dispatch
    return rounds


@pytest.mark.parametrize("directory", [False, True])
def test_after_ctrl_c_no_worker_takes_an_attempt_that_is_not_counted(tmp_path, directory):
    """The ledger had 600 steps, and the accountant 588: workers went on with what was scheduled."""
    attempts, taken = open_attempts(str(tmp_path), SAMPLING, False) if directory else Attempts(), []

    def interrupted(attempt, number):
        taken.extend(attempts.take(1) for _ in range(3))
        raise KeyboardInterrupt

    rounds = rounds_of(attempts, interrupted)
    with pytest.raises(KeyboardInterrupt):
        rounds.make(10)
    taken.extend(attempts.take(1) for _ in range(5))  # workers, later
    assert taken == [True] * 3 + [False] * 5 and rounds.counted == [3] and attempts.count == 3


def test_attempts_that_cannot_be_given_back_count_as_made(tmp_path, monkeypatch):
    attempts = open_attempts(str(tmp_path), SAMPLING, False)

    def interrupted(attempt, number):
        raise KeyboardInterrupt

    def full(*arguments):
        raise OSError("No space left on device")

    rounds = rounds_of(attempts, interrupted)
    monkeypatch.setattr(attempts._payments, "give_back", full)
    with pytest.raises(OSError, match="No space left"):
        rounds.make(10)
    assert rounds.counted == [10] == [attempts.count] and not attempts.take(1)


def test_a_release_of_another_thread_waits_until_all_steps_are_counted(monkeypatch):
    """Released within a round, a model of 274 steps said that it had made 10."""
    order, waits = [], threading.Event()

    class Lock:
        """That of the rounds, which says when the other thread has come to it."""

        held = threading.RLock()

        def __enter__(self):
            if threading.current_thread() is other:
                waits.set()
            self.held.acquire()

        def __exit__(self, *exception):
            self.held.release()

    def steps(attempt, number):
        attempts.take(1)
        other.start()
        assert waits.wait(60) and not order

    monkeypatch.setattr("tfdp_rec.distribute.trainer.layers_within", lambda model: [])
    attempts, trainer = Attempts(), object.__new__(ParameterServerTrainer)
    trainer._rounds = rounds = rounds_of(attempts, steps)
    rounds.pause, rounds._count = Lock(), lambda made: order.append("counted")
    history = SimpleNamespace(merge=lambda found: order.append("history"))
    local = SimpleNamespace(compile=lambda **options: None, open_history=lambda: history)
    trainer._model_fn, trainer._optimizer_fn, trainer._compile_options = lambda: local, lambda: None, {}
    trainer._optimizer = SimpleNamespace(privacy_history=SimpleNamespace(snapshot=dict))
    trainer._watch = SimpleNamespace(greet=lambda: None, during=lambda work: work())
    trainer._served = SimpleNamespace(fetch=lambda model: order.append("weights"))
    trainer._refuse_unresumed, trainer.save = lambda act: None, lambda: order.append("saved")
    other = threading.Thread(target=trainer.model)
    rounds.make(10)
    other.join(60)
    assert order == ["counted", "weights", "history", "saved"]
