"""A further day of a trained recommender, in processes of its own and beside other runs."""

import shutil
import subprocess
import sys

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from dp_accounting import GaussianDpEvent
from job.conftest import train
from trainings import accountant_of, bare_model, model_of
from trainings import train as train_model

from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.core.claim.entries import Entry
from tfdp_rec.job.recommenders.training import refuse_unpaid

SMALL = ["--steps", "3", "--batch-size", "80", "--width", "4", "--hidden", "0"]
NAMES = [f"thing-{n:02}-{'abcdefghij'[n % 10] * 9}" for n in range(20)]


def day(path, seed):
    rng = np.random.default_rng(seed)
    rows = {"u": rng.integers(0, 900, 6000), "i": [NAMES[n] for n in rng.integers(0, 20, 6000)], "t": np.arange(6000)}
    pa.parquet.write_table(pa.table(rows), path)
    return path


@pytest.fixture(scope="module", params=["lazydpsgd", "upon-sums"])
def first_day(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    (root / "items.csv").write_text("i,title\n" + "".join(f"{name},Title of {name}\n" for name in NAMES))
    own = ["--user", "u", "--item", "i", "--time", "t", "--items", root / "items.csv", "--titles", root / "items.csv"]
    made = ["--mechanism", request.param, *SMALL]
    given = [*own, *made, "--days", "3", "--out", root / "run", "--quiet"]
    assert train("--data", day(root / "0.parquet", 0), *given) == 0
    return root


@pytest.fixture
def root(first_day, tmp_path):
    return shutil.copytree(first_day, tmp_path / "here")


@pytest.mark.slow
def test_a_further_day_finds_the_class_of_its_model_in_a_process_of_its_own(root):
    run = root / "run"
    arguments = ["train", "--continue", str(run), "--data", str(day(root / "1.parquet", 1)), "--quiet"]
    code = f"import sys; from tfdp_rec.cli import main; sys.exit(main({arguments!r}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.slow
def test_another_runs_model_is_not_gone_on_with(root, capsys):
    run, path = root / "run", root / "run" / "release" / "model.keras"
    ledger = (run / "release" / "ledger.jsonl").read_bytes()
    model = keras.models.load_model(path)
    bare = type(model).from_config(model.get_config())
    bare.compile("sgd")
    model.privacy_history.add_entry(Entry(GaussianDpEvent(9.0), 1, label="counts of another run"))
    for other in (model, bare):
        path.unlink()
        other.save(path)
        capsys.readouterr()
        assert train("--continue", run, "--data", day(root / "1.parquet", 1), "--quiet") == 2
        assert "is not the model that this run released" in capsys.readouterr().err
    assert (run / "release" / "ledger.jsonl").read_bytes() == ledger


def test_a_model_is_taken_for_the_runs_own_if_its_ledger_has_paid_for_it(tmp_path):
    accountant, paid, unpaid = accountant_of(ledger=tmp_path / "ledger.jsonl"), model_of(), model_of()
    train_model(paid, 2, PrivacyBudget(accountant, 30.0))
    train_model(unpaid, 2)
    refuse_unpaid(paid, accountant.spending.payments.ledger, tmp_path / "model.keras")
    for model in (unpaid, bare_model()):
        with pytest.raises(ValueError, match="is not the model that this run released"):
            refuse_unpaid(model, accountant.spending.payments.ledger, tmp_path / "model.keras")
    accountant.close()
