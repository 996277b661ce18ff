"""Patience with remote calls: a silent process is named in time, and a wait can be interrupted."""

import socket
import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdp_rec.core.ground.shared_graphs import SharedGraph
from tfdp_rec.distribute import connection
from tfdp_rec.distribute.connection import _GONE, ServerLost, Silence, Watch


class Listed:
    """A cluster some of whose processes say nothing; each time it is asked, its clock goes on a second."""

    def __init__(self, silent):
        self.places, self.now = silent, 0

    def silent(self):
        self.now += 1
        return dict(self.places)

    def describe(self, names):
        return ", ".join(names)


@pytest.fixture
def watch_of(monkeypatch):
    """A watch that goes by the clock of its cluster, and asks as often as it can."""
    monkeypatch.setattr("tfdp_rec.distribute.connection._ASK_EVERY", 0.01)

    def of(cluster, patience):
        clock = SimpleNamespace(monotonic=lambda: cluster.now, sleep=lambda seconds: None)
        monkeypatch.setattr("tfdp_rec.distribute.connection.time", clock)
        return Watch(cluster, patience)

    return of


def test_what_a_call_gives_and_raises_comes_through(watch_of):
    done = threading.Event()

    class Slow(Listed):
        def silent(self):
            if self.now == 5:
                done.set()
            return super().silent()

    watch = watch_of(Slow({}), 3)
    assert watch.during(lambda: done.wait() and 7) == 7, "a slow call is not a silent server"

    def fails():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        watch.during(fails)


def test_a_call_to_a_silent_server_ends(watch_of):
    forever, cluster = threading.Event(), Listed({"ps 0": "127.0.0.1:1"})
    with pytest.raises(Silence, match="^No answer from ps 0. Start what is down or frozen again") as problem:
        watch_of(cluster, 3).during(forever.wait)
    assert cluster.now == 3 and problem.value.fact == "No answer from ps 0."
    forever.set()


def test_who_answers_again_in_time_is_forgiven(watch_of):
    """Silent for 3 s, then heard for 10: what it is forgiven is not counted on."""
    done = threading.Event()

    class Recovers(Listed):
        def silent(self):
            places = super().silent()
            if self.now == 13:
                done.set()
            return places if self.now <= 3 else {}

    cluster = Recovers({"ps 0": "127.0.0.1:1"})
    assert watch_of(cluster, 5).during(done.wait)
    assert cluster.now >= 13


def test_a_dead_worker_holds_nothing_up_and_a_dead_server_does():
    Watch(Listed({"worker 1": "127.0.0.1:1"}), 0.0).greet()  # nothing listens there: TensorFlow knows at once
    with pytest.raises(Silence, match="ps 0"):
        Watch(Listed({"ps 0": "127.0.0.1:1"}), 0.0).greet()


def test_a_server_that_is_gone_is_lost_before_patience_ends(watch_of):
    forever, patience = threading.Event(), 60
    for waits in (lambda watch: watch.greet(), lambda watch: watch.during(forever.wait)):
        cluster = Listed({"ps 0": "127.0.0.1:1"})
        with pytest.raises(ServerLost, match=r"Nothing listens at ps 0\)"):
            waits(watch_of(cluster, patience))
        assert _GONE <= cluster.now <= _GONE + 1 < patience
    forever.set()


def test_a_frozen_server_is_not_gone(watch_of, monkeypatch):
    monkeypatch.setattr("tfdp_rec.distribute.connection._GONE", 0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        frozen = Listed({"ps 0": f"127.0.0.1:{mute.getsockname()[1]}"})
        with pytest.raises(Silence, match="No answer from ps 0"):
            watch_of(frozen, 3).greet()


def test_steps_that_do_not_end_though_all_answer():
    assert "seconds_without_progress" in str(Watch(Listed({}), 5).no_step())
    silent = Watch(Listed({"worker 0": "a:1"}), 5).no_step()
    assert silent.fact == "No step ended for 5 s. No answer from worker 0."


def test_graphs_of_before_a_connection_are_traced_again(monkeypatch):
    """A cluster's workers do not have them: the first step found no function of that name."""
    traced = []
    graph = SharedGraph(lambda x: traced.append(x) or x)
    resolver = SimpleNamespace(cluster_spec=lambda: SimpleNamespace(as_dict=lambda: {"worker": ["here:1"]}))
    monkeypatch.setattr(connection, "_strategies", {})
    monkeypatch.setattr(tf.distribute, "ParameterServerStrategy", lambda resolver: object())
    for call in (lambda: None, lambda: connection.connect(resolver), lambda: connection.connect(resolver)):
        call()
        graph(tf.constant(1.0))
    assert len(traced) == 2
