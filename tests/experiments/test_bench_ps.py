"""`bench ps`: cases as asked, ratios within rounds, what does not fit is refused; one real run that leaves nothing."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.bench import ps
from experiments.bench.__main__ import main
from experiments.bench.cases import ServedCase
from experiments.bench.plots import plot_servers


def arguments(*given):
    parser = argparse.ArgumentParser()
    ps.add_arguments(parser)
    return parser.parse_args(given)


def figures(*turns, traffic=1000.0):
    return {
        "rounds": [{"steps": 10, "ms": ms, "processor_ms": 2 * ms} for ms in turns],
        "traffic": {"coordinator": 1.0, "worker": traffic, "ps": traffic},
        "megabytes": {"coordinator": 1.0, "worker": 2.0, "ps": 3.0},
        "steps_per_second": 1e3 / sorted(turns)[len(turns) // 2],
        "processor_ms": 2 * sorted(turns)[len(turns) // 2],
        "bytes": 2 * traffic + 1,
    }


def test_left_out_the_cases_are_the_papers():
    assert [case.label for case in ps.cases_of(arguments())] == list(ps.PAPER)


def test_rows_times_models():
    cases = ps.cases_of(arguments("--rows", "10", "20", "--dim", "8", "--workers", "3"))
    assert [(c.model, c.rows, c.dim, c.workers) for c in cases] == [
        ("two-tower", 10, 8, 3), ("two-tower", 20, 8, 3), ("kg", 10, 8, 3), ("kg", 20, 8, 3),
    ]  # fmt: skip
    assert cases[-1].table_bytes == 4 * 20 * 8 * 4


def test_ratios_are_taken_within_a_round():
    fast, slow = figures(1.0, 10.0, 100.0), figures(2.0, 40.0, 300.0)
    ratio = ps.compared(fast, slow, apart=False)
    assert (ratio["least"], ratio["median"], ratio["most"]) == (2.0, 3.0, 4.0)
    assert ps.compared(fast, slow, apart=True)["median"] == 4.0  # medians of the whole: 10 against 40
    assert ratio["processor"] == 4.0


def test_the_table_says_what_was_measured_and_what_the_paper_has():
    measured = {
        "mechanisms": {"eana": figures(10.0), "dpsgd": figures(80.0)},
        "ratios": {"eana / dpsgd": ps.compared(figures(10.0), figures(80.0), False)},
    }
    text = ps.table(ServedCase("kg", 100_000, 64), measured)
    assert "eana / dpsgd: 8.00" in text and "paper 4.73" in text and "100.00" in text
    assert "paper 4" not in ps.table(ServedCase("kg", 7, 64), measured)


def test_a_plot_of_cases_that_lack_a_mechanism(tmp_path):
    found = [
        {"label": "kg 1", "case": {"dim": 4}, "mechanisms": {"eana": figures(1.0, 2.0)}},
        {"label": "kg 2", "case": {"dim": 4}, "mechanisms": {"dpsgd": figures(1.0), "eana": figures(3.0)}},
    ]
    plot_servers(found, tmp_path / "ps.png")
    assert (tmp_path / "ps.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "given, says",
    [
        ("--rows 0", "--rows must be positive"),
        ("--rows 10 --dim 0", "--dim must be positive"),
        ("--rows 10 --rounds 0", "--rounds must be positive"),
        ("--model kg", "--model goes with --rows"),
        ("--rows 1000000000 --dim 1024", "Use --apart"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(given, says, capsys):
    assert main(["ps", *given.split()]) == 2
    errors = capsys.readouterr().err
    assert says in errors and errors.count("\n") == 1


def descendants():
    """Live processes that carry this test's mark in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            environment = (process / "environ").read_bytes() if process.name.isdigit() else b""
        except OSError:
            continue
        if f"TFDP_REC_TEST_MARK={os.getpid()}\0".encode() in environment:
            found.append(process.name)
    return found


@pytest.mark.slow
def test_a_real_run_measures_counts_and_leaves_no_process(tmp_path):
    command = "ps --rows 300 --dim 4 --model two-tower --mechanism eana --rounds 1 --seconds 0.1 --json".split()
    subprocess.run(
        [sys.executable, "-m", "experiments.bench", *command, str(tmp_path / "ps.json")], check=True, timeout=240,
        env={**os.environ, "TFDP_REC_TEST_MARK": str(os.getpid())}, capture_output=True,
    )  # fmt: skip
    (case,) = json.loads((tmp_path / "ps.json").read_text())["cases"]
    eana = case["mechanisms"]["eana"]
    # Rows there and gradients back: at least 64 labels and many more context ids, 4 floats each.
    assert eana["steps_per_second"] > 0 and eana["traffic"]["ps"] > 300 * 16 and eana["traffic"]["worker"] > 300 * 16
    assert eana["traffic"]["coordinator"] < 5_000
    deadline = time.monotonic() + 10  # the launcher ends by itself when the pipe from its dead parent closes
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not descendants()
