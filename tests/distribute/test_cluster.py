"""Cluster descriptions: read, checked at once, and answered with what to change."""

import json
import socket

import pytest

from tfdp_rec.distribute.cluster import Cluster, answers, split_address

GOOD = {"chief": ["c:1"], "worker": ["a:1", "a:2"], "ps": ["b:1"], "evaluator": ["e:1"]}


def described(cluster=GOOD, **task):
    return json.dumps({"cluster": cluster, **({"task": task} if task else {})})


def test_what_is_written_is_read_back():
    cluster = Cluster.from_json(described(type="worker", index=1))
    assert cluster.workers == ("a:1", "a:2") and cluster.servers == ("b:1",) and cluster.task == ("worker", 1)
    assert Cluster.from_json(cluster.as_json("ps", 0)) == Cluster(GOOD, ("ps", 0))
    assert Cluster.from_json(cluster.as_json()).task is None


def test_tf_config_and_files_are_read(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_CONFIG", described(type="chief"))
    assert Cluster.from_tf_config() == Cluster(GOOD, ("chief", 0))
    (tmp_path / "cluster.json").write_text(described())
    assert Cluster.from_file(tmp_path / "cluster.json") == Cluster(GOOD)


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
        Cluster.from_tf_config()


def test_addresses_of_both_families():
    assert split_address("[::1]:80") == ("::1", 80) and split_address("10.0.0.1:80") == ("10.0.0.1", 80)


def test_waiting_ends_and_names_who_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as listens, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        there, silent = (f"127.0.0.1:{s.getsockname()[1]}" for s in (listens, bound))
        assert answers(there) and not answers(silent)
        Cluster({"worker": [there], "ps": [there.replace("127.0.0.1", "localhost")]}).wait(5)
        with pytest.raises(TimeoutError, match=rf"within 0.3 s from ps 0 \({silent}\)\."):
            Cluster({"worker": [there], "ps": [silent]}).wait(0.3)


def test_the_resolver_says_what_the_description_says():
    resolver = Cluster(GOOD, ("worker", 1)).resolver()
    assert resolver.cluster_spec().as_dict() == {k: v for k, v in GOOD.items() if k != "evaluator"}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
