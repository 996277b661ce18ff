"""`tfdp-rec serve` as a process that is told to end: what Kubernetes, systemd and docker stop do to it."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading

import pytest

# A prediction that begins when it is asked, and goes on when a line is written to the process.
SLOW = """
import functools, sys
from tfdp_rec.cli import main
from tfdp_rec.serving import rest, server

def predict(self, question):
    print("asked", flush=True)
    sys.stdin.readline()
    return {"predictions": [1]}

rest.Served.predict = predict
server.Server = functools.partial(server.Server, patience=float(sys.argv[2]))
sys.exit(main(["serve", sys.argv[1], "--port", "0", "--name", "shop"]))
"""


@pytest.fixture
def serving(exported):
    """Starts one with so many seconds of patience; the process, its port, and the answers to a question in flight."""
    begun = []

    def ask(port, answers):
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            answers.append(asked(port, "POST", ":predict", "{}"))

    def start(patience):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", SLOW, str(exported), str(patience)], **pipes)
        begun.append(process)
        port, answers = int(re.search(r":(\d+)/v1/models/shop:predict", process.stdout.readline())[1]), []
        asking = threading.Thread(target=ask, args=(port, answers))
        asking.start()
        assert process.stdout.readline() == "asked\n"
        return process, port, asking, answers

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def asked(port, method, what, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, f"/v1/models/shop{what}", body)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def wait_for_refusal(port):
    """Returns when connections are refused, or after half a minute."""
    for _ in range(600):
        try:
            asked(port, "GET", "")
        except (ConnectionRefusedError, ConnectionResetError):
            return
        threading.Event().wait(0.05)


@pytest.mark.slow
def test_after_sigterm_nothing_is_accepted_and_what_is_in_flight_is_answered(serving):
    process, port, asking, answers = serving(600.0)
    idle = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    idle.request("GET", "/v1/models/shop")
    assert idle.getresponse().read() and asked(port, "GET", "")[0] == 200
    process.send_signal(signal.SIGTERM)
    wait_for_refusal(port)
    with pytest.raises(ConnectionRefusedError):
        asked(port, "GET", "")
    assert process.poll() is None and not answers
    idle.request("GET", "/v1/models/shop")
    answer = idle.getresponse()
    (version,) = json.loads(answer.read())["model_version_status"]
    assert (answer.status, version["state"], version["status"]["error_code"]) == (503, "UNLOADING", "UNAVAILABLE")
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(60) == 0
    asking.join(60)
    assert answers == [(200, {"predictions": [1]})]


@pytest.mark.slow
def test_a_prediction_that_never_ends_does_not_keep_the_process(serving):
    process, _, asking, answers = serving(2.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    asking.join(60)
    assert answers == [(503, {"error": "The server ends: ask another."})]


@pytest.mark.slow
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_does_not_wait_for_a_prediction(serving, first):
    """It waited for the thread, which Python joins at its end."""
    process, port, asking, _ = serving(600.0)
    process.send_signal(first)
    wait_for_refusal(port)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    asking.join(60)
