"""A few of the 200 kills of `scripts/kill_test.py`, and of the stops of `scripts/stop_test.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "kill_test.py"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_trainings_leave_only_settled_releases_and_exact_counts(kills):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--kills", str(kills), "--seed", str(kills)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=7200, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "every row settled, every step counted once" in run.stdout
    assert f"{kills} kills" in run.stdout


@pytest.mark.slow
def test_a_run_that_docker_stops_loses_nothing_paid():
    script = SCRIPT.with_name("stop_test.py")
    small = ["--kills", "3", "--items", "200", "--users", "500", "--longest", "20"]
    command = [sys.executable, "-W", "ignore", str(script), *small]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "3 stops" in run.stdout and "nothing paid is lost, and nothing is paid twice" in run.stdout
