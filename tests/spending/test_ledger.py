"""The ledger as evidence: what a crash, a flipped byte, an older backup and a second owner do to it."""

import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import dp_accounting
import pytest
from checker import checked
from counting import count
from dp_accounting import GaussianDpEvent

from tfdp_rec.cli import main
from tfdp_rec.core.claim import events
from tfdp_rec.core.claim.events import REPLACE, FailingDpEvent, PaddedDpEvent, PureDpEvent
from tfdp_rec.core.claim.ledger import Payment, compose, costs_of_items, mend, read
from tfdp_rec.privacy import Accountant, BrokenLedger, Ledger, PoissonSampling, Snapshot, epsilon_of

ROOT = Path(__file__).parents[2]
DATA = Snapshot(1000, "user, items, times")
STEP = dp_accounting.PoissonSampledDpEvent(0.01, GaussianDpEvent(1.1))


def opened(path, unit="user", data=DATA, **options):
    return Ledger(path, unit, data, **options)


@pytest.fixture
def filled(tmp_path):
    """Three payments and something given back."""
    path = tmp_path / "ledger.jsonl"
    with opened(path) as ledger:
        ledger.pay(GaussianDpEvent(20.0), label="popularity counts")
        block = ledger.pay(STEP, 50, "training", {"l2_norm_clip": 1.0}, steps=50)
        ledger.give_back(block, 20, 20)
        ledger.pay(STEP, 7, "training", steps=7)
    return path


def test_the_total_is_that_of_the_entries(filled):
    oracle = dp_accounting.pld.PLDAccountant().compose(GaussianDpEvent(20.0)).compose(STEP, 37).get_epsilon(1e-6)
    assert read(filled).epsilon(1e-6) == pytest.approx(oracle, rel=1e-8)
    with opened(filled) as ledger:
        assert ledger.epsilon(1e-6) == pytest.approx(oracle, rel=1e-8) and ledger.steps == 37
    first = json.loads(filled.read_text().splitlines()[1])
    assert first["unit"] == "user" and first["data"] == {"id": DATA.id, "units": 1000, "schema": "user, items, times"}


def test_the_file_is_its_owners_alone(filled):
    assert filled.stat().st_mode & 0o777 == 0o600


def test_nothing_is_paid_before_it_is_on_disk(tmp_path, monkeypatch):
    """pay returns after its line was synced, or not at all; what may have reached the disk counts."""
    with opened(tmp_path / "ledger.jsonl") as ledger:
        calls, write, sync = [], os.write, os.fsync
        monkeypatch.setattr(os, "write", lambda *a: (calls.append("write"), write(*a))[1])
        monkeypatch.setattr(os, "fsync", lambda *a: (calls.append("sync"), sync(*a))[1])
        ledger.pay(STEP, 3, steps=3)
        assert calls == ["write", "sync"]
        monkeypatch.setattr(os, "fsync", lambda *a: (_ for _ in ()).throw(OSError("power cut")))
        with pytest.raises(OSError, match="power cut"):
            ledger.pay(STEP, 4, steps=4)
        monkeypatch.undo()
        with pytest.raises(BrokenLedger):
            ledger.pay(STEP, 1)
    with opened(tmp_path / "ledger.jsonl") as ledger:
        assert ledger.steps == 7


def test_every_changed_byte_is_found(filled):
    whole = filled.read_bytes()
    for place in range(len(whole)):
        filled.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BrokenLedger) as refusal:
            read(filled)
        assert len(str(refusal.value)) < 500 and "backup" in str(refusal.value)


def test_a_line_left_out_or_moved_is_found(filled):
    lines = filled.read_bytes().splitlines(keepends=True)
    for out in range(len(lines) - 1):
        filled.write_bytes(b"".join(lines[:out] + lines[out + 1 :]))
        with pytest.raises(BrokenLedger, match=f"Line {out + 1} of"):
            read(filled)
    for place in range(len(lines) - 1):
        moved = lines[:place] + [lines[place + 1], lines[place]] + lines[place + 2 :]
        filled.write_bytes(b"".join(moved))
        with pytest.raises(BrokenLedger, match="does not follow"):
            read(filled)


def test_a_forged_line_needs_the_whole_chain_anew(filled):
    """Its own hash put right, the next line tells."""
    lines = [json.loads(line) for line in filled.read_text().splitlines()]
    lines[2]["attempts"] = 40
    body = {key: value for key, value in lines[2].items() if key != "hash"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    lines[2]["hash"] = hashlib.sha256(text.encode()).hexdigest()
    filled.write_text("".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n" for line in lines))
    with pytest.raises(BrokenLedger, match="Line 4 of .* does not follow"):
        read(filled)


def test_an_older_backup_is_found_by_clock_and_by_mark(filled):
    older = filled.read_bytes()
    with opened(filled) as ledger:
        ledger.pay(STEP, 40, steps=40)
        mark = ledger.mark
    filled.write_bytes(older)
    with opened(filled) as ledger:
        with pytest.raises(BrokenLedger, match="paid for 37 steps of 77 that were made"):
            ledger.refuse_behind(77)
        with pytest.raises(BrokenLedger, match="older backup"):
            ledger.refuse_behind(0, mark)
        ledger.pay(STEP, 80, steps=80)  # as many lines, and more steps: still another history
        with pytest.raises(BrokenLedger, match="older backup"):
            ledger.refuse_behind(77, mark)
    filled.unlink()
    with opened(filled) as ledger, pytest.raises(BrokenLedger, match="not the ledger"):
        ledger.refuse_behind(0, mark)


def test_a_last_line_that_was_cut_short(filled):
    whole = filled.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in (start + 1, (start + len(whole)) // 2, len(whole) - 2):
        filled.write_bytes(whole[:end])
        for look in (read, opened):
            with pytest.raises(BrokenLedger, match="tfdp-rec ledger mend"):
                look(filled)
        assert mend(filled).endswith(".torn")
        assert Path(f"{filled}.torn").read_bytes() == whole[start:end]
        with opened(filled) as ledger:
            assert ledger.steps == 30
            ledger.pay(STEP, 1, steps=1)
        assert read(filled).steps == 31
    filled.write_bytes(whole[:-1])
    assert read(filled).steps == 37, "whole but for its newline: it counts"
    with opened(filled) as ledger:
        ledger.pay(STEP, 1, steps=1)
    assert read(filled).steps == 38
    with pytest.raises(ValueError, match="nothing to mend"):
        mend(filled)


def test_a_killed_payer_has_paid_for_all_it_began(tmp_path):
    path = tmp_path / "ledger.jsonl"
    program = (
        "import sys; from dp_accounting import GaussianDpEvent; from tfdp_rec.privacy import Ledger, Snapshot\n"
        "ledger = Ledger(sys.argv[1], 'user', Snapshot(9))\n"
        "while True:\n    ledger.pay(GaussianDpEvent(9.0), steps=1); print(ledger.steps, flush=True)"
    )
    begun, environment = 0, os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, env=environment)
        for _ in range(30):
            begun = int(process.stdout.readline())
        process.kill()
        begun = max([begun, *map(int, process.stdout.read().split())])
        process.wait()
        process.stdout.close()
        assert read(path).steps >= begun > 0


def test_one_owner_in_and_across_processes(filled):
    with opened(filled) as ledger:
        with pytest.raises(ValueError, match="in use"):
            opened(filled)
        program = "import sys; from tfdp_rec.privacy import *; Ledger(sys.argv[1], 'user', Snapshot(1000))"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        other = subprocess.run([sys.executable, "-c", program, filled], capture_output=True, env=environment)
        assert other.returncode == 1 and b"in use" in other.stderr
        child = os.fork()
        if not child:
            try:
                ledger.pay(STEP)
            except ValueError as refusal:
                os._exit(0 if "not open in this process" in str(refusal) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(ValueError, match="not open"):
        ledger.pay(STEP)
    opened(filled).close()
    opened(filled)  # held by nobody any more
    opened(filled).close()


def test_a_forked_child_neither_keeps_nor_loses_the_lock(filled):
    ledger = opened(filled)
    begin, end = os.pipe()
    child = os.fork()
    if not child:
        ledger.close()
        os.read(begin, 1)
        os._exit(0)
    with pytest.raises(ValueError, match="in use"):
        opened(filled)
    ledger.close()
    opened(filled).close()
    os.write(end, b"x")
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("harm", ["remove", "replace", "append"])
def test_a_file_that_changes_while_it_is_open_takes_no_more_payments(filled, harm):
    with opened(filled) as ledger:
        if harm == "remove":
            filled.unlink()
        elif harm == "replace":
            shutil.copy(filled, f"{filled}.old")
            os.replace(f"{filled}.old", filled)
        else:
            with open(filled, "ab") as file:
                file.write(b"{}\n")
        with pytest.raises(BrokenLedger, match="removed, replaced or written to"):
            ledger.pay(STEP)


def test_another_unit_adjacency_or_data_is_refused(filled):
    for options, message in (
        ({"unit": "example"}, "counts for one user"),
        ({"adjacency": REPLACE}, "one user .zero-out., not for one user .replace-one."),
        ({"data": Snapshot(100_000, "user, items, times")}, "data_changed=True"),
        ({"data": Snapshot(1000, "user, items")}, "data_changed=True"),
    ):
        with pytest.raises(BrokenLedger, match=message):
            opened(filled, **options)


@pytest.mark.slow
def test_grown_data_do_not_make_the_past_cheaper(tmp_path):
    """200 steps at q = 0.1, the data grown a hundredfold: the old steps keep their price."""
    path, loud = tmp_path / "ledger.jsonl", dp_accounting.PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
    with opened(path) as ledger:
        ledger.pay(loud, 200, steps=200)
        before = ledger.epsilon(1e-6)
    with opened(path, data=Snapshot(100_000, DATA.schema), data_changed=True) as ledger:
        ledger.pay(dp_accounting.PoissonSampledDpEvent(0.001, GaussianDpEvent(1.0)), 10, steps=10)
        assert ledger.epsilon(1e-6) >= before > 10
    opened(path, data=Snapshot(100_000, DATA.schema)).close()


def test_only_who_paid_gives_back(filled):
    with opened(filled) as ledger:
        with pytest.raises(ValueError, match="another process paid"):
            ledger.give_back(2, 1, 1)
        mine = ledger.pay(STEP, 5, steps=5)
        for attempts, steps in ((6, 5), (0, 0), (5, 6)):
            with pytest.raises(ValueError, match="did not make"):
                ledger.give_back(mine, attempts, steps)
        ledger.give_back(mine, 5, 5)
        with pytest.raises(ValueError):
            ledger.give_back(mine, 1)
        assert ledger.steps == 37


def test_the_price_of_steps_does_not_come_back_without_the_steps(filled):
    """It did: epsilon fell, and the model's receipts for the same steps stayed valid."""
    with opened(filled) as ledger:
        block, before = ledger.pay(STEP, 5, steps=5), ledger.epsilon(1e-6)
        for attempts, steps in ((5, 0), (2, 1)):
            with pytest.raises(ValueError, match="did not make"):
                ledger.give_back(block, attempts, steps)
        assert ledger.epsilon(1e-6) == before
        plan = ledger.pay(GaussianDpEvent(4.0), steps=20)
        with pytest.raises(ValueError, match="did not make"):
            ledger.give_back(plan, 1, 1)
        ledger.give_back(plan, 0, 5)
        ledger.give_back(plan, 1, 15)
        other = ledger.pay(GaussianDpEvent(2.0), 2)
        ledger.give_back(other, 1)


def test_a_payment_about_no_item_is_refused(filled):
    """It cost nothing for any item."""
    with opened(filled) as ledger:
        with pytest.raises(ValueError, match="at least one item"):
            ledger.pay(GaussianDpEvent(0.1), about=())
        # A text would be items of a letter each, and an iterator is empty at its second reading.
        for text in ("N1", b"N1", (1, 2), ("N1", None), iter(["N1"]), 5):
            with pytest.raises(ValueError, match="about must be a tuple of texts"):
                ledger.pay(GaussianDpEvent(0.1), about=text)


@pytest.mark.parametrize(
    "event, words",
    [
        (dp_accounting.UnsupportedDpEvent(), "UnsupportedDpEvent"),
        (dp_accounting.SampledWithReplacementDpEvent(10, 2, GaussianDpEvent(1.0)), "SampledWithReplacement"),
        (PureDpEvent(-1.0), "epsilon must be at least 0"),
        (PaddedDpEvent(PureDpEvent(1.0), 1.0), "padding must be"),
        (FailingDpEvent(1.0), "delta must be"),
        (dp_accounting.PoissonSampledDpEvent(0.1, FailingDpEvent(0.1)), "as if unsampled"),
        (PureDpEvent(math.inf), "infinite number"),
        (GaussianDpEvent(math.inf), "noise_multiplier must be"),
    ],
)
def test_an_event_that_cannot_be_written_is_refused_by_name(tmp_path, event, words):
    with opened(tmp_path / "ledger.jsonl") as ledger:
        with pytest.raises(ValueError, match=words):
            ledger.pay(event)
        with pytest.raises(ValueError, match="attempts must be"):
            ledger.pay(STEP, 0)
        assert ledger.paid == [] and ledger.epsilon(1e-6) == 0


def test_what_has_no_guarantee_makes_the_total_infinite(tmp_path):
    with opened(tmp_path / "ledger.jsonl") as ledger:
        ledger.pay(dp_accounting.NonPrivateDpEvent())
        assert ledger.epsilon(1e-6) == math.inf
    assert read(tmp_path / "ledger.jsonl").epsilon(1e-6) == math.inf


def test_the_total_is_that_of_the_item_most_was_told_of(tmp_path):
    with opened(tmp_path / "ledger.jsonl", "click", adjacency=REPLACE) as ledger:
        for window in (("1", "2"), ("2", "3"), ("3", "4")):
            ledger.pay(PureDpEvent(0.5), about=window)
        assert ledger.epsilon(0.0) == pytest.approx(1.0)
        ledger.pay(PureDpEvent(0.25))
        ledger.pay(PureDpEvent(1.0), about=("1",))
        assert ledger.epsilon(0.0) == pytest.approx(1.75)
        with pytest.raises(ValueError, match="Keep two ledgers"):
            epsilon_of(dp_accounting.ComposedDpEvent([STEP, PureDpEvent(1.0)]), 1e-6)


# The command, and the checker in the docs.


def composed_item_by_item(payments):
    """All payments about each item, one item after the other."""
    general = [payment for payment in payments if payment.about is None]
    items = dict.fromkeys(item for payment in payments for item in payment.about or ())
    of_each = [[payment for payment in payments if item in (payment.about or ())] for item in items]
    return [compose(general + own) for own in of_each] or [compose(general)]


def test_the_cost_of_many_clicks_is_that_of_each_by_itself(monkeypatch):
    rng, kinds = random.Random(0), [GaussianDpEvent(9.0), GaussianDpEvent(7.0), PureDpEvent(0.1)]
    payments = [
        Payment(rng.choice(kinds), rng.randrange(1, 4), about=rng.choice([None, ("a",), ("b", "c"), ("c", "a"), ()]))
        for _ in range(60)
    ]
    for some in ([], payments[:1], payments, [each for each in payments if each.about is not None]):
        wanted = {str(events.to_json(event)) for event in composed_item_by_item(some)}
        assert {str(events.to_json(event)) for event in costs_of_items(some)} == wanted
    written, whole = [], events.to_json
    monkeypatch.setattr(events, "to_json", lambda event: written.append(event) or whole(event))
    clicks = [Payment(GaussianDpEvent(9.0), about=(f"N{n}",)) for n in range(500)] + 500 * [Payment(PureDpEvent(0.1))]
    assert len(costs_of_items(clicks)) == 1 and len(written) == len(clicks)


def test_the_command_shows_verifies_totals_and_mends(filled, capsys):
    assert main(["ledger", "verify", str(filled)]) == 0
    assert main(["ledger", "show", str(filled)]) == 0
    assert main(["ledger", "total", str(filled), "--delta", "1e-6"]) == 0
    said = capsys.readouterr().out
    assert "whole: ledger" in said and "30 x Gaussian noise of multiplier 1.1 on a Poisson sample" in said
    assert re.search(r"epsilon = 0\.\d+ at delta = 1e-06 for one user, zero-out", said)
    assert main(["ledger", "total", str(filled)]) == 2
    text = filled.read_bytes()
    filled.write_bytes(text[:-9])
    assert main(["ledger", "verify", str(filled)]) == 1 and main(["ledger", "total", str(filled)]) == 2
    assert "BROKEN" in capsys.readouterr().out
    assert main(["ledger", "mend", str(filled)]) == 0 and main(["ledger", "verify", str(filled)]) == 0


def test_the_command_needs_no_tensorflow(filled):
    program = (
        "import sys; from tfdp_rec.cli import main\n"
        "code = main(['ledger', 'total', sys.argv[1], '--delta', '1e-6'])\n"
        "sys.exit(code or ('tensorflow' in sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", program, filled], env=environment).returncode == 0


@pytest.mark.slow
def test_the_checker_agrees_on_a_training(tmp_path):
    path = tmp_path / "training.jsonl"
    sampling = PoissonSampling(10_000, 200, unit="user")
    accountant = Accountant(GaussianDpEvent(1.0), sampling, 1e-5, ledger=path)
    accountant.spend(GaussianDpEvent(20.0), "popularity counts")
    accountant.spend(dp_accounting.LaplaceDpEvent(30.0), "how many")
    accountant.spend(dp_accounting.ComposedDpEvent([GaussianDpEvent(9.0), FailingDpEvent(2e-6)]), "vocabulary")
    count(accountant, GaussianDpEvent(1.0), 300)
    two = dp_accounting.ComposedDpEvent([GaussianDpEvent(3.0), GaussianDpEvent(4.0)])
    count(accountant, two, 200)
    epsilon = accountant.epsilon()
    accountant.spending.payments.ledger.close()
    assert checked(path, 1e-5, tmp_path) == pytest.approx(epsilon, rel=1e-6)  # ours adds up what may fail
    assert read(path).epsilon(1e-5) == pytest.approx(epsilon, rel=1e-9)
    text = path.read_text()
    path.write_text(text.replace('"attempts":300', '"attempts":200'))
    with pytest.raises(AssertionError):
        checked(path, 1e-5, tmp_path)


@pytest.mark.slow
def test_the_checker_agrees_on_a_phone(tmp_path):
    path = tmp_path / "phone.jsonl"
    with opened(path, "click", Snapshot(None, "clicks"), adjacency=REPLACE) as ledger:
        for start in range(4):
            ledger.pay(PaddedDpEvent(GaussianDpEvent(2.0), 0.2), about=tuple(map(str, range(start, start + 2))))
        ledger.pay(PureDpEvent(1.0), about=("2", "9"))
        ledger.pay(GaussianDpEvent(4.0))
        block = ledger.pay(GaussianDpEvent(4.0), 3)
        ledger.give_back(block, 3)
        epsilon = ledger.epsilon(1e-5)
    assert checked(path, 1e-5, tmp_path) == pytest.approx(epsilon, rel=2e-3)
    assert 1.0 < epsilon


def test_the_page_quotes_the_refusals_as_they_are():
    import ast
    import pathlib
    import re

    root = pathlib.Path(__file__).parents[2]
    page = (root / "docs/ledger.md").read_text(encoding="utf-8")
    table = page.split("## When a ledger is refused")[1].split("\n## ")[0]
    quoted = [message for row in re.findall(r"^\| (`.*?`) \|", table, re.M) for message in re.findall("`(.*?)`", row)]
    others = ("job/run_state", "federated/accounting", "training/privacy_budget", "training/training_checkpoint")
    files = [*root.glob("tfdp_rec/core/claim/*.py"), *(root / f"tfdp_rec/{name}.py" for name in others)]
    said = "\n".join(
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    between = re.compile(r"\b[A-Z]+\b|\.\.\.|RenyiFilter|\(|\)")  # what a message fills in
    parts = [part.strip(" .,") for message in quoted for part in between.split(message)]
    missing = [part for part in parts if part not in said]
    assert len(quoted) >= 15 and not missing, missing
