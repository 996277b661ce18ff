"""Patience with remote calls: a silent process is named in time, and a wait can be interrupted."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from tfdp_rec.distribute.connection import ServerLost, Silence, Watch


class Listed:
    """A cluster some of whose processes say nothing."""

    def __init__(self, silent):
        self.places = silent

    def silent(self):
        return dict(self.places)

    def in_words(self, names):
        return ", ".join(names)


@pytest.fixture
def asked_often(monkeypatch):
    monkeypatch.setattr("tfdp_rec.distribute.connection._ASK_EVERY", 0.02)


def test_what_a_call_gives_and_raises_comes_through(asked_often):
    watch = Watch(Listed({}), 0.1)
    assert watch.during(lambda: time.sleep(0.3) or 7) == 7, "a slow call is not a silent server"

    def fails():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        watch.during(fails)


def test_a_call_to_a_silent_server_ends(asked_often):
    forever, began = threading.Event(), time.monotonic()
    with pytest.raises(Silence, match="^No answer from ps 0. Start what is down or frozen again") as problem:
        Watch(Listed({"ps 0": "127.0.0.1:1"}), 0.2).during(forever.wait)
    assert 0.2 <= time.monotonic() - began and problem.value.fact == "No answer from ps 0."
    forever.set()


def test_who_answers_again_in_time_is_forgiven(asked_often, monkeypatch):
    """By a clock that goes on 0.1 s each time it is asked: silent for 0.3 s, then heard for a whole one."""
    asked, done = iter(range(1, 1000)), threading.Event()

    class Recovers(Listed):
        now = 0.0

        def silent(self):
            number = next(asked)
            self.now = number / 10
            if number == 13:
                done.set()
            return dict(self.places) if number <= 3 else {}

    cluster = Recovers({"ps 0": "127.0.0.1:1"})
    monkeypatch.setattr("tfdp_rec.distribute.connection.time", SimpleNamespace(monotonic=lambda: cluster.now))
    assert Watch(cluster, 0.5).during(done.wait)
    assert next(asked) > 13


def test_a_dead_worker_holds_nothing_up_and_a_dead_server_does():
    Watch(Listed({"worker 1": "127.0.0.1:1"}), 0.0).greet()  # nothing listens there: TensorFlow knows at once
    with pytest.raises(Silence, match="ps 0"):
        Watch(Listed({"ps 0": "127.0.0.1:1"}), 0.0).greet()


def test_a_server_that_is_gone_is_lost_before_patience_ends(asked_often, monkeypatch):
    monkeypatch.setattr("tfdp_rec.distribute.connection._GONE", 0.2)
    watch, forever, began = Watch(Listed({"ps 0": "127.0.0.1:1"}), 60.0), threading.Event(), time.monotonic()
    for waits in (watch.greet, lambda: watch.during(forever.wait)):
        with pytest.raises(ServerLost, match=r"Nothing listens at ps 0\)"):
            waits()
    assert 0.4 <= time.monotonic() - began < 60
    forever.set()


def test_a_frozen_server_is_not_gone(asked_often, monkeypatch):
    monkeypatch.setattr("tfdp_rec.distribute.connection._GONE", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        frozen = Listed({"ps 0": f"127.0.0.1:{mute.getsockname()[1]}"})
        with pytest.raises(Silence, match="No answer from ps 0"):
            Watch(frozen, 0.3).greet()


def test_steps_that_do_not_end_though_all_answer():
    assert "seconds_without_progress" in str(Watch(Listed({}), 5).no_step())
    silent = Watch(Listed({"worker 0": "a:1"}), 5).no_step()
    assert silent.fact == "No step ended for 5 s. No answer from worker 0."
