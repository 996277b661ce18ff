"""PrivateRec on Flower. Needs the extra `federated`; run with  pytest -m slow tests/federated/test_flower.py"""

import contextlib
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

from federated.loopback import Loopback, end, wait_for  # noqa: E402

from experiments.generated.news_readers import SyntheticNews  # noqa: E402
from tfdp_rec.cli import federate  # noqa: E402
from tfdp_rec.core.claim import ledger  # noqa: E402
from tfdp_rec.federated import build  # noqa: E402
from tfdp_rec.federated.settings import FederatedSettings, Nodes  # noqa: E402

TAU = 1e-5
NO_LIMIT = {"ledger": "nowhere.jsonl", "budget-epsilon": math.inf}
SILENT = {"epsilon": math.inf, "label_epsilon": math.inf, "padding": 0.0, "history": 6, "samples": 3, "rounds": 3}


def settings(tmp_path, **change):
    data = tmp_path / "data"
    if not data.exists():
        SyntheticNews(num_users=6, num_news=60, num_days=3, candidates=5, history_length=6).write(data)
    return FederatedSettings(**SILENT | {"data": str(data), "output": str(tmp_path / "out.npz")} | change)


def node(tmp_path, chosen, partition=0, **terms):
    """One node's own configuration, as its owner writes it."""
    (tmp_path / "l").mkdir(exist_ok=True)
    nodes = Nodes(**{"ledgers": str(tmp_path / "l"), **terms}).complete_from(chosen)
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


@pytest.fixture(autouse=True)
def identity():
    """From 1.40 on a message belongs to a task of the process, which Flower sets where it runs an app."""
    with contextlib.suppress(ImportError):
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def message(metrics, extra):
    from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

    content = RecordDict({"fitres.metrics": ConfigRecord(metrics), "fitres.num_examples": MetricRecord(extra)})
    return Message(content, dst_node_id=1, message_type="train")


def test_the_guard_strips_what_tells_about_the_data():
    from tfdp_rec.federated.flower import strip

    stripped = strip(message({"loss": 0.7}, {"num_examples": 31})).content
    assert not stripped.config_records["fitres.metrics"]
    assert dict(stripped.metric_records["fitres.num_examples"]) == {"num_examples": 1}


def answers(asked):
    """What the innermost app does with a message: the participant's answer, and nothing else."""
    weights = [np.array(v) for v in asked.update.model.trainable_variables]

    def app(given, context):
        asked.answer(weights)
        return message({"loss": 0.7}, {"num_examples": 3})

    return app


def test_a_round_is_paid_for_before_it_is_computed_and_refused_beyond_the_budget(tmp_path, caplog, monkeypatch):
    from tfdp_rec.federated import flower

    asked = participant(tmp_path, settings(tmp_path, epsilon=2.0, label_epsilon=1.0), budget_epsilon=3.5)
    calls, gradients = [], asked.update.gradients

    def compute(draws):
        calls.append([paid.label for paid in ledger.read(asked.terms.ledger).paid])
        return gradients(draws)

    monkeypatch.setattr(asked.update, "gradients", compute)
    first = flower.guard(message({}, {}), None, answers(asked))
    assert not first.has_error() and calls == [["labels", "round"]]
    assert not first.content.config_records["fitres.metrics"]
    with caplog.at_level(logging.WARNING):
        second = flower.guard(message({}, {}), None, answers(asked))
    assert second.has_error() and second.error.reason == flower.NO_ANSWER and len(calls) == 1
    assert "budget of 3.5" in caplog.text, "the node's own log says why"


def test_the_app_answers_as_its_participant_does(tmp_path):
    """The whole client app on a message as the server sends it; weights of another model cost nothing."""
    from flwr.app import Context, Message, RecordDict
    from flwr.common import Code, FitIns, ndarrays_to_parameters

    from tfdp_rec.federated import flower

    try:
        from flwr.compat.common import recorddict_compat as records
    except ImportError:
        from flwr.common import recorddict_compat as records
    asked = participant(tmp_path, settings(tmp_path, epsilon=2.0, label_epsilon=1.0))
    app = flower.client_app(lambda context: asked)
    context = Context(1, 1, {}, RecordDict(), {})
    weights = [np.array(v) for v in asked.update.model.trainable_variables]
    for sent, answered in ((weights[:-1], False), (weights, True)):
        record = records.fitins_to_recorddict(FitIns(ndarrays_to_parameters(sent), {}), keep_input=False)
        reply = app(Message(record, dst_node_id=1, message_type="train"), context)
        assert reply.has_error() != answered and asked.terms.ledger.exists() == answered
    fit = records.recorddict_to_fitres(reply.content, keep_input=False)
    assert (fit.status.code, fit.num_examples, fit.metrics) == (Code.OK, 1, {})
    assert len(ledger.read(asked.terms.ledger).paid) == 2


@pytest.mark.parametrize("where", ["app", "reply"])
def test_whatever_fails_the_server_reads_one_constant_sentence(where):
    from flwr.app import Error, Message

    from tfdp_rec.federated import flower

    def fail(given, context):
        raise KeyError("N1234 was clicked")

    def reply(given, context):
        return Message(Error(code=7, reason="N1234 was clicked"), reply_to=given)

    app = fail if where == "app" else reply
    for mods in ([flower.guard], [flower.silence], [flower.silence, flower.guard]):
        inner = app if len(mods) == 1 else lambda given, context: flower.guard(given, context, app)
        answer = mods[0](message({}, {}), None, inner)
        assert (answer.error.code, answer.error.reason) == (flower.REFUSED, flower.NO_ANSWER)


def test_messages_that_are_no_training_get_no_answer():
    from flwr.app import Message, RecordDict

    from tfdp_rec.federated import flower

    for kind in ("evaluate", "query", "train.other"):
        asked = Message(RecordDict(), dst_node_id=1, message_type=kind)
        reply = flower.guard(asked, None, lambda m, c: message({}, {}))
        assert reply.has_error() and reply.error.reason == flower.NO_ANSWER


def test_a_join_that_builds_a_participant_per_call_uses_the_labels_that_were_paid_for(tmp_path):
    chosen = settings(tmp_path, epsilon=2.0, label_epsilon=0.01)
    used = []
    for _ in range(4):
        asked = participant(tmp_path, chosen)
        asked.pay_round()
        used.append(asked.data)
    assert used[0].label_epsilon == 0.0 and all(data == used[0] for data in used)
    paid = ledger.read(asked.terms.ledger).paid
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
    nodes = Nodes().complete_from(chosen)
    federate.simulate(chosen, nodes)
    assert "epsilon = inf" in federate.describe_spending(nodes) and "3 ledgers" in federate.describe_spending(nodes)
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


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listening(processes):
    """The addresses, as /proc/net/tcp writes them, on which these processes wait for callers."""
    mine = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                mine.add(os.readlink(descriptor))
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    found = {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine}
    assert found
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
        wait_for(lambda: "[ROUND 2]" in net.log("run") or net.failed(), 900, lambda: net.log("run"))
        assert not net.failed(), net.log("run")
        end(nodes[1])
        net.supernode("node2", terms[2])
        wait_for(lambda: Path(chosen.output).exists() or net.failed(), 900, lambda: net.log("run"))
        assert not net.failed(), net.log("run")
        assert of_run(tmp_path) and listening(of_run(tmp_path)) <= LOOPBACK
    wait_for(lambda: not of_run(tmp_path), 30, lambda: str(of_run(tmp_path)))  # helpers end with their parents
    assert_same(chosen.output, in_process(chosen, [0]), atol=2e-5, chosen=chosen)


def test_processes_end_with_a_killed_starter(tmp_path):
    """The starter is killed without a chance to clean up; the SuperLink and its helper end all the same."""
    program = (
        "import sys, time; from loopback import Loopback\n"
        "net = Loopback(sys.argv[1]); net.superlink(); print('up', flush=True); time.sleep(600)"
    )
    paths = Path(federate.__file__).parents[2], Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    starter = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert starter.stdout.readline() == b"up\n" and of_run(tmp_path)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    wait_for(lambda: not of_run(tmp_path), 30, lambda: str(of_run(tmp_path)))
