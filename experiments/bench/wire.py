"""How many bytes our own processes sent each other, as the kernel counted them.

Linux keeps for every TCP connection how many payload bytes arrived (tcp_info, tcpi_bytes_received) and tells it to who
asks over netlink (sock_diag). Summed over the sockets that a set of processes holds, this is what crossed the wire
between them: every byte arrives at one end. Nothing is added to the traffic or to the processes, and other programs'
traffic over loopback does not count. The framing of HTTP/2 and gRPC is in it, the headers of TCP and IP are not.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping

_SOCK_DIAG, _BY_FAMILY, _DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_INFO, _ESTABLISHED, _RECEIVED_AT = 2, 1 << 1, 128
_HEADER, _ADDRESSES_END = 16, 72

Counts = dict[int, tuple[str, int]]


class Wire:
    """Counts what arrives at the processes of a few roles.

    Args:
        processes: process numbers by role.

    Raises:
        OSError: where the kernel does not tell (other than Linux).

    Example:
        >>> pair = socket.create_server(("127.0.0.1", 0))
        >>> sender = socket.create_connection(pair.getsockname())
        >>> receiver, _ = pair.accept()
        >>> wire = Wire({"all": [os.getpid()]})
        >>> before = wire.counts()
        >>> sender.sendall(bytes(1000)); len(receiver.recv(1000, socket.MSG_WAITALL))
        1000
        >>> wire.since(before)
        {'all': 1000}
        >>> for s in (pair, sender, receiver): s.close()
    """

    def __init__(self, processes: Mapping[str, list[int]]):
        if not hasattr(socket, "AF_NETLINK"):
            raise OSError("bytes on the wire can be counted on Linux only.")
        self._processes = {role: list(pids) for role, pids in processes.items()}

    def counts(self) -> Counts:
        """For every connection of these processes, by its inode: whose it is, and the bytes that arrived so far."""
        owners = {inode: role for role, pids in self._processes.items() for pid in pids for inode in _sockets(pid)}
        arrived = {inode: n for family in (socket.AF_INET, socket.AF_INET6) for inode, n in _arrived(family)}
        return {inode: (role, arrived[inode]) for inode, role in owners.items() if inode in arrived}

    def since(self, before: Counts) -> dict[str, int]:
        """Bytes that arrived at each role since an earlier count.

        Args:
            before: that count.

        Raises:
            OSError: if a connection was closed in between: its last bytes are unknown.
        """
        after = self.counts()
        if closed := before.keys() - after.keys():
            raise OSError(f"{len(closed)} connections were closed while bytes were counted; count again.")
        total = dict.fromkeys(self._processes, 0)
        for inode, (role, arrived) in after.items():
            total[role] += arrived - before.get(inode, (role, 0))[1]
        return total


def _sockets(pid: int) -> Iterator[int]:
    """Inodes of the sockets that a process holds."""
    for descriptor in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(descriptor.path)
        except FileNotFoundError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield int(target[len("socket:[") : -1])


def _arrived(family: int) -> Iterator[tuple[int, int]]:
    """Inode and bytes received of every established TCP socket of the machine."""
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED) + bytes(48)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.bind((0, 0))
        kernel.send(struct.pack("=IHHII", _HEADER + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            for kind, message in _messages(kernel.recv(1 << 20)):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", message)[0]
                    raise OSError(code, f"the kernel does not tell of its sockets: {os.strerror(code)}")
                yield struct.unpack_from("=I", message, _ADDRESSES_END - 4)[0], _received(message)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        yield kind, data[at + _HEADER : at + length]
        at += (length + 3) & ~3


def _received(message: bytes) -> int:
    at = _ADDRESSES_END
    while at + 4 <= len(message):
        length, attribute = struct.unpack_from("=HH", message, at)
        if attribute == _INFO:
            return int(struct.unpack_from("=Q", message, at + 4 + _RECEIVED_AT)[0])
        at += (length + 3) & ~3
    raise OSError("the kernel does not count the bytes of its sockets (Linux 4.1 does).")
