"""Removes items from what a run has released: no file of the run folder has their ids, titles, rows or sums any more.

    model.keras (of a two-tower), servable/, card.md, report.html and report.md  →  released.npz, last of all

It reads no log and costs nothing; it gives nothing back either. If it is cut off, the same command ends it: until
`released.npz` is written the items are known, and what was written already is written again.

Not removed: copies of the folder, and public files of one's own that list the item. A further day takes an item in
again if its public list or its log has it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from tfdp_rec.datasets.logs.items import Items, as_kind
from tfdp_rec.files import hold, let_go, remove, replacing
from tfdp_rec.job import report
from tfdp_rec.job.checkpoint import RUN, how, resume_folder
from tfdp_rec.job.recommenders.names import is_two_tower
from tfdp_rec.job.run_folder import CONFIG, RELEASED, SERVABLE, STATEMENT, RunFolder, find
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.sources import OwnFiles, source_of
from tfdp_rec.job.warm_start import WarmStart
from tfdp_rec.serving.own_ids import export
from tfdp_rec.spectral import SpectralRecommender


def forget(folder: Path, ids: Sequence[str]) -> Items:
    """Removes items, by their ids as text, from a run folder; returns those that stay."""
    if not find(folder, CONFIG).is_file():
        raise FileNotFoundError(f"There is no run in {folder}.")
    run, resume = RunFolder(folder), resume_folder(folder)
    if (resume / RUN).exists():
        raise ValueError(f"A day of {folder} was cut off, or is in progress: end it first, {how(None, folder)}.")
    hold(resume)
    try:
        return _forgotten(run, ids)
    finally:
        let_go(resume)
        remove(resume)


def _forgotten(run: RunFolder, ids: Sequence[str]) -> Items:
    before = WarmStart.load(run.path)
    config = json.loads((run.private / CONFIG).read_text(encoding="utf-8"))
    wanted = as_kind(before.items.ids.type, Items(list(dict.fromkeys(ids))).ids)
    unknown = pc.invert(pc.is_in(wanted, value_set=before.items.ids))
    if pc.any(unknown).as_py():
        raise ValueError(f"The run does not know {', '.join(dict.fromkeys(ids))[:200]!r}, or not all of these.")
    leaving = pc.is_in(before.items.ids, value_set=wanted)
    if pc.all(leaving).as_py():
        raise ValueError("These are all items of the run: remove its folder instead.")
    items = Items(before.items.ids.filter(pc.invert(leaving)))
    model, scores = _model_without(run, config["released"], np.flatnonzero(leaving) + 1, len(items))
    with replacing(run.release / SERVABLE) as temporary:
        export(temporary, model, items, before.titles, min(config["top_k"], len(items)))
    config["num_items"] = len(items)
    _write_report(run, config, items, before.titles, scores)
    run.private.write_json(CONFIG, config)
    WarmStart(items, before.mark, None, before.titles).save(run.path, model)
    return items


def _model_without(run: RunFolder, released: str, numbers: np.ndarray, stay: int) -> tuple[Any, np.ndarray]:
    """The recommender without items, by their numbers, and its scores for an empty history."""
    if not is_two_tower(released):
        sums = SpectralRecommender.load(find(run.path, RELEASED))
        smaller = sums.forget(sums.catalogue.ids[numbers - 1])
        smaller.catalogue = type(smaller.catalogue)(np.arange(1, stay + 1))
        return smaller, smaller.scores([[]])[0]
    import keras

    from tfdp_rec.models import TwoTower  # registers the classes that the file may hold

    path = run.release / "model.keras"
    model: TwoTower = keras.models.load_model(path)
    if len(model.vocabulary) != stay:  # else it was written before this was cut off
        model = model.forget(numbers, numbered=True)
        model.save(str(path))
    return model, np.asarray(model(np.zeros([1, model.history_length], np.int32)))[0]


def _write_report(run: RunFolder, config: dict[str, Any], items: Items, titles: Any, scores: np.ndarray) -> None:
    results = json.loads((run.private / "results.json").read_text(encoding="utf-8"))
    said = (run.release / STATEMENT).read_text(encoding="utf-8")
    first = items.of(np.argsort(-scores, kind="stable")[:5] + 1)
    answers = [(item, titles.get(item, "")) for item in first]
    source = source_of(JobSettings.from_config(config))
    # What the recommenders that were only compared have cost is in their ledgers.
    report.write(report.RunReport(run, source, config, results, {}, said, answers))


def still_listed(folder: Path, ids: Sequence[str]) -> str:
    """The public list of a run's items, if it names one of the ids still; else empty."""
    settings = JobSettings.from_config(json.loads(find(folder, CONFIG).read_text(encoding="utf-8")))
    if not Path(settings.items).is_file():
        return ""
    listed, wanted = OwnFiles(settings).listed_items(), Items(list(dict.fromkeys(ids))).ids
    names_one = listed is not None and pc.any(pc.is_in(as_kind(wanted.type, listed.ids), value_set=wanted)).as_py()
    return settings.items if names_one else ""
