"""`tfdp-rec plan`: no row is read, a wrong word is refused in one line before work, and the rows are train's own."""

import argparse
import json
import os

import pyarrow as pa
import pyarrow.parquet
import pytest

from tfdp_rec.cli import main, plan
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.events import ComposedDpEvent, GaussianDpEvent
from tfdp_rec.core.claim.schemes import PoissonSampling, RandomAllocation
from tfdp_rec.job.budget import PRIOR, Budget, figures_noise
from tfdp_rec.training import planner, signal

LOG = ["--user", "u", "--item", "i", "--units", "5000", "--num-items", "200", "--width", "4", "--hidden", "4"]
NUMBERS = ["nan", "inf", "-inf", "-1", "0", "1e-320", "1e-9", "1e308", "1e400", "", "abc", "\u0663"]
WHOLE = ["nan", "inf", "-1", "0", "1", "2.5", "4294967296", "9223372036854775808", "1e18", "1e400", "", "abc"]
TEXTS = ["", " ", "nope", "u", "i", "t", "U", "u ", "\n", "\x1b[2J", "\u2028", "x" * 5000]
FILES = ["", "missing", "folder", ".", "/dev/null", "/proc/x", "a\nb", "\x1b[2J", " ", "x" * 300, "log.parquet", "-"]
HOSTILE = {
    "data": FILES, "items": FILES, "json": FILES, "user": TEXTS, "item": TEXTS, "time": TEXTS,
    "units": WHOLE, "num_items": WHOLE, "width": WHOLE, "hidden": WHOLE, "negatives": WHOLE,
    "epsilon": [*NUMBERS[:-1], "1e7"], "delta": NUMBERS, "clip": NUMBERS, "items_epsilon": NUMBERS,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a Parquet file, whose rows are overwritten: its footer alone can be read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    table = pa.table({"u": list(range(20_000)), "i": [3] * 20_000, "t": list(range(20_000))})
    pyarrow.parquet.write_table(table, "log.parquet", compression="none")
    whole = bytearray((tmp_path / "log.parquet").read_bytes())
    footer = 8 + int.from_bytes(whole[-8:-4], "little")
    whole[4:-footer] = b"\xff" * (len(whole) - footer - 4)
    (tmp_path / "log.parquet").write_bytes(whole)
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    """Few candidates, and no clock."""
    monkeypatch.setattr(signal, "_CANDIDATES", (2, 20))
    monkeypatch.setattr(planner, "_measure", lambda prepare, plan: (1e-3 * plan.sampling.expected_batch_size, 1e9))


@pytest.mark.slow
def test_a_table_and_a_file_for_machines_without_a_row_of_the_log(folder, quick, capsys):
    with pytest.raises((OSError, pa.ArrowException)):
        pyarrow.parquet.read_table("log.parquet")
    os.symlink("/nowhere/at/all", "log.csv")  # cannot even be opened
    assert main(["plan", "log.parquet", "log.csv", *LOG, "--epsilon", "4", "--json", "plan.json"]) == 0
    out = capsys.readouterr().out
    rows = json.loads((folder / "plan.json").read_text())
    assert 1 <= len(rows) <= 3 and out.count("Allocation ") + out.count("Poisson") == len(rows)
    # What train would pay for with these numbers: items, popularity, steps; of 80% of the users.
    budget = Budget(4.0, 1e-6)
    for row in rows:
        assert (row["num_units"], row["unit"], row["epsilon"], row["delta"]) == (4000, "user", 4.0, 1e-6)
        steps_an_epoch = row["steps"] // row["epochs"]
        sampling = {
            "PoissonSampling": PoissonSampling(4000, row["batch_size"]),
            "RandomAllocation": RandomAllocation(4000, steps_an_epoch),
        }[row["sampling"]]
        assert sampling.expected_batch_size == row["batch_size"]
        steps = sampling.compose(GaussianDpEvent(row["noise_multiplier"]), row["steps"])
        figures = GaussianDpEvent(figures_noise(4.0, 1e-6, 10))  # of few users: a twentieth of epsilon
        cost = epsilon_of(ComposedDpEvent([*budget.releases(PRIOR).values(), figures, steps]), 1e-6)
        assert 3.9 < cost <= 4.0
    assert f"--batch-size {rows[-1]['batch_size']:.0f} --steps {rows[-1]['steps']}" in out


@pytest.mark.slow
def test_a_public_list_of_items_costs_nothing_and_is_counted(folder, quick, capsys):
    (folder / "items.txt").write_text("".join(f"{i}\n" for i in range(200)))
    seen = []
    for option, value in (("--items", "items.txt"), ("--num-items", "200")):
        given = [*LOG[:6], "--width", "4", "--hidden", "4", "--epsilon", "4", "--json", f"plan{option}.json"]
        assert main(["plan", "log.parquet", *given, option, value]) == 0
        seen.append(json.loads((folder / f"plan{option}.json").read_text())[-1])
    assert seen[0]["noise_multiplier"] < seen[1]["noise_multiplier"]


@pytest.mark.slow
def test_steps_are_timed_here(folder, monkeypatch, capsys):
    monkeypatch.setattr(signal, "_CANDIDATES", (2, 20))
    assert main(["plan", "log.parquet", *LOG, "--epsilon", "4", "--json", "plan.json"]) == 0
    for row in json.loads((folder / "plan.json").read_text()):
        assert row["seconds"] > 0 and row["memory"] > 2**26


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["log.parquet", "--user", "u", "--item", "i"], "--units is missing"),
        (["log.parquet", "--user", "u", "--item", "i", "--units", "100"], "--num-items is missing"),
        (["log.parquet", "--user", "u", "--item", "sku", "--units", "100"], "log.parquet has no column 'sku'"),
        (["log.parquet", "--user", "u", "--units", "100"], "--item is missing"),
        (["nothing.parquet", *LOG], "--data: there is nothing at nothing.parquet"),
        (["log.parquet", *LOG, "--epsilon", "0"], "--epsilon must be positive"),
        (["log.parquet", *LOG, "--json", "log.parquet"], "is there already"),
        (["log.parquet", *LOG, "--json", ""], "is there already"),
        (["log.parquet", *LOG, "--json", "missing/plan.json"], "No such file"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(folder, monkeypatch, capsys, options, words):
    monkeypatch.setattr(plan, "_suggest", None)
    assert main(["plan", *options]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def tried(name, value):
    """How the command ends with an option at a value."""
    value = value if name != "items" or not value else os.path.join(os.getcwd(), value)
    given = {"user": "u", "item": "i", "units": "500", "num_items": "40", "width": "2", "hidden": "2", "json": "o.json"}
    options = [f"--{each.replace('_', '-')}={one}" for each, one in given.items() if each != name]
    options += [] if name == "data" else [f"--{name.replace('_', '-')}={value}"]
    try:
        return main(["plan", value if name == "data" else "log.parquet", *options])
    except SystemExit as stop:
        return stop.code


def log_of(folder):
    return (folder / "log.parquet").read_bytes()


@pytest.mark.slow_cases(*[name for name in HOSTILE if name != "units"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_value_is_refused_or_does_no_harm(folder, quick, monkeypatch, capsys, name):
    if name in ("units", "delta", "epsilon", "num_items"):
        monkeypatch.setattr(signal, "_CANDIDATES", (2,))
    before = log_of(folder)
    for value in HOSTILE[name]:
        code = tried(name, value)
        said = capsys.readouterr().err
        assert code in (0, 2), (value, code)
        assert code == 0 or said.strip().count("\n") == 0 and "Traceback" not in said, said
        assert log_of(folder) == before and (code == 0) >= (folder / "o.json").exists()
        (folder / "o.json").unlink(missing_ok=True)


def test_every_option_has_twelve_hostile_values():
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    assert set(HOSTILE) == {action.dest for action in parser._actions} - {"help"}
    assert {len(set(values)) for values in HOSTILE.values()} == {12}
