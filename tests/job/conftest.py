"""A log of twenty tastes, and one run on it, for all tests of this folder; what cuts a run off, and asks one."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from tfdp_rec.cli import main
from tfdp_rec.job.recommenders import training
from tfdp_rec.privacy import Accountant

COLUMNS = ["--user", "user_id", "--item", "sku", "--time", "ts"]


def table(users=3000, rows=45_000, seed=0):
    rng = np.random.default_rng(seed)
    user = rng.integers(0, users, rows)
    item = (user % 20) * 10 + (10 * rng.random(rows) ** 2).astype(int)
    named = {"user_id": [f"person-{u}" for u in user], "sku": [f"sku-{i}" for i in item]}
    return pa.table({**named, "ts": rng.integers(1_700_000_000, 1_730_000_000, rows)})


def train(*arguments):
    return main(["train", *map(str, arguments)])


def answer(capsys, run, *arguments):
    capsys.readouterr()
    assert main(["recommend", str(run), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def results_of(run):
    """Records by recommender: with exact figures of a run with --confidential, else what they cost."""
    exact = run / "private" / "confidential" / "results.json"
    found = exact if exact.exists() else run / "private" / "results.json"
    return {each["recommender"]: each for each in json.loads(found.read_text())}


def cut_at(patch, step, dead=False):
    """Ctrl-C after so many steps of a training; or a kill, after which nothing more is written."""
    checkpoint, give_back, ended = training.TrainingCheckpoint, Accountant.give_back_rest, []
    whole, written = checkpoint.on_train_batch_end, checkpoint.save

    def end(self, batch, logs=None):
        whole(self, batch, logs)
        if int(getattr(self.model.optimizer, "position", self.model.optimizer.iterations)) == step:
            ended.append(dead)
            raise KeyboardInterrupt

    patch.setattr(checkpoint, "on_train_batch_end", end)
    patch.setattr(checkpoint, "save", lambda self: None if any(ended) else written(self))
    patch.setattr(Accountant, "give_back_rest", lambda self: None if any(ended) else give_back(self))


@pytest.fixture(scope="package")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    whole = table()
    for number, start in enumerate((0, 20_000)):
        pa.parquet.write_table(whole.slice(start, 25_000 if start else 20_000), folder / f"{number}.parquet")
    titled = "".join(f"sku-{i},Thing {i}\n" for i in range(150))
    (folder.parent / "titles.csv").write_text(f"sku,title\n{titled}")
    return folder


@pytest.fixture(scope="package")
def run(log, tmp_path_factory):
    """The run folder; what was kept is beside it."""
    root = tmp_path_factory.mktemp("run")
    files = sorted(log.glob("*.parquet"))
    options = ["--titles", log.parent / "titles.csv", "--out", root / "run", "--checkpoint", root / "kept"]
    assert train("--data", *files, *COLUMNS, *options, "--confidential", "--quiet") == 0
    return root / "run"
