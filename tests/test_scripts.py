"""The set-up that scripts/train and scripts/test share, with stand-ins for Python and pip: what it does, and when."""

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"pip install"*) exit "${PIP_EXIT:-0}" ;;
  *compileall*) exit 1 ;;
  *version_info*) exit "${UNSUITABLE:-0}" ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    fake = tmp_path / "fake-python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    return tmp_path


def prepare(project, extras="", **environment):
    calls = project / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", "-c", f'set -euo pipefail; source "{ROOT}/scripts/_setup.sh"; prepare "{extras}"'],
        cwd=project,
        env={**os.environ, "PYTHON": str(project / "fake-python"), "CALLS": str(calls), **environment},
        capture_output=True,
        text=True,
    )
    installs = calls.read_text().count("pip install") if calls.exists() else 0
    return done, installs


def test_the_second_run_starts_at_once(project):
    assert [prepare(project)[1] for _ in range(3)] == [1, 0, 0]
    assert not (project / "calls").exists(), "no Python was started at all"


def test_what_test_installed_is_enough_for_train_but_not_the_other_way_round(project):
    assert prepare(project, "")[1] == 1
    assert prepare(project, "test,tutorials")[1] == 2, "TensorFlow Privacy's wheel is installed by itself"
    assert prepare(project, "")[1] == prepare(project, "test,tutorials")[1] == 0
    assert prepare(project, "test,tutorials,docs")[1] == 2
    assert prepare(project, "test,docs")[1] == prepare(project, "test,tutorials")[1] == 0


@pytest.mark.parametrize("change", ["requirements", "place"])
def test_a_change_installs_anew(project, change):
    prepare(project)
    if change == "requirements":
        (project / "setup.cfg").open("a").write("# changed\n")
    else:
        project = project.rename(project.with_name("moved"))
    assert prepare(project)[1] == 1


def test_an_installation_that_failed_or_was_interrupted_starts_from_nothing(project):
    done, _ = prepare(project, PIP_EXIT="1")
    assert done.returncode == 1 and "pip could not install" in done.stderr
    (project / ".venv" / "half-unpacked").touch()
    done, installs = prepare(project)
    assert done.returncode == 0 and installs == 1 and "interrupted" in done.stderr
    assert not (project / ".venv" / "half-unpacked").exists()
    assert prepare(project)[1] == 0


def test_a_set_up_under_way_is_left_alone(project):
    (project / ".venv").mkdir()
    (project / ".venv" / ".setting-up").write_text(str(os.getpid()))
    done, installs = prepare(project)
    assert done.returncode == 1 and installs == 0 and f"process {os.getpid()} is setting up" in done.stderr


def test_without_a_suitable_python_it_says_what_is_needed(project):
    path = project / "bin"
    path.mkdir()
    for tool in ("bash", "cat", "mkdir", "cmp", "ls", "rm"):
        (path / tool).symlink_to(shutil.which(tool))
    done, _ = prepare(project, UNSUITABLE="1", PATH=str(path), PYENV_ROOT=str(project))
    assert done.returncode == 1 and "no Python 3.11, 3.12 or 3.13" in done.stderr


@pytest.mark.parametrize("script", ["scripts/train", "scripts/test", ".ci/run"])
def test_scripts_are_whole_and_executable(script):
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", path]).returncode == 0


def test_every_planted_fault_can_still_be_planted():
    """Each is an edit of one place: a line that is written otherwise now would leave the fault untried."""
    faults = runpy.run_path(str(ROOT / "scripts" / "planted_faults"))["FAULTS"]
    texts = {name: (ROOT / "tfdp_rec" / file).read_text().count(there) for name, (file, there, _, _) in faults.items()}
    assert len(faults) >= 40 and {name: count for name, count in texts.items() if count != 1} == {}
    missing = {test for *_, tests in faults.values() for test in tests.split() if not (ROOT / test).exists()}
    assert missing == set()
