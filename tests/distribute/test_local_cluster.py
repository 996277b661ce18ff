"""A local cluster starts real servers, loses and regains them, and leaves none behind however its owner ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdp_rec.distribute import Cluster, LocalCluster
from tfdp_rec.distribute.cluster import listens
from tfdp_rec.distribute.local_cluster import warn_of_others

OWNER = """
import json, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
from tfdp_rec.distribute import LocalCluster
with LocalCluster(workers=1, servers=1) as cluster:
    pids = [cluster.pid(name) for name in cluster.names] + [cluster._launcher.pid]
    print(json.dumps([pids, str(cluster.folder)]), flush=True)
    {then}
"""


def alive(pid):
    """Whether a process runs; a zombie that is not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(workers=1, servers=2) as running:
        yield running
        pids = [running.pid(name) for name in running.names if running.pid(name)]
    assert gone(pids)


@pytest.mark.slow
def test_every_server_answers_and_is_a_process_of_its_own(cluster):
    assert cluster.names == ("worker:0", "ps:0", "ps:1")
    cluster.cluster.wait(1)
    pids = {cluster.pid(name) for name in cluster.names}
    assert len(pids) == 3 and all(map(alive, pids)) and os.getpid() not in pids


def test_a_killed_server_is_silent_and_a_restarted_one_answers_at_the_same_address(cluster):
    pid, (_, address) = cluster.pid("ps:1"), cluster.cluster.servers
    cluster.kill("ps:1")
    assert not alive(pid) and cluster.pid("ps:1") is None and not listens(address)
    cluster.kill("ps:1")
    cluster.restart("ps:1")
    assert cluster.pid("ps:1") != pid and listens(address)
    with pytest.raises(ValueError, match="alive"):
        cluster.restart("ps:1")


def test_a_server_that_died_by_itself_is_noticed(cluster):
    os.kill(cluster.pid("ps:0"), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while cluster.pid("ps:0") is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cluster.pid("ps:0") is None
    cluster.restart("ps:0")
    assert alive(cluster.pid("ps:0"))


@pytest.mark.parametrize("interfaces, warned", [(["lo"], False), (["lo", "eth0"], True)])
def test_servers_that_strangers_can_reach_are_said(monkeypatch, recwarn, interfaces, warned):
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(interfaces, 1)))
    warn_of_others()
    said = [str(each.message) for each in recwarn]
    assert bool(said) == warned and all("(eth0 too)" in words and "unshare -rn" in words for words in said)


def test_names_that_are_not_there_are_refused(cluster):
    with pytest.raises(ValueError, match="there are worker:0, ps:0, ps:1"):
        cluster.kill("ps:2")


def test_what_cannot_run_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        LocalCluster(workers=0)
    with pytest.raises(ValueError, match="with statement"):
        LocalCluster().kill("ps:0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("an exception", "Ctrl-C")), "SIGKILL"]
)
def test_nothing_outlives_its_owner(how):
    then = "raise RuntimeError" if how == "an exception" else "time.sleep(60)"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.replace("{then}", then)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        pids, folder = json.loads(owner.stdout.readline())
        if how == "Ctrl-C":
            owner.send_signal(signal.SIGINT)
        elif how == "SIGKILL":
            owner.kill()
        assert gone(pids)
        owner.wait(10)
        assert not Path(folder).exists()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_a_server_that_cannot_listen_is_reported_with_its_log(cluster):
    right = cluster.cluster
    cluster.kill("ps:0")
    with socket.create_server(("0.0.0.0", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cluster.cluster = Cluster({"worker": right.workers, "ps": [address]})
        with pytest.raises(OSError, match="ps:0 did not start: it ended"):
            cluster.restart("ps:0")
    cluster.cluster = right
    assert cluster.pid("ps:0") is None and cluster.pid("worker:0") is not None
    cluster.restart("ps:0")
