"""Forgetting: an item that leaves is in no file of the run any more, and all else goes on."""

import contextlib
import json
import shutil
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from dp_accounting import GaussianDpEvent
from job.conftest import train

from tfdp_rec.cli import main
from tfdp_rec.job import forgetting, pipeline
from tfdp_rec.job.warm_start import WarmStart
from tfdp_rec.spectral import Release, SpectralRecommender
from tfdp_rec.spending.entries import DRAWN, Entry
from tfdp_rec.spending.ledger import read

SMALL = ["--steps", "3", "--batch-size", "80", "--width", "4", "--hidden", "0"]
NAMES = [f"thing-{n:02}-{'abcdefghij'[n % 10] * 9}" for n in range(20)]


def day(path, seed):
    rng = np.random.default_rng(seed)
    rows = {"u": rng.integers(0, 900, 6000), "i": [NAMES[n] for n in rng.integers(0, 20, 6000)], "t": np.arange(6000)}
    pa.parquet.write_table(pa.table(rows), path)
    return path


@pytest.fixture(scope="module", params=["spectral", "lazydpsgd", "upon-sums"])
def first_day(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    (root / "items.csv").write_text("i,title\n" + "".join(f"{name},Title of {name}\n" for name in NAMES))
    own = ["--user", "u", "--item", "i", "--time", "t", "--items", root / "items.csv", "--titles", root / "items.csv"]
    made = [] if request.param == "spectral" else ["--mechanism", request.param, *SMALL]
    given = [*own, *made, "--days", "3", "--out", root / "run", "--quiet"]
    assert train("--data", day(root / "0.parquet", 0), *given) == 0
    return root


@pytest.fixture
def root(first_day, tmp_path):
    return shutil.copytree(first_day, tmp_path / "here")


def files_with(folder, name):
    """Files that hold the id, also within compressed ones."""
    found = []
    for path in filter(lambda path: path.is_file(), folder.rglob("*")):
        content = path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                content += b"".join(parts.read(part) for part in parts.namelist())
        if path.name == "released.npz":  # whose ids and titles are in a table of another format
            held = WarmStart.read(path)
            content += "\n".join([*held.items.ids.to_pylist(), *held.titles.values()]).encode()
        if name.encode() in content:
            found.append(path.relative_to(folder).as_posix())
    return found


def answered(run, capsys, k):
    capsys.readouterr()
    assert main(["recommend", str(run), "--json", "--history", NAMES[3], "--top-k", str(k)]) == 0
    return {each["id"] for each in json.loads(capsys.readouterr().out)["recommendations"]}


def test_an_item_that_leaves_is_in_no_file_and_a_further_day_goes_on(root, capsys):
    run, first = root / "run", WarmStart.load(root / "run").items.ids.to_pylist()
    spent = read(run / "release" / "ledger.jsonl").epsilon(1e-6)
    for name in (NAMES[7], NAMES[12]):
        assert {"release/servable/assets/items.txt", "release/released.npz"} <= set(files_with(run, name))
    before = answered(run, capsys, 19)
    capsys.readouterr()
    assert main(["forget", str(run), NAMES[7], NAMES[12]]) == 0
    said = capsys.readouterr()
    assert "2 items are forgotten; 18 items stay" in said.out and "lists one of them still" in said.err
    for name in (NAMES[7], NAMES[12]):
        assert files_with(run, name) == [], "and the grouped log is not kept"
    assert not (run / "private" / "resume").exists()
    stay = [name for name in first if name not in (NAMES[7], NAMES[12])]
    assert WarmStart.load(run).items.ids.to_pylist() == stay
    assert f"Title of {NAMES[3]}" in WarmStart.load(run).titles.values()
    after = answered(run, capsys, 17)
    assert after == set(stay) - {NAMES[3]} and after < before
    for page in (run / "private" / "report.md", run / "release" / "card.md"):
        assert "18 items, from a public list" in page.read_text()
    assert read(run / "release" / "ledger.jsonl").epsilon(1e-6) == spent
    # The next day knows the others, in their places, and takes the two in again, since the list has them.
    assert train("--continue", run, "--data", day(root / "1.parquet", 1), "--quiet") == 0
    assert WarmStart.load(run).items.ids.to_pylist() == [*stay, NAMES[7], NAMES[12]]


def test_rows_and_sums_of_the_others_are_as_they_were(root):
    run, trained = root / "run", (root / "run" / "release" / "model.keras").exists()
    numbers = np.array([n for n in range(1, 21) if n not in (8, 13)])
    assert WarmStart.load(run).items.of([8, 13]) == [NAMES[7], NAMES[12]]
    old_sums = WarmStart.load(run).release  # of trainings from popularity there are none
    if trained:
        old = keras.models.load_model(run / "release" / "model.keras")
        held = [table.embeddings.numpy() for table in old.item_tables()]
        steps = old.privacy_history.snapshot().steps
    assert main(["forget", str(run), NAMES[7], NAMES[12]]) == 0
    if trained:
        new = keras.models.load_model(run / "release" / "model.keras")
        for table, rows in zip(new.item_tables(), held, strict=True):
            assert np.array_equal(table.embeddings.numpy(), rows[[0, *numbers]])
        assert new.privacy_history.snapshot().steps == steps == 3
        told = np.array([[1, 10, 5]]), np.array([[1, 9, 5]])  # the same items, by their numbers then and now
        scores = np.asarray(old(told[0]))[:, numbers - 1], np.asarray(new(told[1]))
        np.testing.assert_allclose(*(each - each[:, :1] for each in scores), atol=1e-4)
    if old_sums is not None:
        sums = WarmStart.load(run).release
        np.testing.assert_array_equal(sums.counts, old_sums.counts[numbers - 1])
        places = {item: row for row, item in enumerate(old_sums.head)}
        rows = [places[numbers[item] - 1] for item in sums.head]
        np.testing.assert_array_equal(sums.pairs, old_sums.pairs[np.ix_(rows, rows)])


def cut(monkeypatch, name, call):
    """Ends the process at a call of a function of the module; returns what undoes it."""
    whole, calls = getattr(forgetting, name), iter(range(1000))

    def cut_off(*given, **options):
        if next(calls) == call:
            raise KeyboardInterrupt
        return whole(*given, **options)

    monkeypatch.setattr(forgetting, name, cut_off)
    return lambda: monkeypatch.setattr(forgetting, name, whole)


def cut_within(monkeypatch, call):
    """Ends the process when a new file is written, and is not in its place yet; returns what undoes it."""
    whole, calls = forgetting.replacing, iter(range(1000))

    @contextlib.contextmanager
    def cut_off(path):
        ends = next(calls) == call
        with whole(path) as temporary:
            yield temporary
            if ends:
                raise KeyboardInterrupt

    monkeypatch.setattr(forgetting, "replacing", cut_off)
    return lambda: monkeypatch.setattr(forgetting, "replacing", whole)


@pytest.mark.parametrize("name, call", [("export", 0), ("sync_entry", 0)])
def test_one_that_is_cut_off_before_all_is_ready_has_changed_nothing(root, monkeypatch, name, call):
    run = root / "run"
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "ledger.jsonl"}
    undo = cut(monkeypatch, name, call)
    assert main(["forget", str(run), NAMES[7]]) == 130
    undo()
    assert {path: path.read_bytes() for path in kept} == kept
    if name != "sync_entry":
        assert main(["forget", str(run), NAMES[12]]) == 0  # of another item, which is no trouble
        assert len(WarmStart.load(run).items) == 19 and files_with(run, NAMES[12]) == []
        assert NAMES[7] in WarmStart.load(run).items.ids.to_pylist()


@pytest.mark.parametrize("call", [2, 3, 4])
def test_one_that_is_cut_off_while_files_are_put_in_place_is_ended_first(root, monkeypatch, capsys, call):
    """Call 0 is the servable's while it is made; then each file of both parts."""
    run, spent = root / "run", read(root / "run" / "release" / "ledger.jsonl").epsilon(1e-6)
    undo = cut_within(monkeypatch, call)
    assert main(["forget", str(run), NAMES[7]]) == 130
    undo()
    assert train("--continue", run, "--data", day(root / "1.parquet", 1), "--quiet") == 2
    assert "End it by tfdp-rec forget" in capsys.readouterr().err
    assert read(run / "release" / "ledger.jsonl").epsilon(1e-6) == spent and not (run / "private" / "resume").exists()
    (run / "release" / ".0123456789ab.servable.old").mkdir()  # as a killed process leaves them
    (run / "release" / ".0123456789ab.servable.old" / "items.txt").write_text(NAMES[7])
    others = [NAMES[12]] if call == 4 else []
    assert main(["forget", str(run), *others]) == 0
    assert len(WarmStart.load(run).items) == 19 - len(others)
    assert files_with(run, NAMES[7]) == [] and not (run / "private" / "forgetting").exists()
    served = answered(run, capsys, 15)
    assert NAMES[7] not in served and len(served) == 15
    assert train("--continue", run, "--data", day(root / "1.parquet", 1), "--quiet") == 0


@pytest.mark.parametrize("finished", [False, True])
def test_a_checkpoint_elsewhere_does_not_bring_an_item_back(root, monkeypatch, capsys, finished):
    run, kept = root / "run", root / "kept"
    day(root / "1.parquet", 1)
    options = ["--continue", run, "--data", root / "1.parquet", "--checkpoint", kept, "--quiet"]
    if finished:
        assert train(*options) == 0
    else:
        def cut_off(*given):
            raise KeyboardInterrupt

        whole = pipeline._popularity
        monkeypatch.setattr(pipeline, "_popularity", cut_off)
        assert train(*options) == 130
        monkeypatch.setattr(pipeline, "_popularity", whole)
    assert main(["forget", str(run), NAMES[7]]) == 0
    capsys.readouterr()
    assert train("--checkpoint", kept, "--resume", "--quiet") == 2
    assert "has gone on since this was begun" in capsys.readouterr().err
    assert files_with(run, NAMES[7]) == [] and len(WarmStart.load(run).items) == 19


def test_the_first_days_checkpoint_does_not_bring_an_item_back(tmp_path, capsys):
    (tmp_path / "items.csv").write_text("i\n" + "\n".join(NAMES))
    own = ["--user", "u", "--item", "i", "--time", "t", "--items", tmp_path / "items.csv", "--out", tmp_path / "run"]
    kept = ["--checkpoint", tmp_path / "kept", "--quiet"]
    assert train("--data", day(tmp_path / "0.parquet", 0), *own, *kept) == 0
    assert main(["forget", str(tmp_path / "run"), NAMES[7]]) == 0
    capsys.readouterr()
    assert train(*kept, "--resume") == 2
    assert "has gone on since this was begun" in capsys.readouterr().err
    assert files_with(tmp_path / "run", NAMES[7]) == []


def test_a_model_of_a_day_that_was_lost_is_not_taken_for_the_runs(root, monkeypatch, capsys):
    run = root / "run"
    if not (run / "release" / "model.keras").exists():
        pytest.skip("sums are in one file with their items")
    (root / "items.csv").write_text((root / "items.csv").read_text() + "one-more,a title\n")
    day(root / "1.parquet", 1)

    def cut_off(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "_conclude", cut_off)  # the model is written, released.npz is not
    longer = ["--items", root / "items.csv"]
    assert train("--continue", run, "--data", root / "1.parquet", *longer, "--quiet") == 130
    shutil.rmtree(run / "private" / "resume")
    model = (run / "release" / "model.keras").read_bytes()
    for _ in range(2):
        assert main(["forget", str(run), NAMES[7]]) == 2
    assert "has 21 items and released.npz 20" in capsys.readouterr().err
    assert (run / "release" / "model.keras").read_bytes() == model


@pytest.mark.parametrize(
    "asked, says",
    [(["nothing-like-it"], "does not know 'nothing-like-it'"), ([], "Say which items leave"),
     (NAMES, "remove its folder instead"), (["--items", "nowhere.txt"], "nowhere.txt")],
)  # fmt: skip
def test_what_cannot_be_forgotten_is_refused_and_changes_nothing(root, capsys, asked, says):
    kept = {path: path.read_bytes() for path in (root / "run").rglob("*") if path.is_file()}
    assert main(["forget", str(root / "run"), *asked]) == 2
    assert says in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (root / "run").rglob("*") if path.is_file()} == kept
    assert main(["forget", str(root / "elsewhere"), NAMES[0]]) == 2


def test_a_day_in_progress_is_ended_first(root, capsys):
    resume = root / "run" / "private" / "resume"
    resume.mkdir()
    (resume / "run.json").write_text(json.dumps({}))
    assert main(["forget", str(root / "run"), NAMES[0]]) == 2
    assert "--resume" in capsys.readouterr().err and resume.exists()


def test_a_release_without_items_is_that_of_the_others():
    rng = np.random.default_rng(0)
    pairs = rng.normal(size=[4, 4]).astype("f4")
    one = Release(9.0, np.arange(6.0), np.ones(6), np.array([5, 1, 0, 3]), pairs, np.arange(4.0) + 1, 1)
    less = one.without(np.array([1, 4]))
    assert less.counts.tolist() == [0, 2, 3, 5] and less.head.tolist() == [3, 0, 2]
    assert np.array_equal(less.pairs, pairs[np.ix_([0, 2, 3], [0, 2, 3])]) and less.pairs_noise.tolist() == [1, 3, 4]
    assert less.users == 9.0 and len(one.counts) == 6


def test_sums_that_forget_score_the_others_by_their_own_sums():
    rng = np.random.default_rng(0)
    features = [["a"], ["a", "b"], ["b"], [], ["b"], ["a"]]
    histories = [np.unique(10 * rng.integers(0, 6, 3)) for _ in range(4000)]
    whole = SpectralRecommender(np.arange(6) * 10, epsilon=30.0, delta=1e-5, features=features)
    whole.fit(histories, verbose=0)
    smaller = whole.forget([20, 50])
    assert smaller.item_ids.tolist() == [0, 10, 30, 40] and len(whole.item_ids) == 6
    assert smaller.scores([[10]]).shape == (1, 4) and np.isfinite(smaller.scores([[10], []])).all()
    assert smaller.epsilon == whole.epsilon
    for wrong in ([7], [20, 7]):
        with pytest.raises(ValueError, match="Not in the catalogue"):
            whole.forget(wrong)


def test_a_further_day_finds_the_class_of_its_model_in_a_process_of_its_own(root):
    run = root / "run"
    if not (run / "release" / "model.keras").exists():
        pytest.skip("private sums are no model")
    arguments = ["train", "--continue", str(run), "--data", str(day(root / "1.parquet", 1)), "--quiet"]
    code = f"import sys; from tfdp_rec.cli import main; sys.exit(main({arguments!r}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_another_runs_model_is_not_gone_on_with_and_no_item_leaves_it(root, capsys):
    run, path = root / "run", root / "run" / "release" / "model.keras"
    if not path.exists():
        pytest.skip("private sums are no model")
    ledger = (run / "release" / "ledger.jsonl").read_bytes()
    model = keras.models.load_model(path)
    bare = type(model).from_config(model.get_config())
    bare.compile("sgd")
    model.privacy_history.add_entry(Entry(GaussianDpEvent(9.0), 1, DRAWN, label="counts of another run"))
    for other in (model, bare):
        path.unlink()
        other.save(path)
        for command in (
            ["train", "--continue", str(run), "--data", str(day(root / "1.parquet", 1)), "--quiet"],
            ["forget", str(run), NAMES[3]],
        ):
            capsys.readouterr()
            assert main(command) == 2
            assert "is not the model that this run released" in capsys.readouterr().err
    assert (run / "release" / "ledger.jsonl").read_bytes() == ledger
