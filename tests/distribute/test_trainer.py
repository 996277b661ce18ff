"""The trainer on real loopback clusters. Each process is started, and ended, by the test that needs it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SECONDS = 240


def run(command, seconds=SECONDS):
    """What a script prints; it and all its processes are ended, whatever happens."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"{command} took more than {seconds} s:\n{process.communicate()[1][-3000:]}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{out[-1000:]}\n{err[-3000:]}"
    return out


def scenario(*arguments):
    return json.loads(run([str(HERE / "scenarios.py"), *arguments]).splitlines()[-1])


def check_equal(found):
    for name, result in found.items():
        assert result["shards"] == {"many/embeddings": 2, "few/embeddings": 1}
        assert result["moved"] > 0.1 and result["off"] < 1e-5, (name, result)


def test_one_worker_makes_the_single_machines_model():
    check_equal(scenario("equal", "lazy", "lazy, momentum", "eager, decay", "eana"))


@pytest.mark.slow
def test_one_worker_makes_the_single_machines_model_for_every_mechanism():
    names = ["lazy, step by step", "lazy, Nesterov", "lazy, decay", "lazy, schedule and Adam", "eager"]
    check_equal(scenario("equal", *names, "eager, momentum", "eana, momentum"))


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(tmp_path):
    found = scenario("resumed", str(tmp_path))
    assert "resume()" in found["refused"]
    assert found["attempts"] == found["counted"] == 7
    assert found["off"] < 1e-5
    assert len(found["modes"]) == 2 and found["modes"][0] == "700"


def test_everything_in_a_section_runs_on_its_server():
    found = scenario("places")
    assert found["sections"] > 10 and found["strays"] == []


def check_invariants(found, steps):
    """Of every step a read has gradient and noise or neither; a release has one noise a step."""
    assert found["reads"]["reads"] == 2 * steps and found["reads"]["wrong"] == 0
    assert found["reads"]["final"] < 1e-3 and found["sparse"]["final"] < 1e-3
    assert found["sparse"]["clocks"] == [steps, steps]


@pytest.mark.parametrize("kind", ["LazyDPSGD", pytest.param("DPSGD", marks=pytest.mark.slow)])
def test_no_read_of_two_workers_sees_half_a_step(kind):
    check_invariants(scenario("two_workers", kind, "100"), 100)


@pytest.mark.slow
def test_eanas_reads_see_whole_steps_too():
    check_invariants(scenario("two_workers", "EANA", "100"), 100)


def test_the_invariants_notice_a_missing_lock():
    assert scenario("two_workers", "LazyDPSGD", "100", "no lock")["reads"]["wrong"] > 5


def test_the_invariants_notice_a_step_that_untouched_rows_do_not_count():
    found = scenario("two_workers", "LazyDPSGD", "60", "tick if touched")
    assert found["reads"]["wrong"] == 0 and found["sparse"]["final"] > 1
    assert found["sparse"]["clocks"] != [60, 60]


def kills(workers, servers, coordinators, seconds):
    script = str(ROOT / "scripts" / "cluster_kill_test.py")
    counts = ("--workers", str(workers), "--servers", str(servers), "--coordinators", str(coordinators))
    return run([script, *counts], seconds).splitlines()[-1]


def test_killed_processes_cost_no_noise_and_no_count():
    assert kills(2, 1, 1, 180) == "good"


@pytest.mark.slow
def test_many_killed_processes_cost_no_noise_and_no_count():
    assert kills(12, 5, 3, 580) == "good"
