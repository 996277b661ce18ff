"""HTTP for one SavedModel, in the shape of TensorFlow Serving's REST interface, by the standard library alone.

    GET  /v1/models/NAME[/versions/1]             whether it is there
    GET  /v1/models/NAME[/versions/1]/metadata    its signatures
    POST /v1/models/NAME[/versions/1]:predict     an answer

Every error is {"error": "..."}. For trying out and for small traffic: what is asked here can be asked of TensorFlow
Serving. **Questions are histories**, and nothing protects those: so it listens to this machine alone unless it is told
otherwise, keeps no log of what is asked, and, while it listens to this machine alone, answers nobody who calls it by
another name than that of this machine, which is how a page of the web in a browser here would come.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tfdp_rec.serving.rest import Served, WrongQuestion

MOST_BYTES = 1 << 20  # of a question
_AT_ONCE = 8  # predictions; others wait
_PATIENCE = 30  # seconds for a caller to say what it wants
_PATH = re.compile(r"/v1/models/(?P<name>[^/:]+)(/versions/(?P<version>[^/:]+))?(?P<what>/metadata|:[a-z]+)?")


class Server(ThreadingHTTPServer):
    """Answers until `shutdown`.

    Args:
        served: the model.
        name: that it is asked by.
        host: the address to listen at.
        port: 0 for any that is free; see `server_port`.
        open_to_the_network: listen at an address that others can reach.
        most_bytes: of a question.

    Raises:
        ValueError: others could reach the address, and nobody said that they may; or the name fits in no path.
        OSError: the address cannot be had.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        served: Served,
        name: str = "recommender",
        host: str = "127.0.0.1",
        port: int = 8501,
        open_to_the_network: bool = False,
        most_bytes: int = MOST_BYTES,
    ):
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"--name must be of letters, digits and _.- alone, got {name!r}.")
        if not 0 <= port < 2**16:
            raise ValueError(f"--port must be between 0 and 65535, got {port}.")
        family, address = _address(host, port)
        self.alone = ipaddress.ip_address(address[0]).is_loopback
        if not self.alone and not open_to_the_network:
            raise ValueError(
                f"--host {host} is reached by others than this machine, and what they ask is neither encrypted nor "
                "limited to who may: leave --host out, put a proxy with TLS before it, or, where you trust everybody "
                "who can reach it, say so: --open-to-the-network."
            )
        self.served, self.model_name, self.most_bytes = served, name, most_bytes
        self.places, self.address_family = threading.BoundedSemaphore(_AT_ONCE), family
        try:
            super().__init__(address, Handler)
        except OSError as problem:
            raise OSError(f"--port {port} of {host} cannot be had: {problem.strerror}. Give another.") from problem

    def server_bind(self) -> None:
        """As in `socketserver`: `http.server` would ask the network for this machine's name."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where it is asked."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}/v1/models/{self.model_name}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hangs up is nothing to speak of."""


def _address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"--host {host} is no address of this machine.") from None
    return found[0][0], found[0][4]


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, words: str):
        super().__init__(words)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    server_version, sys_version, protocol_version = "tfdp-rec", "", "HTTP/1.1"
    timeout = _PATIENCE
    # An answer leaves in one piece: in two, the second waits 40 ms for the caller to say that it has the first.
    wbufsize, disable_nagle_algorithm = -1, True

    def do_GET(self) -> None:
        """Status and metadata."""
        self._respond(self._about)

    def do_POST(self) -> None:
        """Predictions."""
        self._respond(self._predicted)

    def _respond(self, answer: Any) -> None:
        try:
            status, found = HTTPStatus.OK, answer()
        except _Refused as refusal:
            status, found = refusal.status, {"error": str(refusal)}
        except WrongQuestion as refusal:
            status, found = HTTPStatus.BAD_REQUEST, {"error": str(refusal)}
        except Exception as problem:  # a server that says nothing is worse than one that says what
            status, found = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(problem).__name__} while answering."}
        if status != HTTPStatus.OK:
            self.close_connection = True  # its body may not have been read
        self._send(status, found)

    def _about(self) -> dict[str, Any]:
        what = self._path()
        if what == "":
            fine = {"error_code": "OK", "error_message": ""}
            return {"model_version_status": [{"version": "1", "state": "AVAILABLE", "status": fine}]}
        if what != "/metadata":
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"Send a POST to {self.path}.")
        spec = {"name": self.server.model_name, "signature_name": "", "version": "1"}
        return {"model_spec": spec, "metadata": {"signature_def": self.server.served.metadata()}}

    def _predicted(self) -> dict[str, Any]:
        if self._path() != ":predict":
            raise _Refused(HTTPStatus.NOT_FOUND, f"Only :predict is answered here, not {self.path[:100]}.")
        question = self._question()
        with self.server.places:
            return self.server.served.predict(question)

    def _path(self) -> str:
        """What is asked of this model.

        Raises:
            _Refused: it is asked of another, or by who should not ask.
        """
        if self.server.alone and not _is_this_machine(self.headers.get("Host", "")):
            raise _Refused(HTTPStatus.FORBIDDEN, "Call this machine by its own name: localhost, or 127.0.0.1.")
        found = _PATH.fullmatch(self.path.split("?")[0])
        if not found or found["name"] != self.server.model_name or found["version"] not in (None, "1"):
            raise _Refused(
                HTTPStatus.NOT_FOUND,
                f"There is nothing at {self.path[:100]}: the model is /v1/models/{self.server.model_name}, version 1.",
            )
        return found["what"] or ""

    def _question(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or "Transfer-Encoding" in self.headers:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "Say how long the question is: Content-Length.")
        if int(length) > self.server.most_bytes:
            most = f"at most {self.server.most_bytes} bytes are read of one"
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The question has {length[:20]} bytes, and {most}.")
        text = self.rfile.read(int(length))
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise WrongQuestion(f"The question is no JSON: {str(problem)[:100]}.") from None

    def _send(self, status: HTTPStatus, found: Any) -> None:
        body = json.dumps(found, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses, as JSON too."""
        self.close_connection = True
        self._send(HTTPStatus(code), {"error": f"{message or HTTPStatus(code).phrase}."})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is written down of who asks what."""


def _is_this_machine(host: str) -> bool:
    """Whether a Host header names this machine as itself."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
