"""`tfdp-rec train` on a log of one's own: what comes of it, what it costs, and that nothing is spent twice."""

import errno
import fcntl
import json
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from checker import checked
from dp_accounting import ComposedDpEvent, GaussianDpEvent
from job.conftest import COLUMNS, answer, results_of, table, train
from pages import fits, self_contained

from tfdp_rec.cli import main, recommend
from tfdp_rec.core.claim.ledger import ZERO_OUT, read
from tfdp_rec.data import Interactions
from tfdp_rec.datasets.log import Log
from tfdp_rec.datasets.logs import grouping
from tfdp_rec.job import pipeline, report
from tfdp_rec.job.budget import ITEMS, PRETRAINING_SUMS, SUMS, Budget
from tfdp_rec.job.evaluation import HISTORY, Evaluation, NewItemExamples
from tfdp_rec.job.run_state import WarmStart
from tfdp_rec.job.users import UserSubset
from tfdp_rec.privacy import Ledger, Snapshot, epsilon_of
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.sums.private_metrics import LABEL as METRICS

DELTA = 1e-6


# What comes of it.


@pytest.mark.slow
def test_a_run_folder_holds_everything_and_no_row_of_the_log(run):
    names = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    assert sorted(path.name for path in run.iterdir()) == ["private", "release"]
    private = {"config.json", "results.json", "report.html", "report.md", "confidential"}
    assert {path.name for path in (run / "private").iterdir()} == private
    confidential = {"results.json", "report.html", "report.md", "recall_at_k.png", "log.jsonl"}
    assert {path.name for path in (run / "private" / "confidential").iterdir()} == confidential
    released = {"statement.txt", "ledger.jsonl", "servable", "released.npz", "card.md"}
    assert {path.name for path in (run / "release").iterdir()} == released
    assert "release/servable/assets/items.txt" in names
    assert not any(b"person-" in path.read_bytes() for path in run.rglob("*") if path.is_file())
    earlier = WarmStart.load(run)
    assert earlier.release.fits == 1 and earlier.mark.lines == len(read(run / "release" / "ledger.jsonl").lines)
    vocabulary = (run / "release/servable/assets/items.txt").read_text().split()
    assert sorted(earlier.items.ids.to_pylist()) == sorted(vocabulary)
    kept = run.parent / "kept"
    assert {path.stat().st_mode & 0o77 for path in kept.iterdir() if path.name not in ("in-use", ".log.lock")} == {0}
    assert oct(kept.stat().st_mode)[-3:] == "700"


def test_what_is_spent_is_what_is_stated_by_a_checker_that_knows_nothing_of_us(run, tmp_path):
    ledger = run / "release" / "ledger.jsonl"
    epsilon = checked(ledger, DELTA, tmp_path)
    assert 7.99 < epsilon <= 8.0 and epsilon == pytest.approx(read(ledger).epsilon(DELTA), abs=2e-4)
    assert [paid.label for paid in read(ledger).paid] == ["private vocabulary", "private sums", METRICS]
    assert {paid.adjacency for paid in read(ledger).paid} == {"zero-out"}
    said = (run / "release" / "statement.txt").read_text()
    assert "(epsilon = 8, delta = 1e-06)-differential privacy" in said and "by itself epsilon = 2" in said
    assert said in (run / "private" / "report.md").read_text()


def test_the_recommender_is_tested_beside_popularity_and_the_page_says_what_that_is(run):
    found = results_of(run)
    assert set(found) == {"popularity", "dp-popularity", "spectral"}
    assert found["spectral"]["recalls"]["recall@10"] > 0.8 > 0.2 > found["popularity"]["recalls"]["recall@10"]
    assert found["popularity"]["epsilon"] is None and 2 < found["dp-popularity"]["epsilon"] < 8
    assert all(0 < result["errors"]["recall@1"] < 0.03 for result in found.values())
    page = (run / "private" / "confidential" / "report.md").read_text()
    assert "computed from users' data without noise" in page.split("|")[0] and "95% intervals" in page


def test_the_report_is_one_page_with_the_statement_word_for_word(run):
    page = self_contained((run / "private" / "report.html").read_text())
    said = (run / "release" / "statement.txt").read_text()
    assert page.text.count(said) == 1
    exact = self_contained((run / "private" / "confidential" / "report.html").read_text())
    assert exact.rows == report.table([*results_of(run).values()]) and exact.tags.count("img") == 1
    assert page.tags.count("img") == 0
    assert "0.parquet, 1.parquet, users in user_id, items in sku, times in ts" in page.text
    assert str(run.parent) not in page.text and "tfdp-rec recommend run --history sku-" in page.text


@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_the_report_has_the_browsers_width(run, tmp_path, width):
    fits((run / "private" / "report.html").read_text(), width, tmp_path)


@pytest.mark.slow
def test_what_a_log_calls_things_stays_words_on_the_page(tmp_path, capsys):
    """Files, columns, ids and titles that are markup; and the command's last line says where the page is."""
    bad = "<script>alert(1)</script>"
    skus = [f"<b>{i}|`*" for i in range(4)]
    rows = "".join(f"{u},{skus[i]}\n" for u in range(300) for i in range(u % 2, 4, 2))
    data = written(tmp_path, "<img src=x>.csv", f"u,<i>sku\n{rows}")
    titles = written(tmp_path, "titles.csv", "id,title\n" + "".join(f"{sku},{bad}\n" for sku in skus))
    asked = ["--data", data, "--user", "u", "--item", "<i>sku", "--titles", titles, "--out", tmp_path / "<run>"]
    assert train(*asked) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{tmp_path}/<run>/private/report.html   ")
    page = self_contained((tmp_path / "<run>" / "private" / "report.html").read_text())
    assert [skus[0], bad] in page.rows and "<img src=x>.csv, users in u, items in <i>sku" in page.text
    told = (tmp_path / "<run>" / "private" / "report.md").read_text()
    told = re.sub(r"(`+).*?\1", "", told, flags=re.S)  # without code
    assert r"\<script\>" in told and not re.search(r"(?<!\\)<", told)


@pytest.mark.slow
def test_it_answers_with_the_users_own_ids_and_titles(run, capsys):
    found = answer(capsys, run, "--history", "sku-31", "sku-30", "nowhere", "--top-k", "4")
    assert found["unknown"] == ["nowhere"]
    ids = [each["id"] for each in found["recommendations"]]
    assert len(set(ids)) == 4 and set(ids) <= {f"sku-{i}" for i in range(32, 40)}
    assert all(each["title"] == each["id"].replace("sku-", "Thing ") for each in found["recommendations"])
    assert len(answer(capsys, run)["recommendations"]) == 10
    untitled = answer(capsys, run, "--history", "sku-170", "--top-k", "1")["recommendations"][0]
    assert untitled["id"].startswith("sku-17") and untitled["title"] == ""
    among = answer(capsys, run, "--history", "sku-31", "--among", "sku-5", "sku-31", "sku-33", "nowhere")
    assert [each["id"] for each in among["recommendations"]] == ["sku-33", "sku-5"]
    assert main(["recommend", str(run), "--history", "sku-31", "nowhere"]) == 0
    said = capsys.readouterr().out
    assert "nowhere  (unknown: ignored)" in said and "Thing 3" in said
    assert main(["recommend", str(run), "--top-k", "0"]) == 2
    assert "--top-k must be positive" in capsys.readouterr().err


def left_behind(folder):
    """What a process that was killed leaves."""
    folder.mkdir()
    nothing = {"job": "log", "out": str(folder / "gone"), "continues": None, "ledgers": {}, "since": {}, "data": ""}
    (folder / "run.json").write_text(json.dumps(nothing))
    (folder / "in-use").touch()
    return folder


@pytest.mark.slow
def test_a_log_as_logs_are(tmp_path, capsys):
    """Whole numbers, 0 among them, in CSV; rows without user or item; repeated rows; one user with half of all rows;
    a public list; no times; nothing kept.
    """
    rng = np.random.default_rng(1)
    rows = [f"{u},{u % 5 * 4 + i}" for u in range(400) for i in rng.integers(0, 4, 6)]
    huge = [f"999,{i % 20}" for i in range(2400)]
    (tmp_path / "log.csv").write_text("\n".join(["who,what", *rows, *huge, ",3", "7,", *rows[:50]]) + "\n")
    (tmp_path / "public.txt").write_text("".join(f"{i}\n" for i in range(20)))
    options = ["--items", tmp_path / "public.txt", "--out", tmp_path / "run", "--top-k", "3"]
    left, used = (left_behind(tmp_path / f".{name}.private") for name in ("run", "other"))
    with open(used / "in-use", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        asked = ["--data", tmp_path / "log.csv", "--user", "who", "--item", "what", "--confidential"]
        assert train(*asked, *options) == 0
    assert not left.exists() and used.exists()
    shutil.rmtree(used)
    said = capsys.readouterr().out
    counted = (tmp_path / "run" / "private" / "confidential" / "log.jsonl").read_text()
    for words in ("1 rows left out: no user id", "1 rows left out: no item id", "they repeat user"):
        assert words in counted and words not in said, counted
    assert "[5/5]" in said and "of 401" in counted
    assert max(map(len, said.split("Held-out users")[1].split("\n\n")[0].splitlines())) <= 80
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "public.txt", "run"]
    assert not (tmp_path / "run" / "private" / "resume").exists()
    found = answer(capsys, tmp_path / "run", "--history", "0", "1")
    assert {each["id"] for each in found["recommendations"][:2]} == {"2", "3"} and found["unknown"] == []
    ledger = read(tmp_path / "run" / "release" / "ledger.jsonl")
    assert [paid.label for paid in ledger.paid] == ["private sums", METRICS]
    assert 7.99 < ledger.epsilon(DELTA) <= 8.0


@pytest.mark.parametrize("wrong", ["sku-1", "1.5", str(2**63)])
def test_ids_that_are_no_whole_numbers_are_refused_where_ids_are(wrong):
    assert recommend.ids_of(["7", "-3"], tf.int64, "--history") == [7, -3]
    assert recommend.ids_of([wrong], tf.string, "--history") == [wrong]
    with pytest.raises(ValueError, match="--among: the ids of this run are whole numbers of 64 bits"):
        recommend.ids_of([wrong], tf.int64, "--among")


# Nothing is spent twice.


def interrupted(log, root, monkeypatch, where, error=KeyboardInterrupt):
    """A run that ends while it makes something."""

    def cut(*args, **kwargs):
        whole(*args, **kwargs)
        raise error

    home, name = where
    whole = getattr(home, name)
    with monkeypatch.context() as patch:
        patch.setattr(home, name, cut)
        options = ["--out", root / "run", "--checkpoint", root / "kept", "--quiet"]
        return train("--data", log, *COLUMNS, *options)


MOMENTS = [
    (pipeline, "private_items"), (SpectralRecommender, "release_sums"),
    pytest.param((pipeline, "export"), marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.fast_cases("release_sums")
@pytest.mark.parametrize("where", MOMENTS, ids=lambda where: where[1])
def test_ctrl_c_anywhere_and_gone_on_with_costs_once(log, tmp_path, monkeypatch, capsys, where):
    assert interrupted(log, tmp_path, monkeypatch, where) == 130
    assert f"Go on with: tfdp-rec train --checkpoint {tmp_path / 'kept'} --resume" in capsys.readouterr().err
    assert not (tmp_path / "run" / "private" / "config.json").exists()
    before = {path.name: path.read_bytes() for path in (tmp_path / "kept").glob("*.[np][pa][zr]*")}
    assert train("--checkpoint", tmp_path / "kept", "--resume", "--quiet") == 0
    assert all((tmp_path / "kept" / name).read_bytes() == content for name, content in before.items())
    ledger = read(tmp_path / "run" / "release" / "ledger.jsonl")
    assert [paid.label for paid in ledger.paid] == ["private vocabulary", "private sums", METRICS]
    assert 7.99 < ledger.epsilon(DELTA) <= 8.0


def test_after_a_crash_what_was_paid_for_stays_paid(log, tmp_path, monkeypatch, capsys):
    with pytest.raises(MemoryError):
        interrupted(log, tmp_path, monkeypatch, (SpectralRecommender, "release_sums"), MemoryError)
    capsys.readouterr()
    assert train("--checkpoint", tmp_path / "kept", "--resume", "--quiet") == 2
    said = capsys.readouterr().err
    assert "has paid for the private sums of a run that ended before it kept it" in said and said.count("\n") == 1
    assert 7.5 < read(tmp_path / "run" / "release" / "ledger.jsonl").epsilon(DELTA) < 7.9  # less what figures take


def test_payments_of_a_run_without_a_checkpoint_stay_in_its_folder(log, tmp_path, monkeypatch, capsys):
    def ends(where, error):
        with monkeypatch.context() as patch:
            whole = getattr(*where)
            patch.setattr(*where, lambda *a, **o: (whole(*a, **o), _raised(error)))
            return train("--data", log, *COLUMNS, "--out", tmp_path / "run", "--quiet")

    assert ends((pipeline, "private_items"), KeyboardInterrupt) == 130
    assert list(tmp_path.iterdir()) == [], "given back: nothing of it was shown"
    with pytest.raises(MemoryError):
        ends((SpectralRecommender, "release_sums"), MemoryError)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ledger.jsonl", "private", "release", "run"]
    assert "What it paid for was not kept" in capsys.readouterr().err
    assert 7.5 < read(tmp_path / "run" / "release" / "ledger.jsonl").epsilon(DELTA) < 7.9  # less what figures take
    capsys.readouterr()
    assert train("--data", log, *COLUMNS, "--out", tmp_path / "run", "--quiet") == 2
    assert "cut off after it had paid" in capsys.readouterr().err


def _raised(error):
    raise error


@pytest.mark.slow
def test_a_finished_run_that_is_gone_on_with_pays_nothing_and_answers_the_same(run, tmp_path, capsys):
    shutil.copytree(run.parent / "kept", tmp_path / "kept")
    written = json.loads((tmp_path / "kept" / "run.json").read_text())
    (tmp_path / "kept" / "run.json").write_text(json.dumps({**written, "out": str(tmp_path / "run")}))
    (tmp_path / "run" / "release").mkdir(parents=True)
    shutil.copy(run / "release" / "ledger.jsonl", tmp_path / "run" / "release")
    assert train("--checkpoint", tmp_path / "kept", "--resume", "--quiet", "--epsilon", "8") == 0
    ledgers = [folder / "release" / "ledger.jsonl" for folder in (tmp_path / "run", run)]
    assert ledgers[0].read_bytes() == ledgers[1].read_bytes()
    asked = ["--history", "sku-3", "--top-k", "20"]
    assert answer(capsys, tmp_path / "run", *asked) == answer(capsys, run, *asked)


# What is refused, in a line, before anything is spent.


def written(folder, name, text):
    (folder / name).write_text(text)
    return folder / name


def test_a_public_list_by_a_column_that_holds_no_ids_is_seen_before_anything_is_paid(tmp_path, capsys):
    rows = {"user_id": [f"u-{u}" for u in range(300)], "sku": [10 + u % 3 for u in range(300)], "ts": [1] * 300}
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    written(tmp_path, "items.csv", "name,id\nA,10\nB,11\nC,12\n")
    options = [*COLUMNS, "--items", tmp_path / "items.csv", "--quiet"]
    assert train("--data", tmp_path / "log.parquet", *options, "--out", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert "the ids are taken from column 'name'" in said and "items.csv, the first." in said
    assert "none of the 3 ids, such as 'A', is a whole number" in said and "name the column of ids 'sku'" in said
    assert not list(tmp_path.rglob("ledger.jsonl"))


GOOD = "user_id,sku,ts\n" + "".join(f"u-{u},sku-{u % 3},2024-01-0{1 + u % 9}\n" for u in range(300))


@pytest.mark.parametrize(
    "options, says",
    [
        (["--item", "product"], "{data} has no column 'product'; it has 'user_id', 'sku', 'ts'."),
        (["--user", ""], "--user is missing: say which column of the log holds the users' ids."),
        (["--data", "nowhere.csv"], "--data: there is nothing at nowhere.csv."),
        (["--time", "user_id"], "user_id, sku, user_id names one twice."),
        (["--items", "nowhere.txt"], "--items: there is no file nowhere.txt."),
        (["--titles", "nowhere.csv"], "--titles: there is no file nowhere.csv."),
        (["--titles", "{data}"], 'one with titles, called "title"'),
        (["--items-epsilon", "9"], "--items-epsilon must be less than --epsilon 8, got 9."),
        (["--delta", "0.5"], "--delta 0.5 is above 1 / "),
        (["--mechanism", "lazydpsgd"], "is more than the 2"),
        (["--mechanism", "adam", "--days", "2"], "--days and --continue go with private sums, and with trainings of"),
        (["--mechanism", "upon-sums", "--time", ""], "--mechanism upon-sums predicts what comes next, in one"),
        (["--mechanism", "upon-sums", "--batch-size", "20", "--noise-multiplier", "0.01"], "for one step of upon-sums"),
        (["--mechanism", "upon-sums", "--order", "no"], "it does not go with --order no."),
        (["--mechanism", "upon-sums", "--sampling", "shuffled"], "it does not go with --sampling shuffled."),
        (["--mechanism", "upon-sums", "--local", "1", "1"], "it does not go with --local."),
    ],
)
def test_wrong_options_are_answered_in_one_line_in_their_own_words(tmp_path, capsys, options, says):
    data = written(tmp_path, "log.csv", GOOD)
    options = [option.replace("{data}", str(data)) for option in options]
    assert train("--data", data, *COLUMNS, "--out", tmp_path / "run", "--quiet", *options) == 2
    said = capsys.readouterr().err
    assert says.replace("{data}", str(data)) in said and said.count("\n") == 1, said
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "is empty, not even a header"),
        (GOOD + "u-1,sku-1,1.2.2024\n", "row 301: ts is '1.2.2024', and was '2024-01-01'"),
        ("user_id,sku,ts\nu-1,sku-1\n", "log.csv cannot be read"),
        (GOOD.replace("2024-01-0", "day "), "ts is 'day 1', which is no time"),
        ("user_id,sku,ts\nu-1,sku-1,2024-01-01\n", "--epsilon 8 is too small for a log of 1 users: with its share"),
    ],
    ids=["empty", "two formats", "broken", "no time", "one user"],
)
def test_wrong_files_are_answered_in_one_line(tmp_path, capsys, text, says):
    data = written(tmp_path, "log.csv", text)
    assert train("--data", data, *COLUMNS, "--out", tmp_path / "run", "--quiet") == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1, said


def test_items_that_no_one_may_be_told_of_are_not_told(tmp_path, capsys):
    rows = "".join(f"u-{u},own-{u}\n" for u in range(300))
    data = written(tmp_path, "log.csv", "user_id,sku\n" + rows)
    assert train("--data", data, *COLUMNS[:4], "--out", tmp_path / "run", "--quiet") == 2
    said = capsys.readouterr().err
    assert "No item has so many users" in said and "--items" in said and "own-" not in said


@pytest.mark.slow
def test_a_disk_that_fills_up_is_said_before_anything_is_paid(tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    data = written(tmp_path, "log.csv", GOOD)
    asked = ["--data", data, *COLUMNS, "--out", tmp_path / "run", "--checkpoint", tmp_path / "kept", "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(grouping.Grouping, "_join", full)
        assert train(*asked) == 2
    said = capsys.readouterr().err
    assert "is full" in said and "--resume" in said and "folder=" not in said and said.count("\n") == 2
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        assert train("--checkpoint", tmp_path / "kept", "--resume", "--quiet") == 2
    assert "has 0 MB left, and what is about to be paid for" in capsys.readouterr().err
    assert read(tmp_path / "run" / "release" / "ledger.jsonl").paid == []
    assert train("--checkpoint", tmp_path / "kept", "--resume", "--quiet") == 0


# Its parts.


@pytest.mark.parametrize("epsilon, delta", [(0.1, 1e-9), (8.0, 1e-7)])
def test_shares_come_to_the_budget_and_never_above_it(epsilon, delta):
    for budget in (Budget(epsilon, delta, public=True), Budget(epsilon, delta)):
        assert epsilon - 5e-4 * max(1, epsilon / 50) < epsilon_of(budget.all_days(budget.sums), delta) <= epsilon
        of_items = 0.0 if budget.public else epsilon / 4
        before_steps = epsilon_of(ComposedDpEvent(list(budget.releases(PRETRAINING_SUMS).values())), delta)
        assert before_steps == pytest.approx(of_items + 0.8 * (epsilon - of_items), rel=2e-3)
    tenth = GaussianDpEvent(budget.sums * 0.999)
    assert epsilon_of(ComposedDpEvent([budget.releases()[ITEMS], tenth]), delta) > epsilon * 0.9999


def test_a_budget_below_what_can_be_priced_is_refused_by_its_own_number():
    for share in ("sums", "pretraining_sums"):
        with pytest.raises(ValueError, match="epsilon .*e-0[56] is too small"):
            getattr(Budget(1e-5, 1e-6, public=True), share)
        assert 1e4 < getattr(Budget(1e-4, 1e-6, public=True), share) < 1e6


@pytest.mark.slow
@pytest.mark.parametrize("public", [True, False])
@pytest.mark.parametrize("days", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_all_days_come_to_the_budget_and_one_more_would_pass_it(tmp_path, days, public):
    budget = decided = Budget(8.0, DELTA, days, public)
    one, events = Budget(8.0, DELTA, public=public), list(budget.releases(SUMS).values())
    assert budget.sums == pytest.approx(one.sums * days**0.5, rel=1e-3)
    with Ledger(tmp_path / "ledger.jsonl", "user", Snapshot(9, "x"), ZERO_OUT) as ledger:
        with pytest.raises(ValueError, match="does not say what all days together may cost"):
            Budget.read(ledger)
        assert decided.decide(ledger) == decided
        assert Budget(800.0, DELTA, days, public).decide(ledger) == decided  # who comes later decides nothing
        for event in (days - 1) * events:
            ledger.pay(event)
        decided.refuse_excess(ledger, events)
        for event in events:
            ledger.pay(event)
        assert 7.99 < ledger.epsilon(DELTA) <= 8.0
        with pytest.raises(ValueError, match=f"of the 8 that the first day decided on for {days} days"):
            decided.refuse_excess(ledger, events)
    assert checked(tmp_path / "ledger.jsonl", DELTA, tmp_path) == pytest.approx(ledger.epsilon(DELTA), abs=2e-3)


def test_chosen_users_count_as_their_rows_alone_would():
    items = [f"sku-{i}" for i in range(150)]
    log = Interactions.read(table(users=70, rows=900), user="user_id", item="sku", items=items)
    users = np.arange(0, len(log), 3)
    read = []
    chosen = UserSubset(log, users, read.append)
    alone = [log[user] for user in users]
    oracle = Log(np.concatenate(alone), np.cumsum([0, *map(len, alone)]))
    for events in (50, 10**6):
        (whole,) = oracle.parts(log.catalogue)
        parts = list(chosen.parts(log.catalogue, events))
        starts = np.cumsum([0, *(part.num_users for part in parts)])
        assert starts[-1] == len(chosen) == len(users)
        assert np.concatenate([p.users + s for p, s in zip(parts, starts)]).tolist() == whole.users.tolist()
        assert np.concatenate([part.places for part in parts]).tolist() == whole.places.tolist()
    assert read[-1] == 2 * len(log)
    expected = np.bincount(np.concatenate([np.unique(rows) for rows in alone]), minlength=151)[1:]
    assert chosen.exact_counts(log.catalogue).tolist() == expected.tolist()


@pytest.mark.parametrize("time", ["ts", ""])
def test_who_is_asked_is_asked_for_an_item_that_was_new(time):
    log = Interactions.read(table(users=60, rows=1500), user="user_id", item="sku", time=time)
    known = log.with_items([f"sku-{i}" for i in range(0, 200, 2)])
    examples = NewItemExamples(known, np.arange(len(known)))
    fixed, again = examples.fixed(3), examples.fixed(3)
    assert all(np.array_equal(fixed[name], again[name]) for name in fixed)
    assert fixed["context"].shape[1] == HISTORY and len(fixed["label"]) == len(known)
    assert 0.3 < np.mean(fixed["label"] == 0) < 0.7  # half of the items are not known, and count as not found
    for user, (context, label) in enumerate(zip(fixed["context"], fixed["label"])):
        own = set(known[user].tolist())
        assert set(context[context > 0].tolist()) <= own and label not in context[context > 0]
        assert label == 0 or label in own
    evaluation = Evaluation(examples, 3, at_once=7)
    ranks = evaluation.ranks(lambda context: np.zeros([len(context), known.num_items], np.float32))
    assert (ranks[fixed["label"] == 0] == known.num_items).all() and (ranks[fixed["label"] > 0] < 100).all()
