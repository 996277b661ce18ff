"""Before anything is paid: every option of `tfdp-rec train` at 12 hostile values, none of which fails after a payment.

A run may be refused, in one line and with nothing paid, or it may be done; nothing else. `ALL` of them take half an
hour; some stand in the default run.
"""

import argparse
import collections
import gzip
import os
import resource

import pytest

from tfdp_rec.cli import main, train
from tfdp_rec.core.claim.ledger import read

NUMBERS = ["nan", "inf", "-inf", "-1", "0", "1e-320", "1e-9", "1e308", "1e400", "", "abc", "\u0663"]
WHOLE = ["nan", "inf", "-1", "0", "1", "2.5", "4294967296", "9223372036854775808", "1e18", "1e400", "", "abc"]
TEXTS = ["", " ", "nope", "u", "i", "t", "U", "u ", "\n", "\x1b[2J", "\u2028", "x" * 5000]
NAMES = ["", " ", "nope", "popularity", "spectral ", "SPECTRAL", "-1", "spectral,adam", "\n", "\x1b[2J", "0", "None"]
# Of files: made by `harmful`.
FILES = [
    "", "missing", "folder", "empty.csv", "header.csv", "noise.csv", "noise.parquet", "null.json", "list.jsonl",
    "cut.csv.gz", "other.txt", "huge-name",
]  # fmt: skip
FOLDERS = ["", "log.csv", "/dev/null", "/dev/null/run", "/proc/run", "a\nb", "\x1b[2J", " ", "x" * 300, ".", "-", "a b"]
HOSTILE = {
    "data": FILES, "items": FILES, "titles": FILES, "features": FILES, "cluster": FILES,
    "mechanism": NAMES, "export": NAMES, "sampling": NAMES, "order": NAMES, "engine": NAMES,
    "user": TEXTS, "item": TEXTS, "time": TEXTS,
    "top_k": WHOLE, "seed": WHOLE, "users": WHOLE, "movies": WHOLE, "steps": WHOLE, "batch_size": WHOLE, "width": WHOLE,
    "hidden": WHOLE, "negatives": WHOLE, "days": WHOLE, "days_per_user": WHOLE, "checkpoint_every": WHOLE,
    "items_epsilon": NUMBERS, "epsilon": [*NUMBERS[:-1], "1e7"], "delta": NUMBERS, "noise_multiplier": NUMBERS,
    "metrics_epsilon": NUMBERS, "clip": NUMBERS, "learning_rate": NUMBERS, "recency": NUMBERS, "keep": NUMBERS,
    "local": ["0 0", "-1 1", "1 -1", "nan 1", "1 1e18", "1", "1 1 1", "", "a b", "1.5 1", "1e9 1", "inf inf"],
    "out": FOLDERS, "checkpoint": FOLDERS, "continues": FOLDERS,
    "resume": ["", "1", "yes", "no", "true", "None", "--resume", "\n", "\x1b[2J", "0", "-1", "nan"],
    "confidential": ["", "1", "yes", "no", "true", "None", "--confidential", "\n", "\x1b[2J", "0", "-1", "nan"],
    "quiet": ["", "1", "yes", "no", "true", "None", "--quiet", "\n", "\x1b[2J", "0", "-1", "nan"],
}  # fmt: skip
ALL = [(name, value) for name, values in HOSTILE.items() for value in values]
QUICK = [
    ("seed", "-1"), ("seed", "4294967296"), ("recency", "inf"), ("epsilon", "1e7"), ("data", "null.json"),
    ("items", "null.json"), ("titles", "list.jsonl"), ("user", "\x1b[2J"), ("hidden", "nan"), ("width", "1e18"),
    ("users", "1e18"), ("continues", "/dev/null"), ("noise_multiplier", "1e-320"), ("learning_rate", "1e308"),
]  # fmt: skip
TRAINED = ["--mechanism", "upon-sums", "--steps", "2", "--batch-size", "40", "--width", "4"]
TOWER = ["--mechanism", "lazydpsgd", "--steps", "2", "--batch-size", "40", "--width", "4", "--hidden", "2"]
OF_TRAININGS = ["clip", "steps", "batch_size", "width", "learning_rate", "negatives", "noise_multiplier"]
MORE = dict.fromkeys(OF_TRAININGS, TRAINED)
MORE |= {"hidden": TOWER, "cluster": TOWER, "checkpoint_every": TOWER, "days_per_user": ["--days", "3"]}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A folder with a tiny log, a list of its items, and harmful files."""
    folder = tmp_path_factory.mktemp("logs")
    rows = "".join(f"u{u},s{(u + k) % 30},{1_700_000_000 + k}\n" for u in range(400) for k in range(6))
    (folder / "log.csv").write_text(f"u,i,t\n{rows}")
    (folder / "items.txt").write_text("".join(f"s{i}\n" for i in range(30)))
    (folder / "folder").mkdir()
    (folder / "empty.csv").touch()
    (folder / "header.csv").write_text("u,i,t\n")
    for name in ("noise.csv", "noise.parquet"):
        (folder / name).write_bytes(bytes(range(256)) * 20)
    (folder / "null.json").write_text("null\n")
    (folder / "list.jsonl").write_text("[1, 2]\n[3]\n")
    (folder / "cut.csv.gz").write_bytes(gzip.compress(f"u,i,t\n{rows}".encode())[:900])
    (folder / "other.txt").write_text("A \nA\nB\u2028C\n")
    return folder


def tried(logs, root, name, value):
    """How a run with the value ends: "done", "refused", or what is wrong; and what was said."""
    given = {"data": logs / "log.csv", "user": "u", "item": "i", "time": "t", "out": root / "run"}
    more = list(MORE.get(name, ["--mechanism", "spectral"] if name != "mechanism" else []))
    if more[:2] in (TRAINED[:2], TOWER[:2]):
        given["items"] = logs / "items.txt"
    if name in ("users", "movies"):
        given = {"users": 400, "movies": 40, "out": root / "run"}
    if name == "continues":
        del given["out"]
    value = str(logs / value) if name in ("data", "items", "titles", "features", "cluster") and value else value
    options = [word for each, one in given.items() if each != name for word in (f"--{each}", str(one))]
    option = "--continue" if name == "continues" else "--" + name.replace("_", "-")
    words = [option, *value.split()] if name == "local" else [f"{option}={value}"]
    os.chdir(root)
    try:
        code = main(["train", *options, *more, *words, *([] if name == "quiet" else ["--quiet"])])
    except SystemExit as stop:
        code = stop.code
    except BaseException as problem:  # noqa: BLE001  (whatever escapes is a finding)
        code = f"{type(problem).__name__}: {problem}"
    ledgers = [path for path in root.rglob("*.jsonl") if "ledger" in str(path) and path.stat().st_size]
    paid = any(read(path).paid for path in ledgers)
    if code == 0:
        return "done"
    return ("refused" if code == 2 else f"ended with {code}") + (" after a payment" if paid else "")


@pytest.fixture
def bounded():
    """No run may take the whole machine's memory: what asks for more is told that there is none."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (24 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow_cases("learning_rate-1e308")
@pytest.mark.parametrize("name, value", QUICK)
def test_a_hostile_value_fails_before_anything_is_paid_or_does_no_harm(logs, tmp_path, monkeypatch, name, value):
    monkeypatch.chdir(tmp_path)
    assert tried(logs, tmp_path, name, value) in ("done", "refused")


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_no_value_of_an_option_fails_after_a_payment(logs, tmp_path, monkeypatch, bounded, capsys, name):
    monkeypatch.chdir(tmp_path)
    found = collections.Counter[str]()
    for number, value in enumerate(HOSTILE[name]):
        root = tmp_path / str(number)
        root.mkdir()
        became = tried(logs, root, name, value)
        found[became] += 1
        with capsys.disabled():
            print(f"{name}={value[:20]!r}: {became}", flush=True)
    assert set(found) <= {"done", "refused"}, found


def test_every_option_has_twelve_hostile_values():
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    assert set(HOSTILE) == {action.dest for action in parser._actions} - {"help"}
    assert {len(set(values)) for values in HOSTILE.values()} == {12}
