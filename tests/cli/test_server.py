"""`tfdp-rec server`: says when it is ready, ends when told to, and refuses at once what cannot be."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tfdp_rec.cli import main
from tfdp_rec.distribute.cluster import listens

OPEN = ["--open-to-the-network"]


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def described(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"cluster": {"worker": [free_address()], "ps": [free_address()]}}))
    return path


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "tfdp_rec.cli", "server", *OPEN, *arguments], text=True, env=os.environ | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_and_ends_cleanly(described, stop):
    cluster = json.loads(described.read_text())
    address = cluster["cluster"]["ps"][0]
    if stop == signal.SIGTERM:
        server = start("--cluster", str(described), "--job", "ps", "--index", "0")
    else:
        server = start(TF_CONFIG=json.dumps(cluster | {"task": {"type": "ps", "index": 0}}))
    try:
        assert server.stdout.readline() == f"tfdp-rec server: ps 0 is ready at {address}\n"
        assert listens(address)
        server.send_signal(stop)
        assert server.wait(10) == 0
        assert server.stdout.read() == f"tfdp-rec server: ps 0 ends ({stop.name})\n"
        assert not listens(address)
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
def test_a_taken_port_is_said(described):
    host, port = json.loads(described.read_text())["cluster"]["ps"][0].split(":")
    with socket.create_server(("0.0.0.0", int(port))):
        server = start("--cluster", str(described), "--job", "ps", "--index", "0")
        output, errors = server.communicate(timeout=60)
    assert server.returncode == 2 and "is the port taken?" in errors and not output


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--cluster", "{described}", "--job", "ps", "--index", "1"], "index"),
        (["--cluster", "{described}"], "names no task"),
        (["--cluster", "{described}", "--job", "ps"], "--job and --index must be given together"),
        (["--cluster", "/nowhere.json", "--job", "ps", "--index", "0"], "No such file"),
        ([], "TF_CONFIG is not set"),
        (["--cluster", "{described}", "--job", "ps", "--index", "0"], "(eth0 too), without password or encryption"),
        (["--cluster", "{described}", "--job", "ps", "--index", "0"], "mutual TLS (docs/scaling-tls.md)"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, says, described, capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert main(["server", *(a.format(described=described) for a in arguments)]) == 2
    errors = capsys.readouterr().err
    assert says in errors and errors.count("\n") == 1
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
