"""PrivateRec on Flower. Needs the extra `federated`; run with  pytest -m slow tests/federated/test_flower.py"""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs tfdp-rec[federated]")

from tfdp_rec.cli import federate  # noqa: E402
from tfdp_rec.datasets.mind.generated import SyntheticNews  # noqa: E402
from tfdp_rec.federated import build  # noqa: E402
from tfdp_rec.federated.loopback import Loopback, end, wait_for  # noqa: E402
from tfdp_rec.federated.settings import Settings  # noqa: E402

TAU = 1e-5
SILENT = {"epsilon": math.inf, "label_epsilon": math.inf, "padding": 0.0, "history": 6, "samples": 3, "rounds": 3}


def settings(tmp_path, **change):
    data = tmp_path / "data"
    if not data.exists():
        SyntheticNews(num_users=6, num_news=60, num_days=3, candidates=5, history_length=6).write(data)
    return Settings(**SILENT | {"data": str(data), "output": str(tmp_path / "out.npz")} | change)


def in_process(chosen, partitions):
    """The same rounds by the package's own simulation."""
    from tfdp_rec.federated.simulation import FedAdam, Simulation

    here = dataclasses.replace(chosen, output="in process.npz")
    clients = [build.participant(here, p).data for p in partitions]
    model, _ = build.world(here)
    initial = Path(chosen.output).with_suffix(".initial.npz")
    for variable, value in zip(model.trainable_variables, build.load(str(initial), model)):
        variable.assign(value)
    simulation = Simulation(build.update(here), clients, len(clients), FedAdam(chosen.eta, tau=TAU))
    simulation.run(chosen.rounds)
    return {v.path.partition("/")[2]: np.array(v) for v in model.trainable_variables}


def assert_same(path, expected, atol, chosen):
    """Clients send float32 weights less their gradient, so a gradient arrives with the rounding of its weight, which
    Adam, dividing by the gradient's own size, magnifies up to eta / tau times a round.
    """
    stored = np.load(path)
    assert set(stored) == set(expected)
    for name, value in expected.items():
        rounding = chosen.rounds * chosen.eta / TAU * float(np.spacing(np.float32(np.abs(value).max())))
        np.testing.assert_allclose(stored[name], value, atol=max(atol, rounding), err_msg=name)


def message(metrics, extra):
    from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

    content = RecordDict({"fitres.metrics": ConfigRecord(metrics), "fitres.num_examples": MetricRecord(extra)})
    return Message(content, dst_node_id=1, message_type="train")


def test_the_guard_strips_what_tells_about_the_data():
    from tfdp_rec.federated.flower import strip

    stripped = strip(message({"loss": 0.7}, {"num_examples": 31})).content
    assert not stripped.config_records["fitres.metrics"]
    assert dict(stripped.metric_records["fitres.num_examples"]) == {"num_examples": 1}


def test_the_guard_charges_before_it_computes_and_refuses_beyond_the_budget(tmp_path):
    from tfdp_rec.federated import flower

    chosen = settings(tmp_path, epsilon=2.0, label_epsilon=1.0, budget_epsilon=2.5, ledgers=str(tmp_path / "l"))
    participant = build.participant(chosen, 0)
    calls = []

    def compute(given, context):
        calls.append(json.loads(participant.ledger.read_text())["releases"])
        return message({}, {"num_examples": 3})

    mod = flower.guard(lambda context: participant)
    first = mod(message({}, {}), None, compute)
    assert not first.has_error() and calls == [[[{"round of": "PrivateUpdate"}, 1]]]
    second = mod(message({}, {}), None, compute)
    assert second.has_error() and "budget of 2.5" in second.error.reason and len(calls) == 1


def test_a_budget_that_nobody_counts_is_refused(tmp_path):
    from tfdp_rec.federated import flower

    known = build.participant(settings(tmp_path), 0)
    with pytest.raises(ValueError, match="needs a ledger"):
        flower.Participant(known.update, known.data, None, 3.0)


def test_labels_are_drawn_once_also_over_restarts(tmp_path):
    from tfdp_rec.federated import flower

    chosen = settings(tmp_path, epsilon=2.0, label_epsilon=0.01)
    first = build.participant(chosen, 0)
    seen = []
    for _ in range(3):
        restarted = flower.Participant(first.update, first.data, tmp_path / "one.json", 50.0)
        restarted.charge_round()
        seen.append(restarted.data)
    assert seen[0] == seen[1] == seen[2] and seen[0].label_epsilon == 0.01
    assert first.data.label_epsilon is None
    once = flower.Participant(first.update, first.data, tmp_path / "two.json", 50.0)
    once.charge_round()
    assert restarted.epsilon(3) == pytest.approx(once.epsilon(3))
    shorter = flower.Participant(
        first.update, dataclasses.replace(first.data, clicks=first.data.clicks[:1]), tmp_path / "three.json", 50.0
    )
    shorter.charge_round()
    longer = flower.Participant(first.update, first.data, tmp_path / "three.json", 50.0)
    longer.charge_round()
    assert longer.data.clicks[0] == shorter.data.clicks[0] and len(longer.data.clicks) == 3


def test_telemetry_is_off():
    import tfdp_rec.federated.flower  # noqa: F401

    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"


@pytest.mark.slow
@pytest.mark.parametrize("secure", (False, True))
def test_flowers_simulation_equals_ours(tmp_path, secure):
    chosen = settings(tmp_path, clients=3, secure=secure)
    federate.simulate(chosen)
    # SecAgg+ rounds weights to 2^22 steps of [-8, 8], and Adam divides by small numbers
    assert_same(chosen.output, in_process(chosen, range(3)), atol=5e-3 if secure else 2e-5, chosen=chosen)


def of_run(tmp_path):
    """Processes whose environment or command names this run's folder."""
    mine = str(tmp_path).encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            about = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue
        if mine in about and process.name != str(os.getpid()):
            found.append(process.name)
    return found


@pytest.mark.slow
def test_real_processes_survive_a_killed_client_and_equal_the_simulation(tmp_path, monkeypatch):
    """Two nodes with the same data, so that the mean does not depend on who answered: one is killed, one comes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(federate.__file__).parents[2]))
    chosen = settings(tmp_path, clients=2, rounds=4)
    federate.write_app(tmp_path / "app", chosen)
    with Loopback(tmp_path) as net:
        net.superlink()
        nodes = [net.supernode(f"node{i}", 0) for i in range(2)]
        net.run(tmp_path / "app")
        wait_for(lambda: "[ROUND 2]" in net.log("run") or net.failed(), 240, lambda: net.log("run"))
        assert not net.failed(), net.log("run")
        end(nodes[1])
        net.supernode("node2", 0)
        wait_for(lambda: Path(chosen.output).exists() or net.failed(), 400, lambda: net.log("run"))
        assert not net.failed(), net.log("run")
        listening = [name for name in ("superlink", "node0") if "0.0.0.0" in net.log(name)]
        assert of_run(tmp_path)
    assert not listening and not of_run(tmp_path)
    assert_same(chosen.output, in_process(chosen, [0]), atol=2e-5, chosen=chosen)


def test_processes_end_with_a_killed_starter(tmp_path):
    """The starter is killed without a chance to clean up; the SuperLink and its helper end all the same."""
    program = (
        "import sys, time; from tfdp_rec.federated.loopback import Loopback\n"
        "net = Loopback(sys.argv[1]); net.superlink(); print('up', flush=True); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(federate.__file__).parents[2])}
    starter = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert starter.stdout.readline() == b"up\n" and of_run(tmp_path)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    wait_for(lambda: not of_run(tmp_path), 30, lambda: str(of_run(tmp_path)))
