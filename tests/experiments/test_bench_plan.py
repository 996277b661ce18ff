"""The planner's arithmetic, by hand; and what its answers must look like."""

import dataclasses
import json

import pytest

from experiments.bench.__main__ import main
from experiments.bench.plan import bytes_text, seconds_text
from experiments.bench.step_costs import MECHANISMS, Constants, Deployment, memory, on_one_machine, plan, traffic, work

# Powers of ten that cannot be mistaken for one another.
KNOWN = Constants(
    draw=3, read=1, add=5, replace=2, mark=7, dense=11, write=13, settle=17, example=1000, clip=300, wire=0.5,
    call_us=100, step_us=2000, dispatch_us=500, round_trip_us=50, call_bytes=300, step_bytes=1000,
)  # fmt: skip
AT = Deployment(
    rows=10_000, dim=16, batch=8, ids=5, dense_weights=25, workers=3, servers=4, cores=2, gbps=8, steps=1000
)
CALLS = 2 * 4
N = 8 * 5
FIXED = (1000 + CALLS * 300) / 2 + 100


@pytest.mark.parametrize("mechanism", ["sgd", "eana", "lazydpsgd", "dpsgd"])
def test_sparse_traffic_by_hand(mechanism):
    up, down = traffic(mechanism, AT, KNOWN)
    assert up == N * 8 + N * (8 + 64) + FIXED and down == N * 64 + FIXED


def test_noise_from_the_worker_sends_every_row():
    up, down = traffic("dpsgd-on-worker", AT, KNOWN)
    assert up == N * 8 + 10_000 * 64 + FIXED and down == N * 64 + FIXED


@pytest.mark.parametrize(
    "mechanism, update",
    [
        ("sgd", 5 * 640),
        ("eana", (3 + 1 + 2) * 640),
        ("lazydpsgd", (5 + 3 + 1 + 2) * 640 + 7 * 40),
        ("dpsgd", 11 * 160_000),
        ("dpsgd-on-worker", 13 * 160_000),
    ],
)
def test_work_by_hand(mechanism, update):
    server, worker = work(mechanism, AT, KNOWN)
    both = (sum(traffic(mechanism, AT, KNOWN)) * 0.5 + (CALLS * 100 + 2000 - 500) * 1000) / 2
    drawn = 3 * 160_000 if mechanism == "dpsgd-on-worker" else 0
    assert server * 1e9 == pytest.approx(640 + update + both)
    passes = 8 * (1000 if mechanism == "sgd" else 1300)
    assert worker * 1e9 == pytest.approx(passes + drawn + both)


def test_a_step_from_end_to_end_by_hand():
    step = plan("sgd", dataclasses.replace(AT, workers=1), KNOWN)
    assert step.seconds == pytest.approx(
        500e-6 + step.server / (4 * 2) + step.worker / 2 + step.bytes / 1e9 + 3 * 50e-6
    )
    assert step.bound == "latency" and step.steps_per_second == pytest.approx(1 / step.seconds)


def test_every_bound_can_bind():
    many = dataclasses.replace(AT, workers=10_000)
    assert plan("sgd", many, KNOWN).bound == "coordinator" and plan("sgd", many, KNOWN).steps_per_second == 2000
    heavy = plan("dpsgd", dataclasses.replace(many, rows=10**9), KNOWN)
    assert heavy.bound == "servers' cores" and heavy.steps_per_second == pytest.approx(8 / heavy.server)
    thin = dataclasses.replace(many, gbps=1e-3)
    crossing = plan("lazydpsgd", thin, KNOWN)
    assert crossing.bound == "servers' network"
    assert crossing.steps_per_second == pytest.approx(4 * 1e6 / 8 / crossing.to_servers)


def test_memory_and_release_by_hand():
    weights = 10_000 * 64 / 4
    assert [memory(m, AT) for m in ("sgd", "eana", "dpsgd")] == [weights] * 3
    assert memory("lazydpsgd", AT) == weights + 10_000 + 1000 * 16
    assert plan("lazydpsgd", AT, KNOWN).settle_seconds == pytest.approx(17 * 160_000e-9 / 8)
    assert plan("dpsgd", AT, KNOWN).settle_seconds == 0


def test_only_noise_on_every_row_feels_the_number_of_rows():
    large = dataclasses.replace(AT, rows=10**9)
    for mechanism in MECHANISMS:
        same = plan(mechanism, AT, KNOWN), plan(mechanism, large, KNOWN)
        grows = mechanism.startswith("dpsgd")
        assert (same[0].steps_per_second == same[1].steps_per_second) != grows
        assert (same[0].bytes == same[1].bytes) == (mechanism != "dpsgd-on-worker")


def test_one_machine_shares_its_cores():
    step = plan("eana", AT, KNOWN)
    shared = on_one_machine(step, AT)
    assert shared.steps_per_second == pytest.approx(2 / (step.server + step.worker + step.coordinator))
    assert shared.server_bytes == 4 * step.server_bytes


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"servers": 0}, {"gbps": 0}, {"dense_weights": -1}, {"dim": -3}])
def test_what_is_no_deployment_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(AT, **wrong)


def test_an_unknown_mechanism_is_refused():
    with pytest.raises(ValueError, match="lazydpsgd"):
        plan("adam", AT, KNOWN)


def test_quantities_for_people():
    assert [bytes_text(x) for x in (0, 999, 1e3, 5.12e8, 1e14)] == ["0 B", "999 B", "1 kB", "512 MB", "100 TB"]
    assert [seconds_text(x) for x in (2e-6, 0.5, 90, 86400)] == ["2 µs", "500 ms", "1.5 min", "1 d"]


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    found = tmp_path / "plan.json"
    given = "plan --rows 5e6 --dim 64 --batch 64 --ids 20 --json".split()
    assert main([*given, str(found)]) == 0
    output = capsys.readouterr().out
    assert "5,000,000 rows" in output and "1.28 GB" in output and "lazydpsgd" in output
    written = json.loads(found.read_text())
    assert [step["mechanism"] for step in written["steps"]] == list(MECHANISMS)
    assert written["deployment"]["rows"] == 5_000_000
    expected = plan("eana", Deployment(5_000_000, 64, 64, 20))
    (found,) = [step for step in written["steps"] if step["mechanism"] == "eana"]
    assert found == dataclasses.asdict(expected)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--rows 0 --dim 8 --batch 8", "rows"),
        ("--terabytes -1 --dim 8 --batch 8", "--terabytes"),
        ("--rows 10 --dim 8 --batch 8 --gbps 0", "gbps"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, says, capsys):
    assert main(["plan", *arguments.split()]) == 2
    errors = capsys.readouterr().err
    assert says in errors and errors.count("\n") == 1
