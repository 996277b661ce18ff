"""What is at an address: one of our servers, and which; another service; or nothing that answers.

TensorFlow's servers name their devices to any client that asks for their status, and with them their job and index. An
answer shows more than an open port: a frozen process' port stays open, and so does another service's.
"""

from __future__ import annotations

import re
import socket
from typing import Any

SILENT, STRANGER = "nobody", "another service"
_STATUS = "/tensorflow.WorkerService/GetStatus"
_DEVICE = re.compile(rb"/job:(\w+)/replica:0/task:(\d+)/")


def asked(address: str, seconds: float = 2.0) -> str:
    """The server at `host:port`: "worker 0", "ps 1", …; or STRANGER, or SILENT."""
    import grpc

    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        call: Any = channel.unary_unary(_STATUS, request_serializer=None, response_deserializer=None)
        try:
            found = _DEVICE.search(call(b"", timeout=seconds))
            return f"{found[1].decode()} {int(found[2])}" if found else STRANGER
        except grpc.RpcError as problem:
            mute = problem.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
            return SILENT if mute or not listens(address, seconds) else STRANGER


def listens(address: str, seconds: float = 1.0) -> bool:
    """Whether any process listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
    except OSError:
        return False
    with connection:
        connection.settimeout(min(seconds, 1.0))
        try:
            return connection.recv(1) != b""  # a proxy with nothing behind it opens, and hangs up at once
        except TimeoutError:
            return True
        except OSError:
            return False
