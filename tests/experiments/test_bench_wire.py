"""Bytes on the wire are counted as the kernel counts them: ours all, others' none."""

import os
import socket
import subprocess
import sys

import pytest

from experiments.bench.wire import Wire

ECHO = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    while data := connection.recv(1 << 16):
        connection.sendall(data)
"""


@pytest.fixture
def echo():
    process = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    connection = socket.create_connection(("127.0.0.1", int(process.stdout.readline())))
    yield process, connection
    connection.close()
    process.wait(10)
    process.stdout.close()


def send(connection, size):
    connection.sendall(bytes(size))
    assert len(connection.recv(size, socket.MSG_WAITALL)) == size


def test_bytes_are_counted_where_they_arrive(echo):
    process, connection = echo
    wire = Wire({"here": [os.getpid()], "there": [process.pid]})
    send(connection, 100)  # what came earlier does not count
    before = wire.counts()
    send(connection, 12_345)
    send(connection, 1)
    assert wire.since(before) == {"here": 12_346, "there": 12_346}


def test_the_traffic_of_others_does_not_count(echo):
    process, connection = echo
    wire = Wire({"there": [process.pid]})
    before = wire.counts()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as other:
        other.sendall(bytes(500))
        send(connection, 7)
        assert wire.since(before) == {"there": 7}


def test_a_connection_closed_meanwhile_is_said():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        wire = Wire({"here": [os.getpid()]})
        before = wire.counts()
        one.close()
        with pytest.raises(OSError, match="closed while"):
            wire.since(before)


def test_a_connection_opened_meanwhile_counts_from_its_first_byte():
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = Wire({"here": [os.getpid()]})
        before = wire.counts()
        with socket.create_connection(server.getsockname()) as one:
            other, _ = server.accept()
            with other:
                one.sendall(bytes(42))
                other.recv(42, socket.MSG_WAITALL)
                assert wire.since(before) == {"here": 42}
