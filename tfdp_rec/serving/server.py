"""HTTP for one SavedModel, in the shape of TensorFlow Serving's REST interface, by the standard library alone.

    GET  /v1/models/NAME[/versions/1]             whether it is there
    GET  /v1/models/NAME[/versions/1]/metadata    its signatures
    POST /v1/models/NAME[/versions/1]:predict     an answer

Every error is {"error": "..."}. **The resources of one caller are bounded**: the seconds of a request and of an answer,
the bytes and the depth of a request, the values of an answer, the number of connections; when there are too many, the
connection that has been waiting for its caller for longest is closed.

This server is for trials and small traffic; TensorFlow Serving answers the same requests. **Requests contain
histories**, which are not encrypted: so the server listens to this machine alone by default, and writes no log of
requests. While it listens to this machine alone, it answers only requests that address it as localhost or by a loopback
address: a web page in a browser on this machine would use another name.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import json
import re
import socket
import socketserver
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from tfdp_rec.serving.rest import BadRequest, Served

MOST_BYTES = 1 << 20  # of a request
_AT_ONCE = 8  # predictions at the same time; others wait
MOST_CONNECTIONS = 256
PATIENCE = 30.0  # seconds for a caller to send a whole request, and to read a whole answer
_MOST_DEPTH = 32  # of lists in lists
_DRAINED = 1 << 26  # a refused request of up to so many bytes is read: a caller that is sending reads no answer
_PATH = re.compile(r"/v1/models/(?P<name>[^/:]+)(/versions/(?P<version>[^/:]+))?(?P<what>/metadata|:[a-z]+)?")


class Server(socketserver.ThreadingTCPServer):
    """A server of one model, which answers until `shutdown`.

    Args:
        served: Model to serve.
        name: Name of the model in the paths of requests.
        host: Address to listen at.
        port: Port to listen at; 0 for any that is free, see `server_port`.
        open_to_the_network: Whether the address may be one that other machines can reach.
        most_bytes: Largest size of a request.
        most_connections: Largest number of connections at the same time.
        patience: Seconds for a caller to send a request, and to read an answer.

    Raises:
        ValueError: Other machines could reach the address without `open_to_the_network`; or the name fits in no path.
        OSError: The address is not available.
    """

    # Not an `http.server.HTTPServer`, which asks the network for this machine's name.
    daemon_threads = allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self, served: Served, name: str = "recommender", host: str = "127.0.0.1", port: int = 8501,
        open_to_the_network: bool = False, most_bytes: int = MOST_BYTES, most_connections: int = MOST_CONNECTIONS,
        patience: float = PATIENCE,
    ):
        if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            raise ValueError(f"--name must consist of letters, digits and _.- alone, got {name!r}.")
        if not 0 <= port < 2**16:
            raise ValueError(f"--port must be between 0 and 65535, got {port}.")
        family, address = _address(host, port)
        self.loopback_only = ipaddress.ip_address(address[0]).is_loopback
        if not self.loopback_only and not open_to_the_network:
            raise ValueError(
                f"--host {host} can be reached from other machines, and requests are neither encrypted nor "
                "authenticated: leave --host out, put a proxy with TLS before it, or, where all machines that reach it "
                "are trusted, give --open-to-the-network."
            )
        self.served, self.model_name, self.most_bytes = served, name, most_bytes
        self.most_connections, self.patience = most_connections, patience
        self._waiting: dict[Any, None] = {}  # connections that wait for their caller, oldest first
        self._open, self._lock = 0, threading.Lock()
        self.prediction_slots, self.address_family = threading.BoundedSemaphore(_AT_ONCE), family
        try:
            super().__init__(address, Handler)
        except OSError as problem:
            raise OSError(f"--port {port} of {host} is not available: {problem.strerror}. Give another.") from problem

    @property
    def server_port(self) -> int:
        """Port that is listened at."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """Address of the model, to which `:predict` is added."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/v1/models/{self.model_name}"

    # Connections.

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a connection in its own thread; closes the longest waiting one if there are too many."""
        with self._lock:
            oldest = next(iter(self._waiting), None)
            full = self._open >= self.most_connections
            if full and oldest is not None:
                del self._waiting[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends, and closes it
            if not full or oldest is not None:
                self._open += 1
                self._waiting[request] = None
                super().process_request(request, client_address)
                return
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers one connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._waiting.pop(request, None)
                self._open -= 1

    def set_waiting(self, request: Any, caller: bool) -> None:
        """Notes whether a connection waits for its caller from now on."""
        with self._lock:
            self._waiting.pop(request, None)
            if caller:
                self._waiting[request] = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores connections that their caller has closed."""


def _address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"--host {host} is not an address of this machine.") from None
    return found[0][0], found[0][4]


class _TimedConnection(io.RawIOBase):
    """A connection as a file with a limit of seconds in all from `begin` on, however little each read returns."""

    def __init__(self, connection: socket.socket, patience: float):
        self._connection, self._patience = connection, patience
        self.begin()

    def begin(self) -> None:
        """Starts the seconds anew."""
        self._end = time.monotonic() + self._patience

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._in_time().recv_into(buffer)

    def write(self, data: Any) -> int:
        return self._in_time().send(data)

    def _in_time(self) -> socket.socket:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection


class _HttpError(BadRequest):
    def __init__(self, status: HTTPStatus, words: str):
        super().__init__(words)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: Server
    server_version, sys_version, protocol_version = "tfdp-rec", "", "HTTP/1.1"

    def setup(self) -> None:
        """Opens the connection for reading and writing within the time limit."""
        self.connection = self.request
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self._timed = _TimedConnection(self.connection, self.server.patience)
        # An answer is sent in one piece: of two, the second waits 40 ms until the caller acknowledges the first.
        self.rfile, self.wfile = io.BufferedReader(self._timed), io.BufferedWriter(self._timed)

    def handle_one_request(self) -> None:
        """Reads a request and answers it."""
        self._timed.begin()
        self._unread, self.headers = True, http.client.HTTPMessage()
        self.server.set_waiting(self.connection, caller=True)
        super().handle_one_request()

    def handle_expect_100(self) -> bool:
        """Refuses a request that is too long before it is sent."""
        try:
            self._length()
        except _HttpError:
            self._unread = False
            return True  # `_body` gives the reason
        return super().handle_expect_100()

    def do_GET(self) -> None:
        """Answers with the status, the metadata or, to a POST, predictions."""
        try:
            status, found = HTTPStatus.OK, self._answer()
        except BadRequest as refusal:
            status, found = refusal.status, {"error": str(refusal)}
        except Exception as problem:  # without an answer the caller would wait in vain
            status, found = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(problem).__name__} while answering."}
        # The body may not have been read: it would be taken for the next request, of another caller behind a proxy.
        if status != HTTPStatus.OK or self._unread and self._has_body:
            self.close_connection = True
        self._send(status, found)

    do_POST = do_GET

    @property
    def _has_body(self) -> bool:
        # Headers with a defect may hide a length.
        lengths = self.headers.get_all("Content-Length", [])
        return "Transfer-Encoding" in self.headers or any(said != "0" for said in lengths) or bool(self.headers.defects)

    def _answer(self) -> dict[str, Any]:
        what = self._path()
        if self.command == "POST":
            if what != ":predict":
                raise _HttpError(HTTPStatus.NOT_FOUND, f"Only :predict is answered here, not {self.path[:100]}.")
            text = self._body()
            with self.server.prediction_slots:
                return self.server.served.predict(_parsed(text))
        if what == "":
            fine = {"error_code": "OK", "error_message": ""}
            return {"model_version_status": [{"version": "1", "state": "AVAILABLE", "status": fine}]}
        if what == "/metadata":
            spec = {"name": self.server.model_name, "signature_name": "", "version": "1"}
            return {"model_spec": spec, "metadata": {"signature_def": self.server.served.metadata()}}
        raise _HttpError(HTTPStatus.METHOD_NOT_ALLOWED, f"Send a POST to {self.path}.")

    def _path(self) -> str:
        """The path after this model's name; other models and other Host headers are refused."""
        if self.server.loopback_only and not _is_this_machine(self.headers.get("Host", "")):
            raise _HttpError(HTTPStatus.FORBIDDEN, "Address this machine as localhost or 127.0.0.1.")
        found = _PATH.fullmatch(self.path.split("?")[0])
        if not found or found["name"] != self.server.model_name or found["version"] not in (None, "1"):
            raise _HttpError(
                HTTPStatus.NOT_FOUND,
                f"There is nothing at {self.path[:100]}: the model is /v1/models/{self.server.model_name}, version 1.",
            )
        return found["what"] or ""

    def _body(self) -> bytes:
        text = self.rfile.read(self._length())
        self._unread = False
        self.server.set_waiting(self.connection, caller=False)
        return text

    def _length(self) -> int:
        """Length of the request's body, which is still to be read."""
        said = self.headers.get_all("Content-Length", [])
        if len(said) != 1 or not re.fullmatch("[0-9]+", said[0]) or "Transfer-Encoding" in self.headers:
            raise _HttpError(HTTPStatus.LENGTH_REQUIRED, "Give the length of the request: Content-Length.")
        length = int(said[0][:20])
        if length > self.server.most_bytes:
            most = f"at most {self.server.most_bytes} are read"
            raise _HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The request has {said[0][:20]} bytes; {most}.")
        return length

    def _drain(self) -> None:
        """Reads a refused request to its end: a caller that is still sending reads no answer."""
        said = self.headers.get("Content-Length", "")
        left = int(said) if re.fullmatch("[0-9]{1,9}", said) else 0
        with contextlib.suppress(OSError):
            if left > _DRAINED:
                return
            while left > 0 and (read := len(self.rfile.read(min(left, 1 << 16)))):
                left -= read

    def _send(self, status: HTTPStatus, found: Any) -> None:
        if self._unread and status != HTTPStatus.OK:
            self._drain()
        self.server.set_waiting(self.connection, caller=True)
        self._timed.begin()
        body = json.dumps(found, ensure_ascii=False).encode(errors="replace")  # JSON may hold half a character
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers the standard library's own refusals in JSON too, without its words, which quote the request."""
        self.close_connection = True
        self._send(HTTPStatus(code), {"error": f"{HTTPStatus(code).phrase}."})

    def log_message(self, format: str, *args: Any) -> None:
        """Writes no log: requests contain histories."""


def _parsed(text: bytes) -> Any:
    """A request as JSON, its lists not nested too deep for the recursive functions that read them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise BadRequest(f"The request is not JSON: {str(problem)[:100]}.") from None
    level = [found]
    for _ in range(_MOST_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [part for parts in inner for part in parts]
    if level:
        raise BadRequest(f"The request has lists more than {_MOST_DEPTH} deep.")
    return found


def _is_this_machine(host: str) -> bool:
    """Whether a Host header is localhost or a loopback address."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
