"""PrivateRec on Flower. Needs the extra `federated`; run with  pytest -m slow tests/federated/test_flower.py"""

import dataclasses
import logging
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
from tfdp_rec.federated.settings import Nodes, Settings  # noqa: E402
from tfdp_rec.spending import ledger  # noqa: E402

TAU = 1e-5
NO_LIMIT = {"ledger": "nowhere.jsonl", "budget-epsilon": math.inf}
SILENT = {"epsilon": math.inf, "label_epsilon": math.inf, "padding": 0.0, "history": 6, "samples": 3, "rounds": 3}


def settings(tmp_path, **change):
    data = tmp_path / "data"
    if not data.exists():
        SyntheticNews(num_users=6, num_news=60, num_days=3, candidates=5, history_length=6).write(data)
    return Settings(**SILENT | {"data": str(data), "output": str(tmp_path / "out.npz")} | change)


def node(tmp_path, chosen, partition=0, **terms):
    """One node's own configuration, as its owner writes it."""
    (tmp_path / "l").mkdir(exist_ok=True)
    nodes = Nodes(**{"ledgers": str(tmp_path / "l"), **terms}).of_run(chosen)
    return nodes.config(chosen, partition)


def participant(tmp_path, chosen, partition=0, **terms):
    return build.participant(chosen, node(tmp_path, chosen, partition, **terms))


def in_process(chosen, partitions):
    """The same rounds by the package's own simulation."""
    from tfdp_rec.federated.simulation import FedAdam, Simulation

    here = dataclasses.replace(chosen, output="in process.npz")
    clients = [build.participant(here, {"partition-id": p, "data": here.data, **NO_LIMIT}).data for p in partitions]
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


def test_the_guard_pays_before_it_computes_and_refuses_beyond_the_budget(tmp_path, caplog):
    from tfdp_rec.federated import flower

    chosen = settings(tmp_path, epsilon=2.0, label_epsilon=1.0)
    asked = participant(tmp_path, chosen, budget_epsilon=3.5)
    calls = []

    def compute(given, context):
        calls.append([paid.label for paid in ledger.read(asked.terms.ledger).paid])
        assert flower.take_paid() is asked
        return message({}, {"num_examples": 3})

    mod = flower.guard(lambda context: asked)
    first = mod(message({}, {}), None, compute)
    assert not first.has_error() and calls == [["labels", "round"]]
    with caplog.at_level(logging.WARNING):
        second = mod(message({}, {}), None, compute)
    assert second.has_error() and second.error.reason == flower.NO_ANSWER and len(calls) == 1
    assert "budget of 3.5" in caplog.text, "the node's own log says why"


@pytest.mark.parametrize("where", ["join", "pay", "compute", "reply"])
def test_whatever_fails_the_server_reads_one_constant_sentence(tmp_path, where, monkeypatch):
    from flwr.app import Error, Message

    from tfdp_rec.federated import flower

    asked = participant(tmp_path, settings(tmp_path))

    def fail(*arguments):
        raise KeyError("N1234 was clicked")

    monkeypatch.setattr(type(asked), "pay_round", fail if where == "pay" else lambda self: None)
    answers = {
        "compute": fail,
        "reply": lambda given, context: Message(Error(code=7, reason="N1234 was clicked"), reply_to=given),
    }
    join = fail if where == "join" else lambda context: asked
    for mod in (
        flower.guard(join),
        lambda m, c, then: flower.silence(m, c, lambda m, c: flower.guard(join)(m, c, then)),
    ):
        reply = mod(message({}, {}), None, answers.get(where, fail))
        assert (reply.error.code, reply.error.reason) == (flower.REFUSED, flower.NO_ANSWER)


def test_messages_that_are_no_training_and_updates_that_nobody_paid_for_get_no_answer(tmp_path):
    from flwr.app import Message, RecordDict

    from tfdp_rec.federated import flower

    asked = participant(tmp_path, settings(tmp_path))
    mod = flower.guard(lambda context: asked)
    for kind in ("evaluate", "query", "train.other"):
        reply = mod(Message(RecordDict(), dst_node_id=1, message_type=kind), None, lambda m, c: message({}, {}))
        assert reply.has_error() and reply.error.reason == flower.NO_ANSWER
    with pytest.raises(RuntimeError, match="No round was paid for"):
        flower.take_paid()


def test_a_join_that_builds_a_participant_per_call_uses_the_labels_that_were_paid_for(tmp_path):
    from tfdp_rec.federated import flower

    chosen = settings(tmp_path, epsilon=2.0, label_epsilon=0.01)
    joined, used = [], []

    def join(context):
        joined.append(participant(tmp_path, chosen))
        return joined[-1]

    def compute(given, context):
        used.append(flower.take_paid().data)
        return message({}, {})

    for _ in range(4):
        flower.guard(join)(message({}, {}), None, compute)
    assert len(joined) == 4 and used[0].label_epsilon == 0.0 and all(data == used[0] for data in used)
    paid = ledger.read(joined[0].terms.ledger).paid
    assert [entry.label for entry in paid].count("labels") == 1


def test_a_submitters_wishes_do_not_move_the_nodes_terms(tmp_path):
    """The review's run: `budget_epsilon=inf method='gradient'` from a node that had refused before."""
    from tfdp_rec.federated.app import client_app
    from tfdp_rec.federated.participant import Refused

    chosen = settings(tmp_path)
    own = node(tmp_path, chosen, budget_epsilon=5.0, methods=("private",))

    class Context:
        node_config = own
        run_config = dataclasses.asdict(chosen) | {
            "budget_epsilon": math.inf, "ledgers": "/elsewhere", "ledger": "/elsewhere", "methods": "gradient",
            "budget-epsilon": math.inf, "method": "gradient", "data": "/elsewhere",
        }  # fmt: skip

    asked = client_app.join(Context())
    assert asked.terms.budget_epsilon == 5.0 and str(asked.terms.ledger) == own["ledger"]
    with pytest.raises(Refused, match="asks for method gradient"):
        asked.pay_round()
    Context.node_config = {"partition-id": 0, "data": chosen.data}
    with pytest.raises(ValueError, match="lacks ledger and budget-epsilon"):
        client_app.join(Context())


def test_one_user_is_never_behind_two_clients(tmp_path):
    chosen = settings(tmp_path)
    users = len(build.world(chosen)[1].by_user())
    participant(tmp_path, chosen, users - 1)
    with pytest.raises(ValueError, match="two budgets"):
        participant(tmp_path, chosen, users)


def test_telemetry_is_off():
    import tfdp_rec.federated.flower  # noqa: F401

    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"


@pytest.mark.slow
@pytest.mark.parametrize("secure", (False, True))
def test_flowers_simulation_equals_ours(tmp_path, secure):
    chosen = settings(tmp_path, clients=3, secure=secure)
    nodes = Nodes().of_run(chosen)
    federate.simulate(chosen, nodes)
    assert "epsilon = inf" in federate.spent(nodes) and "3 ledgers" in federate.spent(nodes)
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
        terms = [node(tmp_path, chosen) | {"ledger": str(tmp_path / f"{i}.jsonl")} for i in range(3)]
        nodes = [net.supernode(f"node{i}", terms[i]) for i in range(2)]
        net.run(tmp_path / "app")
        wait_for(lambda: "[ROUND 2]" in net.log("run") or net.failed(), 240, lambda: net.log("run"))
        assert not net.failed(), net.log("run")
        end(nodes[1])
        net.supernode("node2", terms[2])
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
