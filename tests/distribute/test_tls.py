"""A cluster behind mutual TLS trains; without its certificate one connects to nothing, reads and changes nothing.

Three hosts, as network namespaces on a bridge: `near` (chief and worker), `far` (parameter server) and `stranger`.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdp_rec.distribute import Cluster
from tfdp_rec.distribute.cluster import SILENT, STRANGER

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WORKER, SERVER = "10.77.0.1:2222", "10.77.0.2:2222"
HOSTS = {"near": "10.77.0.1", "far": "10.77.0.2", "stranger": "10.77.0.3"}
STEPS = 300


def missing():
    """Why this cannot be tried here, or None."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    tools = [tool for tool in ("ip", "haproxy", "unshare", "setpriv", "ss") if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)} not installed"
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode:
        return "namespaces are not allowed"
    return None if importlib.util.find_spec("cryptography") else "the package cryptography is not installed"


def cluster_tls():
    spec = importlib.util.spec_from_file_location("cluster_tls", ROOT / "scripts" / "cluster_tls.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_process_has_a_key_of_its_own_and_none_the_authoritys(tmp_path):
    pytest.importorskip("cryptography")
    given = Cluster({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    folders = cluster_tls().write(given, tmp_path / "keys")
    assert [folder.name for folder in folders] == ["worker-0", "worker-1", "ps-0", "chief"]
    texts = {file: file.read_text() for folder in folders for file in folder.iterdir()}
    keys = [text for text in texts.values() if "PRIVATE KEY" in text]
    assert len(set(keys)) == len(folders) == sum(text.count("PRIVATE KEY") for text in keys) / 2
    assert len({text for file, text in texts.items() if file.name == "authority.pem"}) == 1
    assert {oct(file.stat().st_mode)[-3:] for file in texts if file.name != "enter"} == {"600"}
    assert {oct(folder.stat().st_mode)[-3:] for folder in folders} == {"700"}
    described = Cluster.read(folders[1] / "cluster.json")
    assert described.task == ("worker", 1) and len({*described.workers, *described.servers}) == 3
    assert all(address.startswith("127.0.0.1:") for address in (*described.workers, *described.servers))
    outer = texts[folders[1] / "outer.cfg"]
    binds = [line for line in outer.splitlines() if " bind " in line and "unix@" not in line]
    assert binds == ["  bind b:1 ssl crt own.pem ca-file authority.pem verify required"]
    assert outer.count("verify required verifyhost") == 2 and outer.count("ssl-min-ver TLSv1.3") == 2
    with pytest.raises(FileExistsError):
        cluster_tls().write(given, tmp_path / "keys")


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """Names of namespaces, by host; they and all processes in them are gone afterwards."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    names = {host: f"tfdp{os.getpid()}-{host}" for host in [*HOSTS, "bridge"]}
    with contextlib.ExitStack() as ends:
        for name in names.values():
            ip("netns", "add", name)
            ends.callback(ip, "netns", "del", name)
        bridge = names["bridge"]
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for host, address in HOSTS.items():
            ip("-n", bridge, "link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", names[host])
            ip("-n", bridge, "link", "set", host, "master", "bridge", "up")
            ip("-n", names[host], "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", names[host], "link", "set", link, "up")
        yield names


@contextlib.contextmanager
def running(namespace, *command):
    """A process in a namespace; ended, with those that it started."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


PYTHON = (sys.executable, "-W", "ignore")
COMMAND = (*PYTHON, "-m", "tfdp_rec.cli")


def tried(namespace, *addresses, keys=None):
    """What is heard there from each address."""
    given = ("--keys", keys, *addresses) if keys else addresses
    with running(namespace, *PYTHON, HERE / "stranger.py", *given) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


def listening(namespace):
    """Addresses at which anybody listens there."""
    ss = ["ip", "netns", "exec", namespace, "ss", "-Hltnu"]
    lines = subprocess.run(ss, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted(line.split()[4] for line in lines)


@contextlib.contextmanager
def trained(folder, hosts, chief, servers):
    """A cluster that has trained and waits; yields what ends the wait, and gives what the chief found."""
    with contextlib.ExitStack() as stack:
        for host, *command in servers:
            stack.enter_context(running(hosts[host], *command))
        chief = stack.enter_context(running(hosts["near"], *chief, folder, STEPS))
        line = chief.stdout.readline()
        assert line == "trained\n", chief.communicate()[1][-3000:]

        def finished():
            (folder / "go on").touch()
            out, err = chief.communicate(timeout=300)
            assert chief.returncode == 0, err[-3000:]
            return json.loads(out.splitlines()[-1])

        yield finished


def plain(folder, hosts):
    """Servers that are open to the network: what the recipe is measured by, and what it is for."""
    description = folder / "cluster.json"
    description.write_text(json.dumps({"cluster": {"worker": [WORKER], "ps": [SERVER]}}))
    serve = (*COMMAND, "server", "--cluster", description, "--open-to-the-network", "--index", 0, "--job")
    servers = [("near", *serve, "worker"), ("far", *serve, "ps")]
    return trained(folder, hosts, (*PYTHON, HERE / "scenarios.py", "beyond_strangers", description), servers)


def behind_proxies(folder, hosts):
    """The same with the recipe."""
    keys = folder / "keys"
    cluster_tls().write(Cluster({"worker": [WORKER], "ps": [SERVER]}), keys)
    serve = lambda task: (keys / task / "enter", *COMMAND, "server", "--cluster", keys / task / "cluster.json")  # noqa: E731
    servers = [("near", *serve("worker-0")), ("far", *serve("ps-0"))]
    scenario = (*PYTHON, HERE / "scenarios.py", "beyond_strangers", keys / "chief" / "cluster.json")
    return trained(folder, hosts, (keys / "chief" / "enter", *scenario), servers)


def check_training(found):
    assert found["off"] < 1e-3 < 1 < found["moved"] and found["attempts"] == STEPS + 40, found


@pytest.mark.slow
def test_without_a_certificate_nothing_gets_in_and_the_cluster_trains(hosts, tmp_path, capsys):
    (tmp_path / "plain").mkdir()
    with plain(tmp_path / "plain", hosts) as finished:
        open_ = tried(hosts["stranger"], WORKER, SERVER)
        assert [found["status"] for found in open_.values()] == ["worker 0", "ps 0"], "a stranger is let in"
        without = finished()
    check_training(without)

    with behind_proxies(tmp_path, hosts) as finished:
        assert (listening(hosts["near"]), listening(hosts["far"])) == ([WORKER], [SERVER]), "the proxies alone"
        inside = [address.rpartition(":")[0] + port for address in (WORKER, SERVER) for port in (":10001", ":10002")]
        for where in ("stranger", "near", "far"):  # also from the hosts themselves
            own = ["127.0.0.1:10001", "127.0.0.1:10002"]
            found = tried(hosts[where], *own, *inside)
            assert all("Refused" in how["plain"]["why"] and how["status"] == SILENT for how in found.values()), found
        cluster_tls().write(Cluster({"worker": [WORKER], "ps": [SERVER]}), tmp_path / "forged")
        for keys in (None, tmp_path / "forged" / "worker-0", tmp_path / "forged" / "chief"):
            found = tried(hosts["stranger"], WORKER, SERVER, keys=keys)
            heard = [how[kind]["bytes"] for how in found.values() for kind in ("plain", "secured")]
            assert all(each == "" or each.startswith("15") for each in heard), f"more than a TLS alert: {found}"
            assert {how["status"] for how in found.values()} <= {SILENT, STRANGER}, found
        let_in = tried(hosts["stranger"], WORKER, SERVER, keys=tmp_path / "keys" / "chief")
        assert all(how["secured"]["bytes"].startswith("0000") for how in let_in.values()), "these tries can succeed"
        within = finished()
    check_training(within)
    time.sleep(0.5)
    assert listening(hosts["near"]) == [] == listening(hosts["far"]), "the proxies ended with what they served"
    with capsys.disabled():
        print(f"\nsteps a second: plain {without['rate']:.1f}, behind proxies {within['rate']:.1f}")
