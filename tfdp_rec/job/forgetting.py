"""Removes items from what a run has released: no file of the run folder has their ids, titles, rows or sums any more.

    a note in the ledger  ->  all files that change, made anew in private/forgetting/  ->  "ready"  ->  put in place

The note tells a `--checkpoint` elsewhere, which has the items still, that the run has gone on without it. Until "ready"
is there nothing of the run has changed; from then on no day begins until all files are in place, which the next
`tfdp-rec forget` sees to. It reads no log, costs nothing, and gives nothing back.

Not removed: copies of the folder, a `--checkpoint` elsewhere, and public files of one's own that list the item. A
further day takes an item in again if its public list or its log has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from tfdp_rec.datasets.logs.items import Items, as_kind
from tfdp_rec.files import hold, let_go, remove, replacing, sync_entry
from tfdp_rec.job import report
from tfdp_rec.job.checkpoint import FORGOTTEN, RUN, how, resume_folder
from tfdp_rec.job.recommenders.names import is_trained, named, upon_sums
from tfdp_rec.job.run_folder import (
    CONFIG,
    FORGETTING,
    LEDGER,
    MODEL,
    PRIVATE,
    READY,
    RELEASE,
    RELEASED,
    SERVABLE,
    STATEMENT,
    RunFolder,
    find,
)
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.sources import OwnFiles, source_of
from tfdp_rec.job.warm_start import WarmStart
from tfdp_rec.serving.own_ids import export
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.spending.ledger import Ledger, Snapshot, read

_METRICS = "metrics.jsonl"
_OLD = ("titles.json", "servable.txt")  # of older versions, with ids and titles; nothing reads them


def forget(folder: Path, ids: Sequence[str]) -> Items:
    """Removes items, by their ids as text, from a run; returns those that stay. Ends an earlier removal first."""
    if not find(folder, CONFIG).is_file():
        raise FileNotFoundError(f"There is no run in {folder}.")
    run = RunFolder(folder)
    with _alone(run) as ledger:
        _end(run)
        if ids:
            _stage(run, ids, ledger)
            _end(run)
        return WarmStart.load(run.path).items


@contextlib.contextmanager
def _alone(run: RunFolder) -> Iterator[Ledger]:
    """A block in which no day of the run begins, and its open ledger."""
    resume, path = resume_folder(run.path), find(run.path, LEDGER)
    hold(resume)
    try:
        if (resume / RUN).exists():
            raise ValueError(
                f"A day of {run.path} was cut off, or is in progress: end it first, {how(None, run.path)}."
            )
        last = read(path).last_paid
        assert last is not None, "nothing leaves a run that has paid for nothing"
        with Ledger(path, last.unit, Snapshot(1, "none"), last.adjacency, data_changed=True) as ledger:
            yield ledger
    finally:
        let_go(resume)
        if not (resume / RUN).exists():
            remove(resume)


def _staged(run: RunFolder) -> Path:
    """The run folder of the new files; of the run's own name, which is part of the report."""
    return run.private / FORGETTING / run.path.resolve().name


def _end(run: RunFolder) -> None:
    """Puts new files in place that are all there, removes those that are not, and what killed processes left."""
    staging = run.private / FORGETTING
    if (staging / READY).exists():
        for part in (RELEASE, PRIVATE):
            for new in sorted((_staged(run) / part).iterdir()):
                with replacing(run.path / part / new.name) as temporary:  # a copy: this may have to be done again
                    (shutil.copytree if new.is_dir() else shutil.copy)(new, temporary)
        for name in _OLD:
            remove(run.release / name)
    for folder in (run.release.path, run.private.path):
        for left in folder.glob(".*"):
            if not left.name.endswith(".lock"):
                remove(left)
    remove(staging)


def _stage(run: RunFolder, ids: Sequence[str], ledger: Ledger) -> None:
    before = WarmStart.load(run.path)
    config = json.loads((run.private / CONFIG).read_text(encoding="utf-8"))
    wanted = as_kind(before.items.ids.type, Items(list(dict.fromkeys(ids))).ids)
    unknown = pc.invert(pc.is_in(wanted, value_set=before.items.ids))
    if pc.any(unknown).as_py():
        raise ValueError(f"The run does not know {', '.join(dict.fromkeys(ids))[:200]!r}, or not all of these.")
    leaving = pc.is_in(before.items.ids, value_set=wanted)
    if pc.all(leaving).as_py():
        raise ValueError("These are all items of the run: remove its folder instead.")
    numbers, items = np.flatnonzero(leaving) + 1, Items(before.items.ids.filter(pc.invert(leaving)))
    whole = _released(run, config["released"], before.items, ledger)
    sums = SpectralRecommender.load(find(run.path, RELEASED)) if config["released"] == upon_sums.name else whole
    ledger.note(FORGOTTEN, {"items": len(numbers)})
    new = RunFolder(_staged(run))
    model, scores = _without(whole, numbers, new)
    with replacing(new.release / SERVABLE) as temporary:
        export(temporary, model, items, before.titles, min(config["top_k"], len(items)))
    config["num_items"] = len(items)
    _write_report(run, new, config, items, before.titles, scores)
    new.private.write_json(CONFIG, config)
    kept = model if sums is whole else _sums_without(sums, numbers)
    WarmStart(items, ledger.mark, None, before.titles).save(new.path, kept)
    remove(new.private / _METRICS)
    (run.private / FORGETTING / READY).touch(mode=0o600)
    sync_entry(os.fspath(run.private / FORGETTING))


def _released(run: RunFolder, name: str, items: Items, ledger: Ledger) -> Any:
    """The released recommender."""
    if not is_trained(name):
        return SpectralRecommender.load(find(run.path, RELEASED))
    import keras

    from tfdp_rec.job.recommenders.training import refuse_unpaid
    from tfdp_rec.models import SASRec, TwoTower  # noqa: F401  # registers the classes that the file may hold

    model = keras.models.load_model(run.release / MODEL)
    if len(model.vocabulary) != len(items):
        raise ValueError(
            f"{MODEL} has {len(model.vocabulary)} items and {RELEASED} {len(items)}: a day of {run.path} was cut off "
            "and its state removed. Add a day to it first, with --continue."
        )
    if named(name).claims_epsilon:
        refuse_unpaid(model, ledger, run.release / MODEL)
    return model


def _without(whole: Any, numbers: np.ndarray, new: RunFolder) -> tuple[Any, np.ndarray]:
    """The recommender without items, by their numbers, and its scores for an empty history."""
    if isinstance(whole, SpectralRecommender):
        sums = _sums_without(whole, numbers)
        return sums, sums.scores([[]])[0]
    model = whole.forget(whole.item_ids[numbers - 1], numbered=True)
    model.save(str(new.release / MODEL))
    return model, np.asarray(model(np.zeros([1, model.history_length], np.int32)))[0]


def _sums_without(whole: SpectralRecommender, numbers: np.ndarray) -> SpectralRecommender:
    sums = whole.forget(whole.item_ids[numbers - 1])
    sums.catalogue = type(sums.catalogue)(np.arange(1, 1 + len(sums.item_ids)))
    return sums


def _write_report(
    run: RunFolder, new: RunFolder, config: dict[str, Any], items: Items, titles: Any, scores: np.ndarray
) -> None:
    results = json.loads((run.private / "results.json").read_text(encoding="utf-8"))
    said = (run.release / STATEMENT).read_text(encoding="utf-8")
    first = items.of(np.argsort(-scores, kind="stable")[:5] + 1)
    answers = [(item, titles.get(item, "")) for item in first]
    source = source_of(JobSettings.from_config(config))
    if (run.private / _METRICS).exists():
        shutil.copy(run.private / _METRICS, new.private / _METRICS)
    # What the recommenders that were only compared have cost is in their ledgers.
    report.write(report.RunReport(new, source, config, results, {}, said, answers))


def still_listed(folder: Path, ids: Sequence[str]) -> str:
    """The public list of a run's items, if it names one of the ids still; else empty."""
    settings = JobSettings.from_config(json.loads(find(folder, CONFIG).read_text(encoding="utf-8")))
    if not ids or not Path(settings.items).is_file():
        return ""
    listed, wanted = OwnFiles(settings).listed_items(), Items(list(dict.fromkeys(ids))).ids
    names_one = listed is not None and pc.any(pc.is_in(as_kind(wanted.type, listed.ids), value_set=wanted)).as_py()
    return settings.items if names_one else ""
