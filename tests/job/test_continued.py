"""`tfdp-rec train --continue`: days are added to what was released, in one ledger, within the first day's budget."""

import dataclasses
import fcntl
import http.client
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from checker import checked
from dp_accounting import GaussianDpEvent
from job.conftest import COLUMNS, answer, table, train

from tfdp_rec.core.claim.ledger import ZERO_OUT, read
from tfdp_rec.job import pipeline
from tfdp_rec.job.budget import Budget
from tfdp_rec.job.run_state import WarmStart
from tfdp_rec.privacy import Ledger, Snapshot
from tfdp_rec.serving import Served, Server
from tfdp_rec.spectral import SpectralRecommender

DELTA = 1e-6
LABELS = ["private vocabulary", "private sums"]


def day(number, new=()):
    """A day's log, of as many users as no other; a fifth of its rows are of new items, if there are any."""
    rows = table(users=2500 + 100 * number, rows=40_000, seed=number)
    skus = np.array(rows["sku"].to_pylist(), object)
    if new:
        skus[::5] = np.random.default_rng(number).choice(list(new), len(skus[::5]))
    return rows.set_column(1, "sku", pa.array(skus.tolist()))


@pytest.fixture(scope="package")
def days(tmp_path_factory):
    """The logs of three days, and a run of the first, for three."""
    root = tmp_path_factory.mktemp("days")
    for number, new in enumerate([(), ("new-1", "new-2"), ("new-3",)]):
        pa.parquet.write_table(day(number, new), root / f"{number}.parquet")
    options = ["--days", "3", "--keep", "0.9", "--checkpoint", root / "kept", "--quiet"]
    assert train("--data", root / "0.parquet", *COLUMNS, "--out", root / "run", *options) == 0
    return root


@pytest.fixture
def root(days, tmp_path):
    shutil.copytree(days / "run", tmp_path / "run")
    return tmp_path


def further(root, days, number, *options):
    return train("--continue", root / "run", "--data", days / f"{number}.parquet", "--quiet", *options)


def known(run):
    return (run / "release" / "servable" / "assets" / "items.txt").read_text().split()


def ids_of(*asked):
    return [each["id"] for each in answer(*asked)["recommendations"]]


# What comes of it, and what it costs.


@pytest.mark.slow
def test_three_days_are_one_ledger_one_recommender_and_no_more_than_one_budget(days, root, tmp_path, capsys):
    ledger, first = root / "run" / "release" / "ledger.jsonl", known(root / "run")
    spent = [read(ledger).epsilon(DELTA)]
    for number in (1, 2):
        assert further(root, days, number) == 0
        spent.append(read(ledger).epsilon(DELTA))
        said = (root / "run" / "release" / "statement.txt").read_text()
        assert f"(epsilon = {np.ceil(round(spent[-1] * 1000, 6)) / 1000:g}, delta" in said
        assert f"{number + 1} so far, of at most 3" in said
    assert spent == sorted(spent) and spent[0] < 5 and 7.99 < spent[-1] <= 8.0
    assert checked(ledger, DELTA, tmp_path) == pytest.approx(spent[-1], abs=1e-3)
    assert [paid.label for paid in read(ledger).paid] == 3 * LABELS
    assert {"new-1", "new-2", "new-3"} <= set(known(root / "run")) and set(first) <= set(known(root / "run"))
    earlier = WarmStart.load(root / "run")
    assert earlier.items.ids.to_pylist()[: len(first)] == WarmStart.load(days / "run").items.ids.to_pylist()
    assert earlier.release.fits == 3
    found = ids_of(capsys, root / "run", "--history", "sku-31", "sku-30", "--top-k", "6")
    assert all(sku.startswith(("sku-3", "new-")) for sku in found)
    assert ids_of(capsys, root / "run", "--among", "new-3", "nowhere") == ["new-3"]
    assert not any(b"person-" in path.read_bytes() for path in (root / "run").rglob("*") if path.is_file())
    assert sorted(path.name for path in root.iterdir()) == ["checker.py", "run"]

    before = ledger.read_bytes()
    assert further(root, days, 0) == 2
    said = capsys.readouterr().err
    assert "has spent epsilon = 8 of the 8 that the first day decided on for 3 days" in said and said.count("\n") == 1
    assert ledger.read_bytes() == before


@pytest.mark.slow
def test_a_continued_run_is_served(days, root):
    assert further(root, days, 1) == 0
    inputs = {"history": [["sku-30"]], "k": 2, "allowed": ["new-1", "sku-31"]}
    body = json.dumps({"signature_name": "among", "inputs": inputs})
    with Server(Served(str(root / "run" / "release" / "servable")), port=0) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/models/recommender:predict", body)
        found = json.loads(connection.getresponse().read())
    assert set(found["outputs"]["ids"][0]) == {"new-1", "sku-31"}


@pytest.mark.slow
def test_what_is_released_is_the_sum_of_the_days(days, root, monkeypatch):
    made = []
    release = SpectralRecommender.release_sums
    kept = lambda self, *given, **options: release(made.append(self) or self, *given, **options)  # noqa: E731
    monkeypatch.setattr(SpectralRecommender, "release_sums", kept)
    assert further(root, days, 1, "--keep", "0.5") == 0
    one, both = WarmStart.load(days / "run").release, WarmStart.load(root / "run").release
    sigma = made[0].split.counts
    more = len(both.counts) - len(one.counts)
    assert more >= 2 and both.users == 0.5 * one.users + made[0].num_users
    assert both.counts_noise == pytest.approx(np.hypot(0.5 * np.pad(one.counts_noise, (0, more)), sigma))
    assert made[0]._before.counts == pytest.approx(0.5 * one.counts)
    assert json.loads((root / "run" / "private" / "config.json").read_text())["keep"] == 0.5


@pytest.mark.slow
def test_users_who_are_held_back_on_one_day_are_held_back_on_all(days, root, monkeypatch):
    told, sides = [], pipeline.Interactions.split

    def split(log, *arguments, **options):
        told.append((log, sides(log, *arguments, **options)))
        return told[-1][1]

    monkeypatch.setattr(pipeline.Interactions, "split", split)
    for number in (1, 2):
        assert further(root, days, number) == 0
    one, two = ({log.unit_ids[int(user)].as_py() for user in test} for log, (_, test) in told)
    other = {told[1][0].unit_ids[int(user)].as_py() for user in told[1][1][0]}
    assert len(one & two) > 200 and not one & other


# What is refused.


def harmed(days, root, harm):
    run = root / "run"
    if harm == "no run":
        shutil.rmtree(run)
    elif harm == "no sums":
        (run / "release" / "released.npz").unlink()
    elif harm == "broken sums":
        (run / "release" / "released.npz").write_bytes(b"PK")
    elif harm == "no ledger":
        (run / "release" / "ledger.jsonl").unlink()
    elif harm == "changed ledger":
        text = (run / "release" / "ledger.jsonl").read_text()
        (run / "release" / "ledger.jsonl").write_text(text.replace('"noise_multiplier":1', '"noise_multiplier":9'))
    elif harm == "older ledger":
        lines = (run / "release" / "ledger.jsonl").read_bytes().splitlines(keepends=True)
        (run / "release" / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    elif harm == "another ledger":
        (run / "release" / "ledger.jsonl").unlink()
        with Ledger(run / "release" / "ledger.jsonl", "user", Snapshot(1, "x"), ZERO_OUT) as ledger:
            Budget(80.0, 1e-6, 3, False, None).decide(ledger)
    elif harm == "another unit":
        (run / "release" / "ledger.jsonl").unlink()
        with Ledger(run / "release" / "ledger.jsonl", "click", Snapshot(1, "x"), ZERO_OUT) as ledger:
            Budget(8.0, 1e-6, 3, False, None).decide(ledger)
            ledger.pay(GaussianDpEvent(9.0))
    elif harm == "config has a list":
        fields = json.loads((run / "private" / "config.json").read_text())
        (run / "private" / "config.json").write_text(json.dumps({**fields, "items": __file__}))
    elif harm == "config says more":
        fields = json.loads((run / "private" / "config.json").read_text())
        (run / "private" / "config.json").write_text(json.dumps({**fields, "epsilon": 800.0, "days": 300}))
        with Ledger(run / "release" / "ledger.jsonl", "user", Snapshot(1, "x"), ZERO_OUT, data_changed=True) as ledger:
            ledger.note("budget of all days", dataclasses.asdict(Budget(800.0, 1e-6, 300, False, None)))
            ledger.pay(GaussianDpEvent(0.8))


@pytest.mark.parametrize(
    "harm, options, says",
    [
        ("no run", [], "--continue: there is no run in"),
        ("no sums", [], "has no released.npz, what it released"),
        ("broken sums", [], "released.npz was changed"),
        ("no ledger", [], "has no ledger.jsonl, so that what was spent is not known"),
        ("changed ledger", [], "of {run}/release/ledger.jsonl was changed"),
        ("older ledger", [], "lacks entries that were in it before"),
        ("another ledger", [], "is not the ledger that this was counted in"),
        ("another unit", [], "counts for one click (zero-out), not for one user"),
        ("config has a list", [], "config.json was changed: its ledger was begun with other items"),
        ("config says more", [], "of the 8 that the first day decided on for 3 days"),
        ("", ["--out", "elsewhere"], "leave --out out"),
        ("", ["--resume", "--checkpoint", "elsewhere"], "leave one out"),
        ("", ["--item", "ts"], "has --item sku, and is asked to go on with ts: leave --item out"),
        ("", ["--epsilon", "80"], "has --epsilon 8.0, and is asked to go on with 80.0: leave --epsilon out"),
        ("", ["--days", "300"], "has --days 3, and is asked to go on with 300: leave --days out"),
        ("", ["--delta", "1e-5"], "has --delta 1e-06, and is asked to go on with 1e-05"),
        ("", ["--seed", "1"], "has --seed 0, and is asked to go on with 1"),
        ("", ["--items-epsilon", "1"], "leave --items-epsilon out"),
        ("", ["--items", __file__], "leave --items out"),
        ("", ["--keep", "1.5"], "--keep must be above 0 and at most 1, got 1.5"),
        ("", ["--steps", "5"], "has --steps 600, and is asked to go on with 5: leave --steps out"),
        ("", ["--mechanism", "lazydpsgd"], "has --mechanism spectral, and is asked to go on with lazydpsgd"),
    ],
)
def test_what_cannot_be_continued_is_refused_in_one_line_and_pays_nothing(days, root, capsys, harm, options, says):
    harmed(days, root, harm)
    ledger = root / "run" / "release" / "ledger.jsonl"
    before = ledger.read_bytes() if ledger.exists() else b""
    assert further(root, days, 1, *options) == 2
    said = capsys.readouterr().err
    assert says.replace("{run}", str(root / "run")) in said and said.count("\n") == 1, said
    assert (ledger.read_bytes() if ledger.exists() else b"") == before
    assert [path.name for path in root.iterdir()] == (["run"] if harm != "no run" else [])


def test_a_day_needs_data_with_the_same_columns_and_kinds(days, root, capsys):
    rows = pa.parquet.read_table(days / "1.parquet")
    pa.parquet.write_table(rows.rename_columns(["user_id", "product", "ts"]), root / "columns.parquet")
    pa.parquet.write_table(rows.set_column(1, "sku", pa.array(np.arange(len(rows)) % 9)), root / "kinds.parquet")
    for data, says in (("columns", "has no column 'sku'"), ("kinds", "were text on the days before, and are whole")):
        assert train("--continue", root / "run", "--data", root / f"{data}.parquet", "--quiet") == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1, said
    assert train("--continue", root / "run", "--quiet") == 2
    assert "--data is missing" in capsys.readouterr().err
    ledgers = [each / "run" / "release" / "ledger.jsonl" for each in (root, days)]
    assert ledgers[0].read_bytes() == ledgers[1].read_bytes()


@pytest.mark.slow
def test_a_run_for_one_day_has_spent_it(run, log, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    assert train("--continue", tmp_path / "run", "--data", log, "--quiet") == 2
    said = capsys.readouterr().err
    assert "has spent epsilon = 8 of the 8 that the first day decided on for 1 day " in said


@pytest.mark.slow
def test_the_same_data_twice_is_warned_of_and_paid_again(days, root, capsys):
    assert further(root, days, 0) == 0
    assert "A day before had 2,500 users, too" in capsys.readouterr().err
    assert [paid.label for paid in read(root / "run" / "release" / "ledger.jsonl").paid] == 2 * LABELS
    assert further(root, days, 1) == 0
    assert "A day before had" not in capsys.readouterr().err


# Cut off, gone on with, and two at once.


def cut_off(days, root, monkeypatch, where, error=KeyboardInterrupt, checkpoint=True):
    home, name = where
    whole = getattr(home, name)

    def cut(*args, **kwargs):
        whole(*args, **kwargs)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(home, name, cut)
        return further(root, days, 1, *(["--checkpoint", root / "kept"] if checkpoint else []))


def unchanged(days, root):
    """What was released is what the first day released."""
    return len({(each / "run" / "release" / "released.npz").read_bytes() for each in (days, root)}) == 1


MOMENTS = [
    (SpectralRecommender, "release_sums"),
    *(pytest.param(where, marks=pytest.mark.slow) for where in
      [(pipeline, "private_items"), (pipeline, "export"), (pipeline.report, "write")]),
]  # fmt: skip


@pytest.mark.parametrize("where", MOMENTS, ids=lambda where: where[1])
def test_ctrl_c_in_a_further_day_and_gone_on_with_costs_once(days, root, monkeypatch, capsys, where):
    assert cut_off(days, root, monkeypatch, where) == 130
    assert unchanged(days, root)
    assert train("--checkpoint", root / "kept", "--resume", "--quiet") == 0
    assert [paid.label for paid in read(root / "run" / "release" / "ledger.jsonl").paid] == 2 * LABELS
    assert WarmStart.load(root / "run").release.fits == 2
    capsys.readouterr()
    assert train("--checkpoint", root / "kept", "--resume", "--quiet") == 2
    assert "has gone on since this was begun" in capsys.readouterr().err
    assert further(root, days, 2) == 0
    assert WarmStart.load(root / "run").release.fits == 3


@pytest.mark.slow
def test_a_day_that_was_lost_after_it_had_paid_stays_paid_and_is_one_day_less(days, root, monkeypatch, capsys):
    with pytest.raises(MemoryError):
        cut_off(days, root, monkeypatch, (SpectralRecommender, "release_sums"), MemoryError)
    capsys.readouterr()
    assert train("--checkpoint", root / "kept", "--resume", "--quiet") == 2
    said = capsys.readouterr().err
    assert "has paid for the private sums of a run that ended" in said and "with --continue, in other folders" in said
    assert further(root, days, 2) == 0
    assert 7.99 < read(root / "run" / "release" / "ledger.jsonl").epsilon(DELTA) <= 8.0
    assert WarmStart.load(root / "run").release.fits == 2
    assert further(root, days, 1) == 2


def finished(days, tmp_path):
    """The run of the first day, and its checkpoint, elsewhere."""
    shutil.copytree(days / "run", tmp_path / "run")
    shutil.copytree(days / "kept", tmp_path / "kept")
    written = json.loads((tmp_path / "kept" / "run.json").read_text())
    (tmp_path / "kept" / "run.json").write_text(json.dumps({**written, "out": str(tmp_path / "run")}))


def test_the_first_days_checkpoint_does_not_put_an_older_ledger_back(days, tmp_path, capsys):
    finished(days, tmp_path)
    assert further(tmp_path, days, 1) == 0
    after = (tmp_path / "run" / "release" / "ledger.jsonl").read_bytes()
    capsys.readouterr()
    assert train("--checkpoint", tmp_path / "kept", "--resume", "--quiet") == 2
    assert "has gone on since this was begun" in capsys.readouterr().err
    assert (tmp_path / "run" / "release" / "ledger.jsonl").read_bytes() == after


def test_no_day_is_added_while_the_first_days_checkpoint_writes_its_folder_anew(days, tmp_path, monkeypatch, capsys):
    finished(days, tmp_path)
    export, between = pipeline.export, []

    def and_another(*args, **kwargs):
        if not between:
            between.append(None)
            between[0] = further(tmp_path, days, 1)
        return export(*args, **kwargs)

    monkeypatch.setattr(pipeline, "export", and_another)
    before = (tmp_path / "run" / "release" / "ledger.jsonl").read_bytes()
    assert train("--checkpoint", tmp_path / "kept", "--resume", "--quiet") == 0
    assert between == [2] and "is in use by another process" in capsys.readouterr().err
    assert (tmp_path / "run" / "release" / "ledger.jsonl").read_bytes() == before


def test_the_ledger_of_another_run_is_not_written_over(days, tmp_path, capsys):
    """Begun in the same folder with another checkpoint, and done first."""
    finished(days, tmp_path)
    path = tmp_path / "run" / "release" / "ledger.jsonl"
    shutil.rmtree(tmp_path / "run")
    path.parent.mkdir(parents=True)
    with Ledger(path, "user", Snapshot(1, "x"), ZERO_OUT) as ledger:
        ledger.pay(GaussianDpEvent(9.0))
    assert train("--checkpoint", tmp_path / "kept", "--resume", "--quiet") == 2
    said = capsys.readouterr().err
    assert "is not the ledger that this was counted in" in said
    assert [paid.event for paid in read(path).paid] == [GaussianDpEvent(9.0)] and said.count("\n") == 1
    assert [each.name for each in path.parent.iterdir()] == ["ledger.jsonl"]


def test_two_days_are_not_added_at_once(days, root, capsys):
    with Ledger(root / "run" / "release" / "ledger.jsonl", "user", Snapshot(1, "x"), ZERO_OUT, data_changed=True):
        assert further(root, days, 1) == 2
    said = capsys.readouterr().err
    assert "is in use by another process" in said and said.count("\n") == 1
    assert unchanged(days, root)


def test_a_second_process_on_the_same_folder_is_told_so_before_it_reads_the_log(days, root, capsys):
    """Without --checkpoint both keep what they need in the run folder."""
    beside = root / "run" / "private" / "resume"
    beside.mkdir()
    (beside / "run.json").write_text('{"job": "log"}')
    with open(beside / "in-use", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert further(root, days, 1) == 2
    said = capsys.readouterr().err
    assert "Another process trains with" in said and said.count("\n") == 1 and beside.exists()


@pytest.mark.slow
def test_a_day_between_ctrl_c_and_resume_is_not_written_over(days, root, monkeypatch, capsys):
    assert cut_off(days, root, monkeypatch, (SpectralRecommender, "release_sums")) == 130
    assert further(root, days, 2) == 0
    released = (root / "run" / "release" / "released.npz").read_bytes()
    capsys.readouterr()
    assert train("--checkpoint", root / "kept", "--resume", "--quiet") == 2
    assert "has gone on since this was begun" in capsys.readouterr().err
    assert (root / "run" / "release" / "released.npz").read_bytes() == released


@pytest.mark.slow
def test_public_items_join_by_a_longer_list(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for number, items in enumerate((8, 12)):
        rows = "".join(f"{u},{u % 4 + 4 * i}\n" for u in range(500) for i in rng.integers(0, items // 4, 3))
        (tmp_path / f"{number}.csv").write_text("who,what\n" + rows)
        (tmp_path / f"{number}.txt").write_text("".join(f"{i}\n" for i in range(items)))
    columns = ["--user", "who", "--item", "what", "--items", tmp_path / "0.txt", "--quiet", "--days", "2"]
    assert train("--data", tmp_path / "0.csv", *columns, "--out", tmp_path / "run") == 0
    more = ["--items", tmp_path / "1.txt", "--quiet"]
    assert train("--continue", tmp_path / "run", "--data", tmp_path / "1.csv", *more) == 0
    ledger = read(tmp_path / "run" / "release" / "ledger.jsonl")
    assert WarmStart.load(tmp_path / "run").items.ids.to_pylist() == [str(i) for i in range(12)]
    assert [paid.label for paid in ledger.paid] == 2 * LABELS[1:] and 7.99 < ledger.epsilon(DELTA) <= 8.0
