"""A command in a network of its own: what it opens there is reached from nowhere else."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from tfdp_rec.core.ground import interruption
from tfdp_rec.distribute import own_network

OPENS = """
import os, socket, sys
with socket.create_server(("0.0.0.0", 0)) as server:
    own = socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=20)
    print(server.getsockname()[1], [name for _, name in socket.if_nameindex() if name == "lo"], os.getuid(), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(params=["as it is", "as another user"])
def libc(request, monkeypatch):
    """Root needs no user namespace, others do: unshare refuses a network alone."""
    whole = own_network.ctypes.CDLL(None, use_errno=True)
    if whole and request.param == "as another user":

        class Refusing:
            prctl = whole.prctl

            def unshare(self, flags):
                return -1 if flags == own_network._NEW_NETWORK else whole.unshare(flags)

        monkeypatch.setattr(own_network.ctypes, "CDLL", lambda *_, **__: Refusing())
    if own_network.run(["true"]) is None:
        pytest.skip("this system gives no network namespace")


def test_a_server_on_all_interfaces_is_reached_from_inside_alone(libc, monkeypatch):
    reading, writing = os.pipe()
    ends, codes, popen = os.fdopen(writing, "w"), [], subprocess.Popen
    command = [sys.executable, "-c", OPENS]
    out = popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(
        own_network.subprocess, "Popen", lambda *a, **o: popen(*a, stdin=reading, stdout=out.stdin, **o)
    )
    thread = threading.Thread(target=lambda: codes.append(own_network.run(command)))
    thread.start()
    try:
        port, rest = out.stdout.readline().split(maxsplit=1)
        assert rest == f"['lo'] {os.getuid()}\n"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=5)
    finally:
        ends.close()  # which ends it
        thread.join()
        out.stdin.close()
    assert codes == [0] and out.wait() == 0


def test_a_signal_goes_on_to_the_command_and_its_code_comes_back(libc):
    """The same signal: one that is ignored here, as in the background, would be ignored there."""
    ends = "signal.signal(15, lambda *_: os._exit(7))"
    waits = f"import os, signal, time\n{ends}\nos.kill(os.getppid(), 15)\ntime.sleep(600)"
    with interruption.handle_signals():
        assert own_network.run([sys.executable, "-c", waits]) == 7


def test_where_the_system_gives_no_network_nothing_is_run(monkeypatch, tmp_path):
    class Refusing:
        def prctl(self, *_):
            return 0

        def unshare(self, flags):
            return -1

    monkeypatch.setattr(own_network.ctypes, "CDLL", lambda *_, **__: Refusing())
    assert own_network.run(["touch", str(tmp_path / "run")]) is None and not list(tmp_path.iterdir())
