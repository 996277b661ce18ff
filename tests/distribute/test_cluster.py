"""Cluster descriptions: read, checked at once, and answered with what to change."""

import contextlib
import http.server
import json
import socket
import threading
from concurrent import futures

import grpc
import pytest

from tfdp_rec.distribute.cluster import SILENT, STRANGER, Cluster, listens, server_at, split_address

GOOD = {"chief": ["c:1"], "worker": ["a:1", "a:2"], "ps": ["b:1"], "evaluator": ["e:1"]}


def described(cluster=GOOD, **task):
    return json.dumps({"cluster": cluster, **({"task": task} if task else {})})


def test_what_is_described_is_read():
    cluster = Cluster.from_json(described(type="worker", index=1))
    assert cluster.workers == ("a:1", "a:2") and cluster.servers == ("b:1",) and cluster.task == ("worker", 1)
    assert Cluster.from_json(described()).task is None


def test_tf_config_and_files_are_read(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_CONFIG", described(type="chief"))
    assert Cluster.read("TF_CONFIG") == Cluster(GOOD, ("chief", 0))
    (tmp_path / "cluster.json").write_text(described())
    assert Cluster.read(tmp_path / "cluster.json") == Cluster(GOOD)


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "not JSON"),
        ("[]", "no 'cluster'"),
        ('{"cluster": 3}', "no 'cluster'"),
        (described({"worker": ["a:1"]}), "no 'ps'"),
        (described({"ps": ["a:1"]}), "no 'worker'"),
        (described({"worker": [], "ps": ["a:1"]}), "no 'worker'"),
        (described({"workers": ["a:1"], "ps": ["a:2"]}), "Did you mean 'worker'"),
        (described({"worker": "a:1", "ps": ["a:2"]}), "'worker' must be a list"),
        (described({"worker": {"0": "a:1"}, "ps": ["a:2"]}), "'worker' must be a list"),
        (described({"worker": ["a:1", "a:1"], "ps": ["a:2"]}), "a:1 is both worker 0 and worker 1"),
        (described({"worker": ["a:1"], "ps": ["a:01"]}), "a:01 is both worker 0 and ps 0"),
        (described({"worker": ["a"], "ps": ["a:2"]}), "host:port"),
        (described({"worker": ["grpc://a:1"], "ps": ["a:2"]}), "host:port"),
        (described({"worker": [":1"], "ps": ["a:2"]}), "host:port"),
        (described({"worker": [7], "ps": ["a:2"]}), "must be a string"),
        (described({"worker": ["a:0"], "ps": ["a:2"]}), "from 1 to 65535"),
        (described({"worker": ["a:65536"], "ps": ["a:2"]}), "from 1 to 65535"),
        (described({"worker": ["a:x"], "ps": ["a:2"]}), "from 1 to 65535"),
        (described({"worker": ["a:²"], "ps": ["a:2"]}), "from 1 to 65535"),
        (described({"worker": ["a:1"], "ps": ["a:2"], "chief": ["a:3", "a:4"]}), "one chief"),
        (described(type="worker", index=2), "index 0 to 1"),
        (described(type="worker", index=-1), "index 0 to 1"),
        (described(type="worker", index="0"), "index 0 to 1"),
        (described(type="worker", index=True), "index 0 to 1"),
        (described(type="master", index=0), "jobs are chief, worker"),
        (json.dumps({"cluster": GOOD, "task": "worker"}), "'task' must be like"),
    ],
)
def test_what_is_no_cluster_is_refused_with_its_source(text, says):
    with pytest.raises(ValueError) as problem:
        Cluster.from_json(text, "my.json")
    assert says in str(problem.value) and "my.json" in str(problem.value)


def test_no_tf_config_is_said(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match="TF_CONFIG is not set"):
        Cluster.read("TF_CONFIG")


def test_addresses_of_both_families():
    assert split_address("[::1]:80") == ("::1", 80) and split_address("10.0.0.1:80") == ("10.0.0.1", 80)


@contextlib.contextmanager
def answering(device):
    """The address of something that speaks gRPC; of one of our servers, if it names a device."""

    def status(request, context):
        return f"..{device}..".encode()

    handler = grpc.unary_unary_rpc_method_handler(status)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    if device:
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("tensorflow.WorkerService", {"GetStatus": handler})]
        )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


WORKER, PS = "/job:worker/replica:0/task:0/device:CPU:0", "/job:ps/replica:0/task:0/device:CPU:0"


def test_waiting_ends_and_names_who_is_silent():
    with answering(WORKER) as worker, answering(PS) as ps, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{bound.getsockname()[1]}"
        assert listens(worker) and not listens(closed)
        assert (server_at(worker), server_at(ps), server_at(closed)) == ("worker 0", "ps 0", SILENT)
        Cluster({"worker": [worker], "ps": [ps.replace("127.0.0.1", "localhost")]}).wait(5)
        with pytest.raises(TimeoutError, match=rf"within 0.3 s from ps 0 \({closed}\)\."):
            Cluster({"worker": [worker], "ps": [closed]}).wait(0.3)


@pytest.mark.slow
def test_a_port_that_says_nothing_is_named_as_that():
    with answering(WORKER) as worker, socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(TimeoutError, match="ps 0 .* listens and says nothing: frozen?"):
            Cluster({"worker": [worker], "ps": [address]}).wait(0.1)


@pytest.mark.parametrize("which", ["a web server", "another gRPC service", "the worker"])
def test_another_server_at_an_address_is_named_at_once(which):
    with contextlib.ExitStack() as services:
        worker = services.enter_context(answering(WORKER))
        other = f"127.0.0.1:{_web_server(services)}" if which == "a web server" else ""
        other = other or services.enter_context(answering(WORKER if which == "the worker" else ""))
        found = "worker 0" if which == "the worker" else STRANGER
        assert server_at(other) == found
        with pytest.raises(ValueError, match=f"At {other}, where ps 0 should be, {found} answers: correct"):
            Cluster({"worker": [worker], "ps": [other]}).wait(60)


def test_a_proxy_with_no_server_behind_it_is_no_answer():
    """It opens, and hangs up: a server that is yet to start, or is gone, and no other service."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def hang_up():
            with contextlib.suppress(OSError):
                while True:
                    proxy.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        address = f"127.0.0.1:{proxy.getsockname()[1]}"
        assert not listens(address) and server_at(address) == SILENT


def _web_server(services):
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    services.callback(server.shutdown)
    return server.server_port


def test_the_resolver_says_what_the_description_says():
    resolver = Cluster(GOOD, ("worker", 1)).resolver()
    assert resolver.cluster_spec().as_dict() == {k: v for k, v in GOOD.items() if k != "evaluator"}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
