"""A network of its own for a command and all that it starts: loopback, and nothing else.

TensorFlow's servers, and the coordinator itself, listen on all interfaces, whatever address they are given. In a
network namespace there is no other interface. Linux gives one to root, and, with a user namespace, to most others.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Sequence

from tfdp_rec.core.ground import interruption

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # of unshare(2)
_PARENT_ENDS = 1  # of prctl(2)
_SET_FLAGS, _UP = 0x8914, 0x1  # of netdevice(7)


def run(command: Sequence[str]) -> int | None:
    """Runs a command in a network of its own and returns its exit code; None where the system gives no such network."""
    libc, own = ctypes.CDLL(None, use_errno=True), (os.getuid(), os.getgid())
    try:
        # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
        child = subprocess.Popen(command, preexec_fn=lambda: _enter(libc, *own), start_new_session=True)
    except subprocess.SubprocessError:
        return None
    while True:
        try:
            code = child.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            child.send_signal(interruption.last_signal())


def _enter(libc: ctypes.CDLL, user: int, group: int) -> None:
    """In the forked process, which has one thread, before it becomes the command."""
    libc.prctl(_PARENT_ENDS, signal.SIGTERM)
    if libc.unshare(_NEW_NETWORK):
        if libc.unshare(_NEW_USER | _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "no network namespace")
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh", b"lo", _UP))
