"""HTTP for one SavedModel, in the shape of TensorFlow Serving's REST interface: an ASGI application that uvicorn runs.

    GET  /v1/models/NAME[/versions/1]             whether it is there
    GET  /v1/models/NAME[/versions/1]/metadata    its signatures
    POST /v1/models/NAME[/versions/1]:predict     an answer
    GET  /statement                               the statement that covers the model
    GET  /metrics                                 counts for Prometheus (`traffic.py`)

Where requests and connections begin and end is read by uvicorn with h11. **The resources of one caller are bounded**:
the seconds of a request and of an answer, the bytes and the depth of a request, the values of an answer, the number of
connections and of the predictions that wait; when there are too many connections, the one that has been waiting for its
caller for longest is cut.

**Requests contain histories**, which are not encrypted: so the server listens to this machine alone by default, and
writes no log of requests. While it listens to this machine alone, it answers only requests that address it as localhost
or by a loopback address: a web page in a browser on this machine would use another name.

**At its end** it takes no further connection, and answers what was asked, for as long as a caller has patience. Until
then a connection that is open may ask once more, and its status is UNLOADING; then it is closed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.serving.promise import describe_statement
from tfdp_rec.serving.rest import BadRequest, Served, describe_status, parse
from tfdp_rec.serving.traffic import PLAIN, Traffic

uvicorn: Any = optional("uvicorn", "serve")
h11_impl: Any = optional("uvicorn.protocols.http.h11_impl", "serve")

_STATEMENT, _METRICS = "/statement", "/metrics"
_AT_ONCE, _MOST_ASKED = 8, 72  # predictions at the same time; with those that wait for one of these places


class Server:
    """A server of one model. It answers within a `with` block; at its end, what is in flight is answered still.

    Args:
        served: Model to serve.
        name: Name of the model in the paths of requests.
        host: Address to listen at.
        port: Port to listen at; 0 for any that is free, see `port`.
        open_to_the_network: Whether the address may be one that other machines can reach.
        most_bytes: Largest size of a request.
        most_connections: Largest number of connections at the same time.
        patience: Seconds for a caller to send a request, and to take an answer.
        statement: Text of the statement that covers the model, empty for none.

    Raises:
        ImportError: The extra `serve` is missing.
        ValueError: Other machines could reach the address without `open_to_the_network`; or the name fits in no path.
        OSError: The address is not available.
    """

    def __init__(
        self, served: Served, name: str = "recommender", host: str = "127.0.0.1", port: int = 8501,
        open_to_the_network: bool = False, most_bytes: int = 1 << 20, most_connections: int = 256,
        patience: float = 30.0, statement: str = "",
    ):
        if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            raise ValueError(f"--name must consist of letters, digits and _.- alone, got {name!r}.")
        if not 0 <= port < 2**16:
            raise ValueError(f"--port must be between 0 and 65535, got {port}.")
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except (socket.gaierror, UnicodeError):
            raise ValueError(f"--host {host} is not an address of this machine.") from None
        self._loopback_only = ipaddress.ip_address(address[0]).is_loopback
        if not self._loopback_only and not open_to_the_network:
            raise ValueError(
                f"--host {host} can be reached from other machines, and requests are neither encrypted nor "
                "authenticated: leave --host out, put a proxy with TLS before it, or, where all machines that reach it "
                "are trusted, give --open-to-the-network."
            )
        try:
            self._socket = socket.create_server(address, family=family, dualstack_ipv6=family == socket.AF_INET6)
        except OSError as problem:
            raise OSError(f"--port {port} of {host} is not available: {problem.strerror}. Give another.") from problem
        self.host, self.port = self._socket.getsockname()[:2]
        self.served, self.name, self._most_bytes = served, name, most_bytes
        self.most_connections, self.patience = most_connections, patience
        self.waiting: dict[Any, asyncio.TimerHandle] = {}  # connections that wait for their caller, oldest first
        self._asked, self._pool = set[Future[bytes]](), ThreadPoolExecutor(_AT_ONCE)  # predictions without an answer
        self.in_flight, self.traffic, self._path = 0, Traffic(), f"/v1/models/{name}"
        spec = {"name": name, "signature_name": "", "version": "1"}
        metadata = _to_json({"model_spec": spec, "metadata": {"signature_def": served.metadata()}})
        covered = _to_json(describe_statement(statement))
        self._facts: dict[str, Callable[[], bytes]] = {
            self._path: lambda: _to_json(describe_status(self.is_ending)), f"{self._path}/metadata": lambda: metadata,
            _STATEMENT: lambda: covered, _METRICS: self._describe_traffic,
        }  # fmt: skip
        # It logs nothing of requests: neither where they come from nor what h11 finds wrong with them.
        self._uvicorn = uvicorn.Server(uvicorn.Config(
            self, interface="asgi3", loop="asyncio", http=_Connection, ws="none", lifespan="off", proxy_headers=False,
            log_config=None, log_level="critical", access_log=False, server_header=False,
            backlog=64, timeout_keep_alive=patience, timeout_graceful_shutdown=patience,
        ))  # fmt: skip
        self._thread = threading.Thread(target=self._uvicorn.run, args=([self._socket],), daemon=True)

    @property
    def url(self) -> str:
        """Address of the model, to which `:predict` is added."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self._path}"

    @property
    def is_ending(self) -> bool:
        """Whether no further connection is taken."""
        return bool(self._uvicorn.should_exit)

    @property
    def is_answering(self) -> bool:
        """Whether a prediction is being made."""
        return bool(self._asked)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request: the ASGI application."""
        self.in_flight += 1
        try:
            await self._respond(scope, receive, send)
        finally:
            self.in_flight -= 1
            for connection in list(self._uvicorn.server_state.connections) if self.is_ending else []:
                connection.shutdown()

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        connection, headers = scope["state"]["connection"], dict(scope["headers"])
        try:
            status, body = await self._answer(scope, headers, receive)
        except BadRequest as refusal:
            status, body = refusal.status, _to_json({"error": str(refusal)})
        except asyncio.CancelledError:  # by uvicorn, at the end of its patience
            status, body = HTTPStatus.SERVICE_UNAVAILABLE, _to_json({"error": "The server ends: ask another."})
        except Exception as problem:  # its words could quote a history
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            body = _to_json({"error": f"{type(problem).__name__} while answering."})
        connection.wait_for_caller()
        self.traffic.answers[int(status)] += 1
        kind = PLAIN if scope["path"] == _METRICS and status == HTTPStatus.OK else b"application/json"
        said = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        # After a transfer coding, what follows may be, to a proxy, a part of this request.
        if b"transfer-encoding" in headers or self.is_ending:
            said.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": said})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Any, headers: dict[bytes, bytes], receive: Any) -> tuple[HTTPStatus, bytes]:
        method, path = scope["method"], scope["path"]
        if self._loopback_only and not _is_this_machine(headers.get(b"host", b"").decode("latin-1")):
            raise BadRequest("Address this machine as localhost or 127.0.0.1.", HTTPStatus.FORBIDDEN)
        place = path.replace(f"{self._path}/versions/1", self._path, 1)
        if place not in self._facts and not re.fullmatch(re.escape(self._path) + ":[a-z]+", place):
            words = f"There is nothing at {path[:100]}: the model is {self._path}, version 1."
            raise BadRequest(words, HTTPStatus.NOT_FOUND)
        if method == "GET" and place in self._facts:
            unloading = self.is_ending and place == self._path
            return HTTPStatus.SERVICE_UNAVAILABLE if unloading else HTTPStatus.OK, self._facts[place]()
        if method == "GET":
            raise BadRequest(f"Send a POST to {path[:100]}.", HTTPStatus.METHOD_NOT_ALLOWED)
        if method != "POST":
            raise BadRequest("Not Implemented.", HTTPStatus.NOT_IMPLEMENTED)
        if place != f"{self._path}:predict":
            raise BadRequest(f"Only :predict is answered here, not {path[:100]}.", HTTPStatus.NOT_FOUND)
        if b"content-length" not in headers or b"transfer-encoding" in headers:
            raise BadRequest("Give the length of the request: Content-Length.", HTTPStatus.LENGTH_REQUIRED)
        if (length := int(headers[b"content-length"])) > self._most_bytes:  # before `receive`, which asks for it
            words = f"The request has {length} bytes; at most {self._most_bytes} are read."
            raise BadRequest(words, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        text, message = bytearray(), {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            text += message.get("body", b"")
        scope["state"]["connection"].note_request()
        return HTTPStatus.OK, await self._predict(text)

    async def _predict(self, text: bytearray) -> bytes:
        if len(self._asked) >= _MOST_ASKED:
            raise BadRequest("Too many requests wait: ask again later.", HTTPStatus.SERVICE_UNAVAILABLE)
        begun = time.perf_counter()
        asked = self._pool.submit(lambda: _to_json(self.served.predict(parse(text))))
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)  # a thread works on, too, where the caller is told no more
        try:
            return await asyncio.wrap_future(asked)
        finally:
            self.traffic.note_prediction(time.perf_counter() - begun)

    def _describe_traffic(self) -> bytes:
        asked, connections = len(self._asked), len(self._uvicorn.server_state.connections)
        return self.traffic.describe(min(asked, _AT_ONCE), max(0, asked - _AT_ONCE), connections)


class _Connection(h11_impl.H11Protocol):
    """A connection that is cut when its caller takes too long, or keeps the place of another."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {"connection": self}
        # Head and body are sent one after the other: without it the body waits 40 ms until its head is noted.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        if len(self.connections) > self.app.most_connections:
            next(iter(self.app.waiting), self).abort()
        self.wait_for_caller()

    def connection_lost(self, exc: Exception | None) -> None:
        self.note_request()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Ends the connection where the server ends, once no request is being answered."""
        if not self.app.in_flight:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP."""
        self.app.traffic.answers[400] += 1
        super().send_400_response(msg)

    def wait_for_caller(self) -> None:
        """Gives the caller its seconds, in all and from now on, to take an answer and to send a request."""
        self.note_request()
        if not self.transport.is_closing():
            self.app.waiting[self] = self.loop.call_later(self.app.patience, self.abort)

    def note_request(self) -> None:
        """Notes that the request is there."""
        if timer := self.app.waiting.pop(self, None):
            timer.cancel()

    def abort(self) -> None:
        """Ends the connection."""
        self.note_request()
        self.transport.abort()


def _to_json(found: Any) -> bytes:
    return json.dumps(found, ensure_ascii=False).encode(errors="replace")  # JSON may hold half a character


def _is_this_machine(host: str) -> bool:
    """Whether a Host header is localhost or a loopback address."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
