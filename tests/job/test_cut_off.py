"""A run without --checkpoint that is cut off anywhere: nothing paid is lost, no raw log stays, and it can go on.

The run is a small one, on public items or on found ones, whose SavedModel and pictures are replaced by small files, so
that it can be cut off at every line of what keeps it.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf
from dp_accounting import GaussianDpEvent
from helpers import bytes_in, of_this_machine
from job.conftest import train

from tfdp_rec.cli import main
from tfdp_rec.core.claim.ledger import ZERO_OUT, read
from tfdp_rec.core.ground import interruption
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.job import budget, held_out, pipeline, report, run_state
from tfdp_rec.job.recommenders import private_sums, training
from tfdp_rec.job.run_state import RunState, WarmStart
from tfdp_rec.job.sources import OwnFiles
from tfdp_rec.job.users import UserSubset
from tfdp_rec.privacy import Ledger, Snapshot
from tfdp_rec.serving import own_ids
from tfdp_rec.spectral import SpectralRecommender, counting, denoising, scores
from tfdp_rec.sums.private_metrics import LABEL as METRICS

SUMS = ["private sums"]
ALL = ["private vocabulary", *SUMS]


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


def terminated(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)  # the handler has raised by then


def no_memory(*_, **__):
    raise MemoryError


def of_tensorflow(*_, **__):
    raise tf.errors.ResourceExhaustedError(None, None, "ram/saved_model.pb; No space left on device")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The arguments of a small run, whose export and report write little."""
    rows = "".join(f"u-{u},sku-{(u + i) % 5},{1_700_000_000 + i}\n" for u in range(300) for i in range(3))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "ann@example.org.csv").write_text("user_id,sku,ts\n" + rows)
    (tmp_path / "items.txt").write_text("".join(f"sku-{i}\n" for i in range(5)))
    (tmp_path / "titles.csv").write_text("sku,title\n" + "".join(f"sku-{i},Thing {i}\n" for i in range(5)))

    def export(filepath, *_):
        os.mkdir(filepath)
        with open(os.path.join(filepath, "saved_model.pb"), "w") as file:
            file.write("a model")

    monkeypatch.setattr(pipeline, "export", export)
    monkeypatch.setattr(report, "write", lambda told, *_: told.folder.write("report.md", "a report"))
    asked = ["--user", "user_id", "--item", "sku", "--time", "ts", "--titles", tmp_path / "titles.csv", "--quiet"]
    asked += ["--items", tmp_path / "items.txt", "--data", tmp_path / "logs" / "ann@example.org.csv"]
    monkeypatch.setattr(report, "write_confidential", lambda told: None)
    firsts = lambda asked, k: np.tile(np.arange(1, k + 1), (len(asked), 1))  # noqa: E731
    monkeypatch.setattr(held_out, "load_released", lambda run, items: firsts)
    return [*asked, "--confidential", "--out", tmp_path / "run"]


def labels(run):
    ledger = run / "release" / "ledger.jsonl"
    return [paid.label for paid in read(ledger).paid] if ledger.exists() and ledger.stat().st_size else []


def no_raw_log(run):
    return not any(b"u-17" in path.read_bytes() for path in run.rglob("*") if path.is_file())


def gone_on_with(run, expected=(*SUMS, METRICS)):
    """It goes on with the command that was shown, or, where nothing was paid, is begun again; and costs once."""
    if not labels(run):
        assert not run.exists()
        return
    if not (run / "release" / "released.npz").exists():  # which is written last
        assert (run / "private" / "resume" / "recommender.npz").exists()
        assert main(["train", "--out", str(run), "--resume", "--quiet"]) == 0
    assert labels(run) == list(expected) and held_out.kept_figures(read(run / "release" / "ledger.jsonl"))[0]
    assert WarmStart.load(run).release.fits == 1
    left = ["confidential", "config.json", "report.md", "results.json"]
    assert sorted(path.name for path in (run / "private").iterdir()) == left


# Each fault at each place that writes.

PLACES = [
    (pipeline.Interactions, "read"), (OwnFiles, "titles"), (Ledger, "pay"), (SpectralRecommender, "release_sums"),
    (SpectralRecommender, "write"), (SpectralRecommender, "load"), (pipeline, "same_for_all"),
    (UserSubset, "exact_counts"), (private_sums, "statement"), (pipeline, "titles_of"), (pipeline, "export"),
    (held_out, "load_released"), (held_out, "values_of"), (report, "write"), (WarmStart, "save"),
]  # fmt: skip


FAULTS = [terminated, full, pytest.param(read_only, marks=pytest.mark.slow)]  # the last two are caught as one


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0].__name__}.{place[1]}")
def test_a_fault_in_any_place_loses_nothing_paid_and_leaves_no_log(small, tmp_path, monkeypatch, capsys, place, fault):
    before, whole = signal.getsignal(signal.SIGTERM), getattr(*place)
    after = place[1] == "pay" and fault is terminated  # once it stands in the ledger
    with monkeypatch.context() as patch:
        patch.setattr(*place, (lambda *a, **o: (whole(*a, **o), fault())[0]) if after else fault)
        assert train(*small) == (143 if fault is terminated else 2)
    assert signal.getsignal(signal.SIGTERM) == before
    run, said = tmp_path / "run", capsys.readouterr().err
    assert no_raw_log(tmp_path / "run") and "Traceback" not in said
    assert (f"Go on with: tfdp-rec train --out {run} --resume" in said) == bool(labels(run))
    late = PLACES.index(place) >= PLACES.index((SpectralRecommender, "load"))
    asks = PLACES.index(place) >= PLACES.index((private_sums, "statement"))
    assert labels(run) == [*(SUMS if late else []), *([METRICS] if asks else [])]
    gone_on_with(run)


def test_what_tensorflow_says_of_a_full_disk_is_one_sentence(small, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "export", own_ids.export)
        patch.setattr(tf.saved_model, "save", of_tensorflow)
        assert train(*small) == 2
    said = capsys.readouterr().err
    assert "servable could not be written; is the disk full, or read-only?" in said and said.count("\n") == 2
    gone_on_with(tmp_path / "run")


@pytest.mark.parametrize(
    "number", [*range(0, 500, 40), *(pytest.param(n, marks=pytest.mark.slow) for n in range(500) if n % 40)]
)
def test_sigterm_at_any_line_of_what_keeps_a_run(small, tmp_path, monkeypatch, capsys, number):
    """At the `number`-th line that is run of run_state.py and pipeline.py, counted from the start."""
    files, left = (run_state.__file__, pipeline.__file__), [number]
    mine = threading.get_ident()

    def line(frame, event, _):
        if event == "line" and left and threading.get_ident() == mine:
            left[0] -= 1
            if left[0] < 0:
                left.clear()
                os.kill(os.getpid(), signal.SIGTERM)
        return line

    def run(asked, *arguments):
        sys.settrace(lambda frame, *_: line if frame.f_code.co_filename in files else None)
        try:
            return whole(asked, *arguments)
        finally:
            sys.settrace(None)

    whole = pipeline.run
    monkeypatch.setattr(pipeline, "run", run)
    code = train(*small)
    monkeypatch.setattr(pipeline, "run", whole)
    assert code == (143 if not left else 0) and no_raw_log(tmp_path / "run")
    if code:
        gone_on_with(tmp_path / "run")


def test_items_that_were_found_are_kept_too(small, tmp_path, monkeypatch, capsys):
    asked = [word for word in small if word not in ("--items", tmp_path / "items.txt")]
    with monkeypatch.context() as patch:
        patch.setattr(SpectralRecommender, "release_sums", terminated)
        assert train(*asked) == 143
    assert labels(tmp_path / "run") == ALL[:1] and no_raw_log(tmp_path / "run")
    items = (tmp_path / "run" / "private" / "resume" / "items.parquet").read_bytes()
    monkeypatch.setattr(pipeline, "private_items", full)  # not found again
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--quiet"]) == 0
    assert labels(tmp_path / "run") == [*ALL, METRICS] and items


def test_what_kills_a_run_in_its_algebra_loses_nothing_paid(small, tmp_path, monkeypatch):
    """docker stop gives ten seconds, which dense algebra on thousands of items does not hear."""
    with monkeypatch.context() as patch:
        patch.setattr(scores, "weights_between_items", no_memory)
        with pytest.raises(MemoryError):
            train(*small, "--order", "yes")  # a vote has algebra of its own, before the sums are drawn
    assert labels(tmp_path / "run") == SUMS
    with monkeypatch.context() as patch:
        patch.setattr(counting, "private_counts", full)  # no user is read again
        assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--quiet"]) == 0
    gone_on_with(tmp_path / "run")


def test_a_signal_is_heard_while_eigenvectors_are_computed(monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(np.linalg, "eigh", lambda noisy: done.wait(60))
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    try:
        with interruption.handle_signals(), pytest.raises(KeyboardInterrupt):
            denoising.denoise(np.zeros((3, 3), np.float32), 1.0)
        assert not done.is_set()
    finally:
        done.set()


# What cannot be, is said before anything is paid.


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_python_drops_is_heard_before_a_payment(tmp_path):
    """It came in a callback of a weak reference: ten seconds later the run had paid, and was killed."""

    class Dies:
        pass

    with Ledger(tmp_path / "ledger.jsonl", "user", Snapshot(100, "user")) as ledger:
        ledger.note(budget.LABEL, dataclasses.asdict(budget.Budget(8.0, 1e-6)))
        payment = run_state.ReleasePayment([ledger], lambda: None)
        with interruption.handle_signals():
            dies = Dies()
            weakref.finalize(dies, os.kill, os.getpid(), signal.SIGTERM)
            del dies  # where Python only says that it ignores a KeyboardInterrupt
            with pytest.raises(KeyboardInterrupt):
                payment.spend(GaussianDpEvent(5.0), "counts")
        assert not ledger.paid and interruption.exit_code() == 143
        payment.spend(GaussianDpEvent(5.0), "counts")
        assert len(ledger.paid) == 1


@pytest.mark.fast_cases("lazydpsgd")
@pytest.mark.parametrize("mechanism", ["upon-sums", "lazydpsgd"])
def test_a_training_that_refuses_its_first_step_has_paid_for_nothing(small, tmp_path, monkeypatch, capsys, mechanism):
    steps = ["--mechanism", mechanism, "--steps", "2", "--batch-size", "40", "--width", "4", "--hidden", "0"]
    assert train(*small, *steps, "--learning-rate", "1e-9") == 2
    said = capsys.readouterr().err
    assert "noise of this step" in said and "--clip" in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_what_is_tried_out_before_a_payment_is_nothing_of_the_log(small, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(training, "_try_step", seen.append)
    monkeypatch.setattr(pipeline, "find_items", terminated)
    steps = ["--mechanism", "upon-sums", "lazydpsgd", "--steps", "2", "--batch-size", "40", "--width", "4"]
    assert train(*small, *steps) == 143
    assert [trial.name for trial in seen] == ["upon-sums", "lazydpsgd"]
    for trial in seen:
        assert len(trial.material.log) == 1 and trial.material.log.catalogue.ids.tolist() == [1, 2, 3, 4, 5]
        assert trial.material.users.train.tolist() == [0] and not len(trial.material.users.test)


def test_an_id_that_stands_for_none_is_refused_before_anything_is_paid(small, tmp_path, capsys):
    table = pa.table({"user_id": [u for u in range(300) for _ in range(3)], "sku": [-(2**63), 1, 2] * 300})
    pa.parquet.write_table(table, tmp_path / "log.parquet")
    asked = ["--data", tmp_path / "log.parquet", "--user", "user_id", "--item", "sku", "--out", tmp_path / "run"]
    assert train(*asked, "--quiet") == 2
    said = capsys.readouterr().err
    assert "log.parquet, row 1: sku is -9223372036854775808" in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_comma_deep_in_the_title_file_is_found_before_anything_is_paid(small, tmp_path, capsys):
    titles = tmp_path / "titles.csv"
    titles.write_text(titles.read_text() + "".join(f"other-{i},Thing {i}\n" for i in range(80_000)) + "sku-3,A, B\n")
    assert titles.stat().st_size > 2**20
    assert train(*small) == 2
    said = capsys.readouterr().err
    assert "titles.csv cannot be read" in said and said.count("\n") == 1
    assert labels(tmp_path / "run") == [] and not (tmp_path / "run").exists()


@pytest.mark.parametrize("public", [True, False])
def test_ids_with_line_breaks_are_left_out_and_counted(small, tmp_path, capsys, public):
    log = tmp_path / "logs" / "ann@example.org.csv"
    log.write_text(log.read_text().replace("sku-2", '"sku\n2"'))
    tf.io.write_file(str(tmp_path / "items.csv"), 'sku\nsku-0\n"sku\n2"\nsku-3\n')
    asked = [word for word in small if word not in ("--items", tmp_path / "items.txt", "--quiet")]
    assert train(*asked, *(["--items", tmp_path / "items.csv"] if public else [])) == 0
    assert "1 items left out: a line break in the id" in capsys.readouterr().out
    left = ["sku-0", "sku-3"] if public else ["sku-0", "sku-1", "sku-3", "sku-4"]
    assert sorted(WarmStart.load(tmp_path / "run").items.ids.to_pylist()) == left


def test_nothing_is_said_of_items_whose_payment_may_still_be_given_back(small, tmp_path, monkeypatch, capsys):
    log = tmp_path / "logs" / "ann@example.org.csv"
    log.write_text(log.read_text().replace("sku-2", '"sku\n2"'))
    monkeypatch.setattr(Items, "write", terminated)
    assert train(*[word for word in small if word not in ("--items", tmp_path / "items.txt", "--quiet")]) == 143
    said = capsys.readouterr().out
    assert "finding items privately" in said and "line break" not in said
    assert not (tmp_path / "run").exists(), "given back"


def test_a_run_folder_that_cannot_be_written_to_is_said_before_the_log_is_read(small, tmp_path, monkeypatch, capsys):
    (tmp_path / "a file").touch()
    monkeypatch.setattr(pipeline.Interactions, "read", full)
    assert train(*small[:-1], tmp_path / "a file" / "run") == 2
    said = capsys.readouterr().err
    assert "--out: nothing can be written to" in said and said.count("\n") == 1


def mounted(path, *options):
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "none", str(path)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no tmpfs can be mounted here")


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a disk")
@pytest.mark.parametrize("options", [["-o", "ro"], ["-o", "size=600k"]], ids=["read-only", "full"])
def test_a_disk_that_takes_nothing_costs_nothing(small, tmp_path, capsys, options):
    disk = tmp_path / "disk"
    mounted(disk, *options)
    try:
        assert train(*small[:-1], disk / "run") == 2
        said = capsys.readouterr().err
        assert ("Read-only file system" if "ro" in options else "free some space") in said and said.count("\n") == 1
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a disk")
def test_the_disk_space_of_a_release_is_its_own_before_it_is_paid_for(small, tmp_path, monkeypatch, capsys):
    """Another fills the disk while the sums are made; they are kept all the same, and the rest is written later."""
    disk, fit = tmp_path / "disk", SpectralRecommender.release_sums
    mounted(disk, "-o", "size=64m")

    def meanwhile(*arguments, **options):
        with open(disk / "others", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"-" * 4096):
                pass
        return fit(*arguments, **options)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(SpectralRecommender, "release_sums", meanwhile)
            patch.setattr(pipeline, "export", lambda filepath, *_: Path(filepath).write_bytes(b"-" * 2**23))
            assert train(*small[:-1], disk / "run") == 2
        said = capsys.readouterr().err
        assert "Go on with" in said
        assert (disk / "run" / "private" / "resume" / "recommender.npz").exists() and labels(disk / "run")[:1] == SUMS
        (disk / "others").unlink()
        gone_on_with(disk / "run")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# What a process that was killed leaves.


def killed(run, monkeypatch, small):
    """A run that SIGKILL ended once its sums were kept."""
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "same_for_all", full)
        patch.setattr(RunState, "end", lambda self, is_done: (self.close(), run_state.end_hold(self.directory)))
        assert train(*small) == 2
    assert (run / "private" / "resume" / "log").exists()


def test_the_next_run_removes_the_log_that_a_killed_one_left(small, tmp_path, monkeypatch, capsys):
    killed(tmp_path / "run", monkeypatch, small)
    other = [*small[:-1], tmp_path / "other"]
    with open(tmp_path / "run" / "private" / "resume" / "in-use", "a") as lock:  # as long as it lives
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert train(*other) == 0
    assert not no_raw_log(tmp_path / "run")
    capsys.readouterr()
    assert train(*small[:-1], tmp_path / "third") == 0
    said = capsys.readouterr().err
    assert f"go on with it: tfdp-rec train --out {tmp_path / 'run'} --resume" in said and no_raw_log(tmp_path / "run")
    gone_on_with(tmp_path / "run")


def test_another_run_is_not_begun_where_one_can_be_gone_on_with(small, tmp_path, monkeypatch, capsys):
    killed(tmp_path / "run", monkeypatch, small)
    capsys.readouterr()
    assert train(*small) == 2
    said = capsys.readouterr().err
    assert f"go on with it, tfdp-rec train --out {tmp_path / 'run'} --resume; or" in said
    assert no_raw_log(tmp_path / "run")
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    gone_on_with(moved)


@pytest.mark.parametrize("left", ["empty", "begun", "cut short", "truncated"])
def test_an_empty_ledger_is_a_fresh_one_only_where_nothing_was_paid(small, tmp_path, monkeypatch, capsys, left):
    ledger = tmp_path / "run" / "release" / "ledger.jsonl"
    ledger.parent.mkdir(parents=True)
    if left == "begun":
        Ledger(ledger, "user", Snapshot(9, "x"), ZERO_OUT).close()
    else:
        ledger.write_bytes(b'{"data":' if left == "cut short" else b"")
    if left == "truncated":
        (ledger.parent / "statement.txt").touch()
    assert train(*small) == (0 if left in ("empty", "begun") else 2)
    begun, paid = left in ("empty", "begun"), [*SUMS, METRICS]
    assert labels(tmp_path / "run") == paid if begun else "Go on" not in capsys.readouterr().err


def test_no_run_is_begun_where_a_recommender_that_was_only_compared_has_paid(small, tmp_path, capsys):
    peer = tmp_path / "run" / "private" / "ledgers" / "dpsgd.jsonl"
    peer.parent.mkdir(parents=True)
    with Ledger(peer, "user", Snapshot(9, "x"), ZERO_OUT) as ledger:
        ledger.pay(GaussianDpEvent(9.0))
    before = peer.read_bytes()
    assert train(*small) == 2
    assert "cut off after it had paid" in capsys.readouterr().err and peer.read_bytes() == before
    peer.unlink()
    Ledger(peer, "user", Snapshot(9, "x"), ZERO_OUT).close()
    assert train(*small) == 0 and not peer.exists()


@pytest.mark.parametrize("place", [(report, "write"), (WarmStart, "save")], ids=["not reported", "not released"])
def test_a_run_that_was_cut_off_near_its_end_says_how_to_go_on_if_it_is_begun_again(
    small, tmp_path, monkeypatch, capsys, place
):
    with monkeypatch.context() as patch:
        patch.setattr(*place, terminated)
        assert train(*small) == 143
    capsys.readouterr()
    assert train(*small) == 2
    assert f"go on with it, tfdp-rec train --out {tmp_path / 'run'} --resume; or" in capsys.readouterr().err
    gone_on_with(tmp_path / "run")


@pytest.mark.parametrize("left", [["items.parquet", "recommender.npz"], ["recommender.npz"]], ids=["all", "sums"])
def test_releases_of_another_run_are_not_taken_for_paid(small, tmp_path, capsys, left):
    assert train(*small, "--checkpoint", tmp_path / "kept") == 0
    for path in (tmp_path / "kept").iterdir():  # run.json among them
        if path.is_file() and path.name not in left:
            path.unlink()
    capsys.readouterr()
    other = [tmp_path / "other" if each == tmp_path / "run" else each for each in small]
    assert train(*other, "--checkpoint", tmp_path / "kept") == 2
    said = capsys.readouterr().err
    assert "recommender.npz is of another run" in said and "has not paid for it" in said
    assert not labels(tmp_path / "other") and not (tmp_path / "other" / "release" / "statement.txt").exists()


# What may be handed on.


@pytest.mark.slow
def test_the_released_part_names_no_file_of_the_log_and_the_private_part_is_its_owners(tmp_path, log, run, capsys):
    names = [*of_this_machine(run.parent, log), "0.parquet", "1.parquet", "titles.csv", "person-"]
    released = [path for path in (run / "release").rglob("*") if path.is_file()]
    for path in released:
        assert not [name for name in names for content in bytes_in(path) if name.encode() in content], path
    private = [run / "private", *(run / "private").rglob("*")]
    assert {path.stat().st_mode & 0o77 for path in private} == {0}
    said = (run / "release" / "card.md").read_text()
    assert (run / "release" / "statement.txt").read_text() in said and "recall@10" in said
    assert str(log) in (run / "private" / "config.json").read_text()
    (run / "release").rename(tmp_path / "copy")
    try:
        assert main(["recommend", str(tmp_path / "copy"), "--history", "sku-31", "--among", "sku-5", "--json"]) == 0
    finally:
        (tmp_path / "copy").rename(run / "release")
    assert [each["id"] for each in json.loads(capsys.readouterr().out)["recommendations"]] == ["sku-5"]


@pytest.mark.parametrize("kept", ["run/release", "run/release/kept", "other/release/kept"])
def test_nothing_private_is_kept_in_what_is_handed_on(small, tmp_path, capsys, kept):
    (tmp_path / "other" / "release").mkdir(parents=True)
    (tmp_path / "other" / "release" / "statement.txt").touch()
    assert train(*small, "--checkpoint", tmp_path / kept) == 2
    said = capsys.readouterr().err
    assert "is handed on" in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists() and len(list((tmp_path / "other" / "release").iterdir())) == 1
    assert train(*small[:-1], tmp_path / "other" / "release" / "run") == 2


# Signals.


@pytest.fixture
def heard():
    """SIGHUP as at a terminal, also where the tests run under nohup, which has it ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_signal_is_kept_waiting_until_what_must_be_whole_is_done(heard):
    done = []
    with interruption.handle_signals(), pytest.raises(KeyboardInterrupt):
        with interruption.defer_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            done.append("whole")
        done.append("never")
    assert done == ["whole"] and interruption.exit_code() == 129


def test_who_was_told_to_stop_is_not_told_again_while_it_cleans_up():
    cleaned = []
    with interruption.handle_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(interruption.exit_code())
    assert cleaned == [143]


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruption.handle_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
