"""HTTP: the shape of TensorFlow Serving's REST interface, clear errors, and refusals of callers from elsewhere."""

import contextlib
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from prometheus_client.parser import text_string_to_metric_families

import tfdp_rec
from tfdp_rec.cli import main
from tfdp_rec.job import report
from tfdp_rec.job.run_folder import find_servable, read_statement
from tfdp_rec.serving import Served, Server, rest
from tfdp_rec.serving import server as module_of_server
from tfdp_rec.serving.rest import BadRequest
from tfdp_rec.serving.traffic import Traffic

PREDICT = "/v1/models/shop:predict"


@pytest.fixture(autouse=True)
def no_exit(monkeypatch):
    """Where a prediction is left, the command ends its process at once: the tests would end as if all had passed."""
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("the server leaves a prediction behind"))


@pytest.fixture(scope="module")
def served(exported):
    return Served(exported / "servable", most_rows=16, most_answers=50)


@pytest.fixture(scope="module")
def server(served):
    with Server(served, "shop", port=0, most_bytes=10_000) as server:
        yield server


def call(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def predict(server, **question):
    return call(server, "POST", PREDICT, question)


@pytest.mark.slow
def test_status_and_metadata_are_those_of_tensorflow_serving(server):
    for path in ("/v1/models/shop", "/v1/models/shop/versions/1"):
        status, found = call(server, "GET", path)
        (version,) = found["model_version_status"]
        assert (status, version["version"], version["state"]) == (200, "1", "AVAILABLE")
        assert version["status"] == {"error_code": "OK", "error_message": ""}
    status, found = call(server, "GET", "/v1/models/shop/metadata")
    assert status == 200 and found["model_spec"] == {"name": "shop", "signature_name": "", "version": "1"}
    signatures = found["metadata"]["signature_def"]["signature_def"]
    assert set(signatures) == {"serving_default", "top_k", "among", "ragged", "__saved_model_init_op"}
    history = signatures["top_k"]["inputs"]["history"]
    assert history["dtype"] == "DT_STRING" and [d["size"] for d in history["tensor_shape"]["dim"]] == ["-1", "-1"]
    assert set(signatures["top_k"]["outputs"]) == {"ids", "titles", "scores", "known"}


def test_rows_and_columns_are_answered_alike(server, recommender):
    rows = [["item 1", "item 2"], ["", "nowhere"]]
    answers = [
        predict(server, instances=rows),
        predict(server, instances=[{"history": row} for row in rows]),
        predict(server, signature_name="serving_default", instances=rows),
    ]
    status, found = answers[0]
    assert status == 200 and all(answer == answers[0] for answer in answers)
    assert [row["known"] for row in found["predictions"]] == [2, 0]
    best, _ = recommender.recommend([[1, 2], []], 4)
    assert [row["ids"] for row in found["predictions"]] == [[f"item {i}" for i in row] for row in best]
    for inputs in (rows, {"history": rows}):
        status, columns = predict(server, inputs=inputs)
        assert status == 200 and columns["outputs"]["ids"] == [row["ids"] for row in found["predictions"]]
    status, some = predict(server, signature_name="top_k", inputs={"history": rows[:1], "k": 2})
    assert some["outputs"]["ids"] == [found["predictions"][0]["ids"][:2]]
    inputs = {"history": [["item 1"]], "k": 3, "allowed": ["item 3", "item 1", "item 4"]}
    _, some = predict(server, signature_name="among", inputs=inputs)
    (answer,) = some["outputs"]["ids"]
    assert set(answer[:2]) == {"item 3", "item 4"} and answer[2] == ""
    assert {"Third of all", "Øl"} < set(some["outputs"]["titles"][0])
    _, some = predict(server, signature_name="ragged", inputs={"items": ["item 1"], "lengths": [1, 0], "k": 1})
    assert some["outputs"]["known"] == [1, 0]


def test_histories_of_one_request_may_differ_in_length(server):
    histories = [["item 1", "item 4", "item 2"], [], ["item 3"]]
    _, found = predict(server, instances=histories)
    alone = [predict(server, instances=[each])[1]["predictions"][0] for each in histories]
    for one, other in zip(found["predictions"], alone):
        assert {k: one[k] for k in ("ids", "titles", "known")} == {k: other[k] for k in ("ids", "titles", "known")}
        np.testing.assert_allclose(one["scores"], other["scores"], rtol=1e-5)
    assert [each["known"] for each in found["predictions"]] == [3, 0, 1]


def test_a_long_history_beside_many_short_ones_is_refused_before_it_takes_memory(exported):
    with pytest.raises(BadRequest, match="1001 histories of 5000 items are too much"):
        Served(exported / "servable").predict({"instances": [["item 1"] * 5000, *([[]] * 1000)]})


def test_the_same_path_takes_a_version(server):
    question = {"instances": [["item 1"]]}
    assert call(server, "POST", "/v1/models/shop/versions/1:predict", question) == predict(server, **question)


@pytest.mark.parametrize(
    "question, says",
    [
        ({}, '"instances" (a list of rows) or "inputs"'),
        ({"instances": [], "inputs": []}, "not both"),
        ({"instances": []}, "at least one row"),
        ({"instances": "item 1"}, "must be a list"),
        ({"instances": [["item 1"], "item 2"]}, "history must be lists 2 deep, got 1 deep"),
        ({"instances": ["item 1"]}, 'history must be lists 2 deep, got 1 deep: ["item 1"] in place of "item 1".'),
        ({"instances": [[7]]}, "history must hold texts, got 7"),
        ({"instances": [[None]]}, "history must hold texts, got null"),
        ({"instances": [["\ud800"]]}, "history must hold texts"),
        ({"inputs": {"\ud800": 1}}, "This signature takes history, got ?"),
        ({"instances": [{"past": ["item 1"]}]}, "must be an object with history"),
        ({"instances": [[""]] * 17}, "at most 16 are answered"),
        ({"instances": [[""]], "signature_name": "best"}, "There is no signature 'best'; there are among, ragged"),
        ({"instances": [[""]], "signature_name": ["top_k"]}, "There is no signature"),
        ({"instances": [{"history": [""], "k": 1}], "signature_name": "top_k"}, 'send "inputs"'),
        ({"inputs": {"history": [[""]]}, "signature_name": "top_k"}, "takes history, k, got history."),
        ({"inputs": {"history": [[""]], "k": 0}, "signature_name": "top_k"}, "k must be between 1 and 50, got 0"),
        ({"inputs": {"history": [[""]], "k": True}, "signature_name": "top_k"}, "k must hold whole numbers, got true"),
        ({"inputs": {"history": [[""]], "k": 1.5}, "signature_name": "top_k"}, "k must hold whole numbers, got 1.5"),
        ({"inputs": {"history": [[""]], "k": 2**40}, "signature_name": "top_k"}, "k must hold whole numbers"),
        ({"inputs": {"items": [""], "lengths": [2], "k": 1}, "signature_name": "ragged"}, "refuses the request"),
        ({"inputs": {"items": [""], "lengths": [1, 2**30], "k": 1}, "signature_name": "ragged"}, "too much"),
        ({"inputs": {"items": [""], "lengths": [-1, 2], "k": 1}, "signature_name": "ragged"}, "refuses the request"),
        (["instances"], "Send a JSON object"),
    ],
)
def test_wrong_questions_are_answered_in_a_sentence(server, question, says):
    status, found = call(server, "POST", PREDICT, question)
    assert (status, list(found)) == (400, ["error"])
    assert says in found["error"] and found["error"].endswith(".") and len(found["error"]) < 500


@pytest.mark.parametrize(
    "method, path, body, headers, status, says",
    [
        ("POST", PREDICT, b"{", {}, 400, "not JSON"),
        ("POST", PREDICT, b"[" * 9000, {}, 400, "not JSON"),
        ("POST", PREDICT, b"\xff\xfe", {}, 400, "not JSON"),
        ("POST", PREDICT, b" " * 10_001, {}, 413, "has 10001 bytes; at most 10000 are read"),
        ("POST", PREDICT, b'{"instances": ' + b"[" * 10**3 + b"]" * 10**3 + b"}", {}, 400, "JSON"),
        ("POST", PREDICT, b'{"inputs": NaN}', {}, 400, "NaN is no number"),
        ("POST", PREDICT, b'{"inputs": [[-Infinity]]}', {}, 400, "-Infinity is no number"),
        ("POST", PREDICT, b'{"inputs": ' + b"9" * 9000 + b"}", {}, 400, "not JSON"),
        ("POST", PREDICT, b'{"instances": [[""]], "instances": [["item 1"]]}', {}, 400, "name twice"),
        ("POST", PREDICT, b'{"instances": [{"history": [], "history": [""]}]}', {}, 400, "name twice"),
        ("POST", PREDICT, b"0\r\n\r\n", {"Transfer-Encoding": "chunked"}, 411, "Content-Length"),
        ("POST", "/v1/models/other:predict", b"{}", {}, 404, "the model is /v1/models/shop, version 1"),
        ("POST", "/v1/models/shop/versions/2:predict", b"{}", {}, 404, "version 1"),
        ("POST", "/v1/models/shop:classify", b"{}", {}, 404, "Only :predict is answered"),
        ("GET", PREDICT, None, {}, 405, "Send a POST"),
        ("GET", "/", None, {}, 404, "There is nothing at /"),
        ("GET", "/v1/models/../../etc/passwd", None, {}, 404, "There is nothing"),
        ("DELETE", "/v1/models/shop", None, {}, 501, "Not Implemented"),
        ("POST", PREDICT, b"{}", {"Host": "evil.example"}, 403, "localhost or 127.0.0.1"),
        ("GET", "/v1/models/shop", None, {"Host": "evil.example:8501"}, 403, "localhost"),
    ],
)
def test_wrong_calls_are_answered_in_json(server, method, path, body, headers, status, says):
    got, found = call(server, method, path, body, **headers)
    assert (got, list(found)) == (status, ["error"]) and says in found["error"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8501", "127.0.0.1:1", "[::1]:8501", "127.0.0.9"])
def test_this_machine_may_be_called_by_its_names(server, host):
    assert call(server, "GET", "/v1/models/shop", Host=host)[0] == 200


def test_one_connection_takes_many_requests_and_an_idle_one_blocks_no_other(server):
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.sendall(b"POST " + PREDICT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        for _ in range(3):
            connection.request("POST", PREDICT, json.dumps({"instances": [["item 1"]]}))
            assert connection.getresponse().read()
        connection.close()


@pytest.mark.parametrize(
    "options, says",
    [
        ({"host": "0.0.0.0"}, "can be reached from other machines"),
        ({"host": "::"}, "can be reached from other machines"),
        ({"host": "192.0.2.7"}, "can be reached from other machines"),
        ({"host": "no such name"}, "is not an address of this machine"),
        ({"name": "a/b"}, "--name must consist of letters"),
        ({"name": "é"}, "--name must consist of letters"),  # no path of a request can hold it
        ({"port": 70_000}, "--port must be between 0 and 65535"),
    ],
)
def test_other_machines_are_let_in_only_by_an_option(served, options, says):
    with pytest.raises(ValueError, match=says):
        Server(served, **{"port": 0, **options})


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6")
def test_the_address_may_be_of_version_6(served):
    with Server(served, port=0, host="::1") as server, socket.create_connection(("::1", server.port), 20) as line:
        line.sendall(b"GET /v1/models/recommender HTTP/1.1\r\nHost: [::1]\r\n\r\n")
        assert line.recv(12) == b"HTTP/1.1 200" and server.url == f"http://[::1]:{server.port}/v1/models/recommender"


def test_who_is_let_in_by_name_is_let_in(served):
    with Server(served, port=0, host="0.0.0.0", open_to_the_network=True) as server:
        assert call(server, "GET", "/v1/models/recommender", Host="shop.example")[0] == 200


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_was_asked_is_answered_before_the_command_ends(exported, capsys, monkeypatch, stop):
    """The answers in flight were lost."""
    asked, go_on, answers, port = threading.Event(), threading.Event(), [], free_port()
    at_once = Served.predict

    def predict_slowly(self, question):
        asked.set()
        go_on.wait(30)
        return at_once(self, question)

    def ask():
        for _ in range(2000):  # a command begins slowly where much else runs
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=40)
                connection.request("POST", PREDICT, json.dumps({"instances": [["item 1"]]}))
                answers.append(json.loads(connection.getresponse().read()))
                break
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
        asked.set()

    def end():
        asked.wait(120)
        os.kill(os.getpid(), stop)
        threading.Event().wait(1.0)
        go_on.set()

    monkeypatch.setattr(Served, "predict", predict_slowly)
    threads = [threading.Thread(target=each) for each in (ask, end)]
    before = signal.signal(stop, lambda *_: None)  # should serving fail, the test says so
    for thread in threads:
        thread.start()
    try:
        assert main(["serve", str(exported), "--port", str(port), "--name", "shop"]) == 0
        waited = go_on.is_set()
    finally:
        for thread in threads:
            thread.join()
        signal.signal(stop, before)
    assert waited and len(answers[0]["predictions"][0]["ids"]) == 4
    assert f"http://127.0.0.1:{port}/v1/models/shop:predict" in capsys.readouterr().out


def test_the_command_names_the_extra_that_is_missing(exported, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["serve", str(exported)]) == 2
    assert "tfdp-rec[serve]" in capsys.readouterr().err


def test_a_model_that_keras_exported_is_served_too(tmp_path):
    items = keras.Input([], dtype="int32", name="item")
    model = tfdp_rec.PrivateModel({"item": items}, keras.layers.Embedding(5, 2)(items))
    model.export(tmp_path / "mine", verbose=False)
    assert find_servable(tmp_path / "mine") == tmp_path / "mine"
    assert find_servable(tmp_path) == tmp_path / "release" / "servable"
    rows = Served(find_servable(tmp_path / "mine")).predict({"instances": [{"item": 3}, {"item": 0}]})["predictions"]
    np.testing.assert_allclose(rows, model.predict({"item": np.array([3, 0], "int32")}, verbose=0))


def test_a_folder_without_a_model_and_a_port_that_is_taken_are_one_line(exported, tmp_path, server, capsys):
    assert main(["serve", str(tmp_path)]) == 2
    assert "holds no exported model" in capsys.readouterr().err
    assert main(["serve", str(exported), "--port", str(server.port)]) == 2
    said = capsys.readouterr().err
    assert f"--port {server.port}" in said and said.count("\n") == 1


# What one caller can take.


@pytest.fixture
def small_server(served):
    """For four connections, and half a second of patience."""
    with Server(served, "shop", port=0, most_bytes=10_000, most_connections=4, patience=0.5) as server:
        yield server


def dialled(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def test_a_caller_who_sends_a_byte_at_a_time_is_hung_up_on(small_server):
    with dialled(small_server) as slow:
        begun = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - begun < 15:
                slow.sendall(b"P")
                time.sleep(0.05)
                slow.settimeout(0.001)
                with contextlib.suppress(TimeoutError):
                    if not slow.recv(1):
                        raise OSError("hung up")
                slow.settimeout(20)


def test_slow_callers_make_room_for_those_who_ask(served):
    with Server(served, "shop", port=0, most_connections=4, patience=600.0) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(dialled(server)) for _ in range(30)]
        for each in slow:
            each.sendall(b"POST ")
        assert predict(server, instances=[["item 1"]])[0] == 200
        with contextlib.suppress(ConnectionError):
            assert slow[0].recv(1) == b""  # the first made room


@pytest.fixture
def waiting(served, monkeypatch):
    """What lets the predictions go on that wait, and counts them."""
    answering, go_on = threading.Semaphore(0), threading.Event()

    def predict_slowly(question):
        answering.release()
        go_on.wait(30)
        return {"predictions": []}

    monkeypatch.setattr(served, "predict", predict_slowly)
    yield answering, go_on
    go_on.set()


def wait_until(so):
    """Returns when it is so, or after half a minute."""
    for _ in range(3000):
        if so():
            break
        threading.Event().wait(0.01)


@contextlib.contextmanager
def asking(server, number):
    """Questions that are asked at the same time, each by a caller of its own, and their answers once they are there."""
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(predict(server, instances=[]))) for _ in range(number)]
    for thread in threads:
        thread.start()
    yield answers
    for thread in threads:
        thread.join()


def test_where_all_connections_are_being_answered_a_further_one_is_closed(served, waiting):
    answering, go_on = waiting
    with Server(served, "shop", port=0, most_connections=2) as server, asking(server, 2) as answers:
        for _ in range(2):
            assert answering.acquire(timeout=30)
        with dialled(server) as further:
            assert further.recv(1) == b""
        go_on.set()
    assert [status for status, _ in answers] == [200, 200]


def test_who_asks_beyond_the_places_is_told_so_and_the_status_is_answered_still(served, waiting, monkeypatch):
    answering, go_on = waiting
    monkeypatch.setattr(module_of_server, "_MOST_ASKED", 10)
    with Server(served, "shop", port=0) as server, asking(server, 14) as answers:
        wait_until(lambda: len(answers) == 4)
        assert call(server, "GET", "/v1/models/shop")[0] == 200
        assert sum(answering.acquire(timeout=0.1) for _ in range(14)) == 8  # at the same time
        go_on.set()
    assert [status for status, _ in answers] == [503] * 4 + [200] * 10
    assert "ask again later" in answers[0][1]["error"]


def test_who_was_refused_keeps_no_place(served, waiting, monkeypatch):
    answering, go_on = waiting
    monkeypatch.setattr(module_of_server, "_MOST_ASKED", 3)
    with Server(served, "shop", port=0) as server:
        with asking(server, 6) as answers:
            wait_until(lambda: len(answers) == 3)
            go_on.set()
        assert sorted(status for status, _ in answers) == [200] * 3 + [503] * 3
        assert predict(server, instances=[])[0] == 200


def test_who_does_not_take_the_answers_is_hung_up_on(served, monkeypatch):
    """A second question, sent while the first answer waits, bought time without end."""
    monkeypatch.setattr(served, "predict", lambda question: {"predictions": ["x" * 3_000_000]})
    with Server(served, "shop", port=0, patience=0.5) as server, dialled(server) as line:
        head = f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
        line.sendall(20 * (head.encode() + b"{}"))
        found = line.recv(1)
        wait_until(lambda: not server._uvicorn.server_state.connections)
        with contextlib.suppress(ConnectionError):
            while more := line.recv(1 << 20):
                found += more
    assert found.count(b"HTTP/1.1 200") < 20


def test_an_error_while_answering_says_nothing_of_the_question(served, server, monkeypatch, caplog, capfd):
    def fail(question):
        raise RuntimeError(str(question))

    monkeypatch.setattr(served, "predict", fail)
    status, found = predict(server, instances=[["a-private-item"]])
    assert (status, found) == (500, {"error": "RuntimeError while answering."})
    assert not caplog.text and not capfd.readouterr().err


@pytest.mark.parametrize("path", [PREDICT, "/v1/models/other:predict"])
def test_a_question_of_ten_megabytes_is_refused_to_who_sends_all_of_it_first(server, path):
    status, found = call(server, "POST", path, b" " * 10_000_000)
    assert (status, "10000000 bytes" in found["error"]) in [(413, True), (404, False)]


@pytest.mark.parametrize("depth", [33, 900, 4000])
def test_a_question_of_lists_in_lists_is_no_error_of_the_server(server, depth):
    status, found = call(server, "POST", PREDICT, b'{"instances": ' + b"[" * depth + b"]" * depth + b"}")
    assert status == 400 and ("more than 32 deep" in found["error"] or "recursion" in found["error"])


def test_a_question_nested_a_hundred_thousand_deep_is_refused_in_a_sentence(served):
    with Server(served, "shop", port=0) as server:
        for body in (b"[" * 10**5 + b"]" * 10**5, b'{"a":' * 10**5 + b"1" + b"}" * 10**5, b"9" * 10**5):
            status, found = call(server, "POST", PREDICT, body)
            assert (status, list(found)) == (400, ["error"]) and len(found["error"]) < 500


def test_a_body_does_not_wait_until_its_head_is_noted(served):
    with Server(served, port=0) as server, dialled(server):
        wait_until(lambda: server.waiting)
        (connection,) = server.waiting
        option = connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert option


# Where a request ends is told by uvicorn and h11: what they take for none has no answer, and brings down nothing.


def said_to(server, sent):
    """All that is answered until the connection ends."""
    with dialled(server) as line:
        line.sendall(sent)
        found = b""
        with contextlib.suppress(ConnectionError):
            while more := line.recv(1 << 16):
                found += more
    return found


STATUS = b"GET /v1/models/shop HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("length", ["²", "-1", "+2", "2, 2", "2, 3", "0x2", "2 2", "", "9" * 20, "9" * 5000])
def test_a_length_that_is_none_is_refused(server, length):
    head = f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{{}}"
    with dialled(server) as line:
        line.sendall(head.encode("latin-1"))
        assert line.recv(10) == b"HTTP/1.1 4"


@pytest.mark.parametrize("head", ["Content-Length: {}", "Transfer-Encoding: chunked", "Content-Length : {}"])
def test_what_a_question_without_a_body_carries_is_no_further_question(server, head):
    """Behind a proxy the rest of a connection is another caller's, whose history was quoted in the error."""
    rest = b"GET /v1/models/a-private-item HTTP/1.1\r\nHost: localhost\r\nX-Swallow: "
    asked = STATUS + head.format(len(rest)).encode() + b"\r\n\r\n" + rest
    found = said_to(server, asked + STATUS + b"Connection: close\r\n\r\n")
    assert b"private" not in found
    if head == "Content-Length: {}":
        assert found.count(b"HTTP/1.1 200") == found.count(b"HTTP/1.1") == 2
    else:
        assert found.startswith(b"HTTP/1.1 400") and found.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("coding", ["chunked", "Chunked", "chunked, identity", "xchunked", "\x0bchunked"])
def test_a_request_with_two_ends_is_the_last_of_its_connection(server, method, coding):
    """A proxy that goes by the length takes what stands after the last chunk for a part of the request."""
    path, rest = PREDICT if method == "POST" else "/v1/models/shop", b"0\r\n\r\n" + STATUS + b"\r\n"
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(rest)}\r\nTransfer-Encoding: {coding}"
    found = said_to(server, head.encode() + b"\r\n\r\n" + rest)
    assert found.count(b"HTTP/1.1") == 1
    assert found.startswith(b"HTTP/1.1 4") or method == "GET" and found.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        b'{"instances": [["a-private-item"]]} nonsense here\r\n\r\n',
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 private",  # TLS
        b"GET /v1/models/shop HTTP/1.1\r\nX-Private: private\r\n\r\n",  # no host
        STATUS + b"Host: private\r\n\r\n",
        STATUS + b"X-Long: " + b"private" * 20_000,
        STATUS + b"X-Null: private\0\r\n\r\n",
        STATUS + b"private\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nprivate",
    ],
    ids=range(8),
)
def test_what_is_no_request_is_not_quoted_and_not_logged(server, sent, caplog, capfd):
    found = said_to(server, sent)
    assert set(re.findall(rb"HTTP/1.1 (.)", found)) == {b"4"} and b"private" not in found
    assert call(server, "GET", "/v1/models/shop")[0] == 200
    assert not caplog.text and not capfd.readouterr().err


def test_an_upgrade_is_no_upgrade(server, caplog, capfd):
    upgrade = b"Connection: upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Key: private\r\n\r\n"
    with dialled(server) as line:
        line.sendall(STATUS + upgrade)
        assert line.recv(12) == b"HTTP/1.1 200"
    assert not caplog.text and not capfd.readouterr().err


def test_who_asks_first_whether_a_long_question_may_be_sent_is_told_no(server):
    with dialled(server) as line:
        line.sendall(
            f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n".encode()
            + b"Content-Length: 20000\r\n\r\n"
        )
        assert line.recv(12) == b"HTTP/1.1 413"


def test_a_short_question_has_no_answer_of_megabytes(exported):
    served = Served(exported / "servable")
    rows = [[""]] * 1000
    with pytest.raises(BadRequest, match="1000 times 1000 items are too much for one answer"):
        served.predict({"signature_name": "top_k", "inputs": {"history": rows, "k": 1000}})
    ragged = {"items": [], "lengths": [0] * 1000, "k": 1000}
    with pytest.raises(BadRequest, match="too much for one answer"):
        served.predict({"signature_name": "ragged", "inputs": ragged})
    some = served.predict({"signature_name": "top_k", "inputs": {"history": rows, "k": 40}})
    assert len(json.dumps(some)) < 2**22


@pytest.mark.parametrize("way", ["inputs", "instances"])
def test_a_long_history_among_short_ones_is_read_entry_by_entry_once(exported, monkeypatch, way):
    """24 KB took six seconds: a thousand short ones were filled up to its length, and each filler looked at."""
    looked_at = []
    of_old = rest._value
    monkeypatch.setattr(rest, "_value", lambda *given: looked_at.append(given) or of_old(*given))
    histories = [["item 3"] * 4000, *[[]] * 1000, ["item 1", "item 2"]]
    asked = {"history": histories} if way == "inputs" else [{"history": each} for each in histories]
    answers = Served(exported / "servable").predict({way: asked})
    known = answers["outputs"]["known"] if way == "inputs" else [each["known"] for each in answers["predictions"]]
    assert known == [4000, *[0] * 1000, 2]
    assert len(looked_at) == 4002


@pytest.mark.parametrize("signature", ["serving_default", "top_k", "among", "ragged"])
def test_one_long_history_does_not_lengthen_the_others(exported, signature):
    """8 KB took a gigabyte: 1,024 histories were filled up to the longest of them, at the same time."""
    histories = [*[["item 3", "item 1"]] * 500, ["item 7"] * 4000, *[["item 1"], []] * 260]
    k, allowed = {"k": 4}, {"allowed": [f"item {i}" for i in range(1, 40)]}
    if signature == "ragged":
        flat = [item for each in histories for item in each]
        asked = {"items": flat, "lengths": [len(each) for each in histories]} | k
    else:
        asked = {"history": histories} | {"serving_default": {}, "top_k": k, "among": k | allowed}[signature]
    served, given = Served(exported / "servable"), []
    answer = served._signatures[signature]

    class Watched:
        structured_input_signature = answer.structured_input_signature

        def __call__(self, **tensors):
            given.append(tensors)
            return answer(**tensors)

    served._signatures[signature] = Watched()
    found = served.predict({"signature_name": signature, "inputs": asked})["outputs"]
    assert found["known"] == [len(each) for each in histories]
    for place in (0, 499, 500, 501, 502, 1019):
        one = {"history": [histories[place]]} | ({"allowed": allowed["allowed"]} if signature == "among" else {}) | k
        alone = served.predict({"signature_name": "among" if signature == "among" else "top_k", "inputs": one})
        assert found["ids"][place] == alone["outputs"]["ids"][0]
    if signature == "ragged":
        cells = [len(some["lengths"]) * int(max(some["lengths"])) for some in given]
    else:
        cells = [int(tf.size(some["history"])) for some in given]
    assert max(cells) <= 2**16 and len(given) < 40


def test_inputs_of_a_model_of_ones_own_may_have_any_name(tmp_path):
    """A `k` of each row was taken for a recommender's, and the answer was an error of the server."""
    inputs = {name: keras.Input([], dtype="int32", name=name) for name in ("k", "lengths", "allowed")}
    model = tfdp_rec.PrivateModel(inputs, sum(keras.layers.Embedding(5, 2)(each) for each in inputs.values()))
    model.export(tmp_path / "mine", verbose=False)
    rows = [{"k": 1, "lengths": 2, "allowed": 0}, {"k": 4, "lengths": 4, "allowed": 4}]
    found = Served(tmp_path / "mine").predict({"instances": rows})["predictions"]
    columns = {name: np.array([row[name] for row in rows], "int32") for name in inputs}
    np.testing.assert_allclose(found, model.predict(columns, verbose=0), rtol=1e-6)


def test_an_answer_of_a_model_of_ones_own_is_bounded_too(tmp_path):
    items = keras.Input([], dtype="int32", name="item")
    model = tfdp_rec.PrivateModel({"item": items}, keras.layers.Embedding(5, 300)(items))
    model.export(tmp_path / "mine", verbose=False)
    served = Served(tmp_path / "mine")
    assert len(served.predict({"instances": [{"item": 3}] * 100})["predictions"]) == 100
    with pytest.raises(BadRequest, match="The answer is too long"):
        served.predict({"instances": [{"item": 3}] * 1000})


# What operators ask.


def asked_of(server, path):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.headers["Content-Type"], answer.read().decode()


def samples(server):
    """What Prometheus reads, as its own client does: the value of each series by its name and labels."""
    kind, text = asked_of(server, "/metrics")
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def test_requests_are_counted_by_status(served):
    with Server(served, "shop", port=0) as server:
        questions = [{"instances": [["item 1"]]}] * 3 + [{"instances": "none"}, {}]
        got = Counter(predict(server, **question)[0] for question in questions)
        got[call(server, "GET", PREDICT)[0]] += 1
        got[call(server, "GET", "/secret")[0]] += 1
        got[call(server, "GET", "/metrics", Host="evil.example")[0]] += 1
        said_to(server, b"no HTTP\r\n\r\n")
        got[400] += 1
        assert got == {200: 3, 400: 3, 403: 1, 404: 1, 405: 1}
        found = samples(server)
        assert {int(key[1]): n for key, n in found.items() if key[0] == "tfdp_rec_requests_total"} == got
        assert found["tfdp_rec_prediction_seconds_count",] == 5
        assert samples(server)["tfdp_rec_requests_total", "200"] == 4  # the answer before was counted


def test_what_runs_and_what_waits_is_told(served, waiting, monkeypatch):
    answering, go_on = waiting
    monkeypatch.setattr(module_of_server, "_MOST_ASKED", 10)
    with Server(served, "shop", port=0) as server:
        with asking(server, 14) as answers, dialled(server):
            wait_until(lambda: len(answers) == 4 and len(server._uvicorn.server_state.connections) == 11)
            found = samples(server)
            go_on.set()
        assert found["tfdp_rec_predictions", "running"] == 8 and found["tfdp_rec_predictions", "waiting"] == 2
        assert found["tfdp_rec_connections",] == 12 and found["tfdp_rec_requests_total", "503"] == 4
        wait_until(lambda: len(server._uvicorn.server_state.connections) == 0)
        found = samples(server)
        assert not found["tfdp_rec_predictions", "running"] and not found["tfdp_rec_predictions", "waiting"]
        assert found["tfdp_rec_connections",] == 1 and found["tfdp_rec_prediction_seconds_count",] == 10


def test_times_are_told_by_their_buckets_alone():
    bounds = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
    seconds, traffic = [0.0, 0.01, 0.010001, 0.3, 0.5, 7.0, 11.0, 1000.0], Traffic()
    for each in seconds:
        traffic.note_prediction(each)
    (found,) = [f for f in text_string_to_metric_families(traffic.describe(0, 0, 0).decode()) if f.type == "histogram"]
    told = {(each.name, each.labels.get("le")): each.value for each in found.samples}
    name = "tfdp_rec_prediction_seconds"
    expected = {(f"{name}_bucket", str(bound)): sum(each <= bound for each in seconds) for bound in bounds}
    whole = sum(min(bound for bound in [*bounds, np.inf] if each <= bound) for each in seconds if each <= 10) + 2 * 10.0
    counted = {(f"{name}_bucket", "+Inf"): 8, (f"{name}_count", None): 8}
    assert told == expected | counted | {(f"{name}_sum", None): pytest.approx(whole)}


def test_nothing_that_is_counted_tells_what_was_asked(served, monkeypatch):
    monkeypatch.setattr(served, "predict", lambda question: {"predictions": []})
    texts = []
    for history in ["item 1"], [f"a-private-item {i}" for i in range(400)]:
        with Server(served, "shop", port=0) as server:
            predict(server, instances=[history])
            call(server, "GET", f"/{history[0]}".replace(" ", "-"))
            texts.append(re.sub(r"(_(bucket\S*|sum)) \S+", r"\1", asked_of(server, "/metrics")[1]))
    assert texts[0] == texts[1] and "item" not in texts[0]


SAID = """\
Guarantee:      (epsilon = 7.25, delta = 1e-06)-differential privacy.
Protected unit: one user, giving at most one row to any batch.
"""


@pytest.mark.parametrize(
    "text, epsilon, delta",
    [
        (SAID, 7.25, 1e-6),
        (report.NO_GUARANTEE, None, None),
        (SAID.replace("(eps", "none, since no epsilon covers 3 steps. The training alone has (eps"), None, None),
    ],
)
@pytest.mark.parametrize("given", ["RUN", "RUN/release", "RUN/release/servable"])
def test_the_statement_is_that_of_the_run(exported, tmp_path, text, epsilon, delta, given):
    shutil.copytree(exported / "servable", tmp_path / "RUN" / "release" / "servable")
    (tmp_path / "RUN" / "release" / "statement.txt").write_text(text, encoding="utf-8")
    servable = find_servable(tmp_path / given)
    with Server(Served(servable), "shop", port=0, statement=read_statement(servable)) as server:
        status, found = call(server, "GET", "/statement")
        assert status == 200 and found == {"epsilon": epsilon, "delta": delta, "statement": text, "message": ""}
        assert call(server, "POST", "/statement", {})[0] == 404
        assert call(server, "GET", "/statement", Host="evil.example")[0] == 403


def test_a_model_without_a_statement_says_so(exported, tmp_path, server):
    status, found = call(server, "GET", "/statement")
    assert status == 200 and "There is no statement beside this model" in found.pop("message")
    assert found == {"epsilon": None, "delta": None, "statement": ""}
    shutil.copytree(exported / "servable", tmp_path / "mine")
    (tmp_path / "statement.txt").write_text(SAID)
    assert read_statement(tmp_path / "mine") == ""  # what lies beside a folder of another name is of another thing


def test_what_lies_beside_a_link_to_a_model_is_not_its_statement(exported, tmp_path):
    """A text of a smaller epsilon was told of the model that the link leads to."""
    run = tmp_path / "run"
    shutil.copytree(exported, run / "servable")
    (run / "statement.txt").write_text(SAID)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "servable").symlink_to(run / "servable")
    (tmp_path / "other" / "statement.txt").write_text(SAID.replace("7.25", "0.1"))
    assert read_statement(tmp_path / "other" / "servable") == SAID


def test_the_statement_is_read_after_the_model(exported, tmp_path, monkeypatch):
    """A further day that ends while a server starts: its model would be served under the ε of the day before."""
    shutil.copytree(exported / "servable", tmp_path / "servable")
    (tmp_path / "statement.txt").write_text(SAID)
    load, told = tf.saved_model.load, []

    def end_the_day(folder):
        (tmp_path / "statement.txt").write_text(SAID.replace("7.25", "9"))
        return load(folder)

    def end(self):
        told.append(asked_of(self, "/statement")[1])
        raise KeyboardInterrupt

    monkeypatch.setattr(tf.saved_model, "load", end_the_day)
    monkeypatch.setattr(Server, "url", property(end))
    assert main(["serve", str(tmp_path), "--port", "0"]) == 0
    assert json.loads(told[0])["epsilon"] == 9


# The end.


def refuses_connections(server):
    try:
        dialled(server).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_server_that_ends_answers_what_was_asked_and_open_connections_are_told_so(served, waiting):
    """With patience of ten minutes: that the end comes at all is the last answer's doing, and not the clock's."""
    answering, go_on = waiting
    server = Server(served, "shop", port=0, patience=600.0).__enter__()
    end = threading.Thread(target=server.__exit__)
    silent = dialled(server)  # open to the end
    with dialled(server) as idle, dialled(server) as other, asking(server, 1) as answers:
        assert answering.acquire(timeout=30)
        wait_until(lambda: len(server._uvicorn.server_state.connections) == 4)
        end.start()
        wait_until(lambda: refuses_connections(server))
        assert refuses_connections(server) and end.is_alive() and not answers
        idle.sendall(STATUS + b"\r\n")
        found = http.client.HTTPResponse(idle)
        found.begin()
        (version,) = json.loads(found.read())["model_version_status"]
        assert (found.status, version["state"], version["status"]["error_code"]) == (503, "UNLOADING", "UNAVAILABLE")
        assert found.headers["Connection"] == "close" and idle.recv(1) == b""
        other.sendall(f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        assert answering.acquire(timeout=30)
        go_on.set()
        assert other.recv(12) == b"HTTP/1.1 200"
    end.join(20)
    assert [status for status, _ in answers] == [200] and not end.is_alive() and silent.recv(1) == b""
    silent.close()


def test_a_prediction_that_does_not_end_does_not_keep_the_server(served, waiting):
    answering, go_on = waiting
    server = Server(served, "shop", port=0, patience=1.0).__enter__()
    with asking(server, 1) as answers:
        assert answering.acquire(timeout=30)
        server.__exit__()
    assert server.is_answering and answers == [(503, {"error": "The server ends: ask another."})]
