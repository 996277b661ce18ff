"""A SuperLink and SuperNodes as real processes on 127.0.0.1.

Every address is bound to loopback, telemetry is off, nothing is installed at run time, Flower's own files go to a
folder of the run, and each process leads a group of its own that is killed as a whole on exit. Should this process be
killed itself, the kernel ends its children (PR_SET_PDEATHSIG, Linux), and Flower's helpers end with their parents.

Flower's options change from version to version: up to 1.35 an address for each of three services, then for two, from
1.40 on one host and port. A command's own --help says which it takes.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfdp_rec.federated.settings import toml

_PR_SET_PDEATHSIG = 1


class Loopback:
    """Flower's processes for one run; a context manager that ends them all."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.control, self.fleet, self._server = (free_port() for _ in range(3))
        self._helps: dict[str, str] = {}
        home = self.folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\n'
            f'address = "127.0.0.1:{self.control}"\ninsecure = true\n',
            encoding="utf-8",
        )
        self._bin = Path(sys.executable).parent
        self._environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{self._bin}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def superlink(self) -> subprocess.Popen[bytes]:
        """Starts the SuperLink and waits until it answers."""
        command, services = "flower-superlink", {"serverappio": self._server, "fleet": self.fleet}
        if "--host" in self._help(command):
            self.fleet = self.control
        where = self._listening(command, {**services, "control": self.control})
        install = "--disable-runtime-dependency-installation"
        quiet = [install] if install in self._help(command) else []
        process = self._start("superlink", command, "--insecure", *where, *quiet)
        wait_for(lambda: _answers(self.control), 300, lambda: self.log("superlink"))
        return process

    def supernode(self, name: str, config: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Starts a SuperNode with its own configuration."""
        where = self._listening("flower-supernode", {"clientappio": free_port()})
        values = " ".join(f"{key}={toml(value)}" for key, value in config.items())
        link = ("--superlink", f"127.0.0.1:{self.fleet}")
        return self._start(name, "flower-supernode", "--insecure", *link, *where, "--node-config", values)

    def run(self, app: str | Path) -> subprocess.Popen[bytes]:
        """Submit an app; its log is "run"."""
        return self._start("run", "flwr", "run", str(app), "--stream")

    def log(self, name: str) -> str:
        """What a process has written."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def failed(self) -> bool:
        """Whether the run was refused or its server app stopped with an error."""
        return bool(re.search(r"─ Error ─|Traceback|Exit Code: [1-9]", self.log("run")))

    def _help(self, command: str) -> str:
        """What a command says of its options."""
        if command not in self._helps:
            asked = [str(self._bin / command), "--help"]
            self._helps[command] = subprocess.run(
                asked, env=self._environment, capture_output=True, text=True, timeout=600
            ).stdout
        return self._helps[command]

    def _listening(self, command: str, services: Mapping[str, int]) -> list[str]:
        """The options that bind a command's services to these ports of loopback, the last one where there is one."""
        if "--host" in self._help(command):
            return ["--host", "127.0.0.1", "--port", str(list(services.values())[-1])]
        flags = {f"--{service}-api-address": f"127.0.0.1:{port}" for service, port in services.items()}
        return [part for flag, address in flags.items() if flag in self._help(command) for part in (flag, address)]

    def _start(self, name: str, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [str(self._bin / command), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self.processes.append(process)
        return process

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process's whole group and wait for it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], bool], seconds: float, explain: Callable[[], str]) -> None:
    """Waits until a condition, asked twice a second, is true; raises `TimeoutError` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(explain()[-4000:])
        time.sleep(0.5)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
