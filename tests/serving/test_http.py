"""HTTP: the shape of TensorFlow Serving's REST interface, clear errors, and refusals of callers from elsewhere."""

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp_rec
from tfdp_rec.cli import main
from tfdp_rec.job.run_folder import servable_in
from tfdp_rec.serving import Served, Server, rest
from tfdp_rec.serving.rest import BadRequest

PREDICT = "/v1/models/shop:predict"


@pytest.fixture(scope="module")
def served(exported):
    return Served(exported / "servable", most_rows=16, most_answers=50)


@pytest.fixture(scope="module")
def server(served):
    server = Server(served, "shop", port=0, most_bytes=10_000)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def call(server, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def predict(server, **question):
    return call(server, "POST", PREDICT, question)


def test_status_and_metadata_are_those_of_tensorflow_serving(server):
    for path in ("/v1/models/shop", "/v1/models/shop/versions/1"):
        status, found = call(server, "GET", path)
        (version,) = found["model_version_status"]
        assert (status, version["version"], version["state"]) == (200, "1", "AVAILABLE")
        assert version["status"] == {"error_code": "OK", "error_message": ""}
    status, found = call(server, "GET", "/v1/models/shop/metadata")
    assert status == 200 and found["model_spec"] == {"name": "shop", "signature_name": "", "version": "1"}
    signatures = found["metadata"]["signature_def"]["signature_def"]
    assert set(signatures) == {"serving_default", "top_k", "among", "ragged"}
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


def test_a_long_history_beside_many_short_ones_is_refused_before_it_takes_memory():
    with pytest.raises(BadRequest, match="1001 histories of 5000 items are too much"):
        rest._filled_up("history", [["item 1"] * 5000, *([[]] * 1000)], tf.TensorSpec([None, None], tf.string))


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
        ({"instances": ["item 1"]}, "history must be lists 2 deep, got 1 deep"),
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
        ("POST", PREDICT, b"{}", {"Content-Length": "-1"}, 411, "Content-Length"),
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
    with socket.create_connection(("127.0.0.1", server.server_port)) as silent:
        silent.sendall(b"POST " + PREDICT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
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


def test_who_is_let_in_by_name_is_let_in(served):
    with Server(served, port=0, host="0.0.0.0", open_to_the_network=True) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert call(server, "GET", "/v1/models/recommender", Host="shop.example")[0] == 200
        server.shutdown()


def test_the_command_serves_until_it_is_told_to_stop(exported, capsys):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    answers = []

    def ask():
        for _ in range(400):
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                connection.request("POST", "/v1/models/shop:predict", json.dumps({"instances": [["item 1"]]}))
                answers.append(json.loads(connection.getresponse().read()))
                break
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    before = signal.getsignal(signal.SIGTERM)
    asking.start()
    signal.signal(signal.SIGTERM, lambda *_: None)  # should serving fail, the test says so
    try:
        assert main(["serve", str(exported), "--port", str(port), "--name", "shop"]) == 0
    finally:
        asking.join()
        signal.signal(signal.SIGTERM, before)
    assert len(answers[0]["predictions"][0]["ids"]) == 4
    assert f"http://127.0.0.1:{port}/v1/models/shop:predict" in capsys.readouterr().out


def test_a_model_that_keras_exported_is_served_too(tmp_path):
    items = keras.Input([], dtype="int32", name="item")
    model = tfdp_rec.PrivateModel({"item": items}, keras.layers.Embedding(5, 2)(items))
    model.export(tmp_path / "mine", verbose=False)
    assert servable_in(tmp_path / "mine") == tmp_path / "mine"
    assert servable_in(tmp_path) == tmp_path / "release" / "servable"
    rows = Served(servable_in(tmp_path / "mine")).predict({"instances": [{"item": 3}, {"item": 0}]})["predictions"]
    np.testing.assert_allclose(rows, model.predict({"item": np.array([3, 0], "int32")}, verbose=0))


def test_a_folder_without_a_model_and_a_port_that_is_taken_are_one_line(exported, tmp_path, server, capsys):
    assert main(["serve", str(tmp_path)]) == 2
    assert "holds no exported model" in capsys.readouterr().err
    assert main(["serve", str(exported), "--port", str(server.server_port)]) == 2
    said = capsys.readouterr().err
    assert f"--port {server.server_port}" in said and said.count("\n") == 1


# What one caller can take.


@pytest.fixture
def small_server(served):
    """For four connections, and half a second of patience."""
    with Server(served, "shop", port=0, most_bytes=10_000, most_connections=4, patience=0.5) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def dialled(server):
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


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
        threading.Thread(target=server.serve_forever, daemon=True).start()
        slow = [stack.enter_context(dialled(server)) for _ in range(30)]
        for each in slow:
            each.sendall(b"POST ")
        assert predict(server, instances=[["item 1"]])[0] == 200
        assert slow[0].recv(1) == b""  # the first made room
        server.shutdown()


def test_where_all_connections_are_being_answered_a_further_one_is_closed(served, monkeypatch):
    answering, go_on = threading.Semaphore(0), threading.Event()

    def predict_slowly(question):
        answering.release()
        go_on.wait(30)
        return {"predictions": []}

    monkeypatch.setattr(served, "predict", predict_slowly)
    with Server(served, "shop", port=0, most_connections=2) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answers = []
        asking = [threading.Thread(target=lambda: answers.append(predict(server, instances=[]))) for _ in range(2)]
        for thread in asking:
            thread.start()
        for _ in asking:
            assert answering.acquire(timeout=30)
        with dialled(server) as further:
            assert further.recv(1) == b""
        go_on.set()
        for thread in asking:
            thread.join()
        assert [status for status, _ in answers] == [200, 200]
        server.shutdown()


@pytest.mark.parametrize("path", [PREDICT, "/v1/models/other:predict"])
def test_a_question_of_ten_megabytes_is_refused_to_who_sends_all_of_it_first(server, path):
    status, found = call(server, "POST", path, b" " * 10_000_000)
    assert (status, "10000000 bytes" in found["error"]) in [(413, True), (404, False)]


@pytest.mark.parametrize("depth", [33, 900, 4000])
def test_a_question_of_lists_in_lists_is_no_error_of_the_server(server, depth):
    status, found = call(server, "POST", PREDICT, b'{"instances": ' + b"[" * depth + b"]" * depth + b"}")
    assert status == 400 and ("more than 32 deep" in found["error"] or "recursion" in found["error"])


@pytest.mark.parametrize("length", ["²", "+2", "2, 2", "0x2", "", "9" * 5000])
def test_a_length_that_is_none_is_answered(server, length):
    with dialled(server) as line:
        head = f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{{}}"
        line.sendall(head.encode("latin-1"))
        assert line.recv(12) == (b"HTTP/1.1 413" if length[:1] == "9" else b"HTTP/1.1 411")


@pytest.mark.parametrize("head", ["Content-Length: {}", "Transfer-Encoding: chunked", "Content-Length : {}"])
def test_what_a_question_without_a_body_carries_is_no_further_question(server, head):
    """Behind a proxy the rest of a connection is another caller's, whose history was quoted in the error."""
    rest = b"GET /v1/models/shop HTTP/1.1\r\nHost: localhost\r\nX-Swallow: "
    with dialled(server) as line:
        asked = f"GET /v1/models/shop HTTP/1.1\r\nHost: localhost\r\n{head.format(len(rest))}\r\n\r\n"
        line.sendall(asked.encode() + rest)
        found = b""
        with contextlib.suppress(ConnectionError):
            while more := line.recv(1 << 16):
                found += more
    assert found.startswith(b"HTTP/1.1 200") and found.count(b"HTTP/1.1") == 1 and b"Connection: close" in found


def test_an_error_does_not_quote_what_it_does_not_understand(server):
    with dialled(server) as line:
        line.sendall(b'{"instances": [["a-private-item"]]} nonsense here\r\n\r\n')
        found = line.recv(1 << 16)
    assert b"Bad Request" in found and b"private" not in found


def test_two_lengths_are_none(server):
    with dialled(server) as line:
        head = f"POST {PREDICT} HTTP/1.1\r\nHost: localhost\r\n"
        line.sendall(head.encode() + b"Content-Length: 2\r\n" * 2 + b"\r\n{}")
        assert line.recv(12) == b"HTTP/1.1 411"


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


def test_an_answer_of_a_model_of_ones_own_is_bounded_too(tmp_path):
    items = keras.Input([], dtype="int32", name="item")
    model = tfdp_rec.PrivateModel({"item": items}, keras.layers.Embedding(5, 300)(items))
    model.export(tmp_path / "mine", verbose=False)
    served = Served(tmp_path / "mine")
    assert len(served.predict({"instances": [{"item": 3}] * 100})["predictions"]) == 100
    with pytest.raises(BadRequest, match="The answer is too long"):
        served.predict({"instances": [{"item": 3}] * 1000})
