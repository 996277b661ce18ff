"""Private figures of a finished run: what is released, asked about its held-out users, once and for a price.

    the price and the figures stand in the run's ledger:    pay  →  ask the SavedModel  →  add up with noise  →  note

The note is the one place of the figures; it is durable before anything is shown. A process that ends between the
payment and the note has spent it: the figures are not made again. Ctrl-C and a disk that fails give the payment back,
since nothing that depends on the figures has left the process then.

A user's example is chosen by their own rows and a hash of their own id, and all held-out users are asked, not the first
some: no user has a say in the value of another (docs/privacy-metrics.md). Popular are a tenth of the items, those that
the released recommender names first for an empty history.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.claim.events import GaussianDpEvent
from tfdp_rec.core.claim.ledger import Chain, Ledger, Snapshot, read
from tfdp_rec.core.ground import interruption
from tfdp_rec.datasets.log import Catalogue
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.job.evaluation import HISTORY, NewItemExamples
from tfdp_rec.job.run_folder import CONFIG, LEDGER, find, find_servable
from tfdp_rec.job.run_state import WarmStart
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.sources import choose_source
from tfdp_rec.job.users import split_users
from tfdp_rec.metrics import ndcg_at_k, popular_share, recall_at_k
from tfdp_rec.sums.fixed_point import check_noise
from tfdp_rec.sums.private_metrics import LABEL, RecommendedLists, private_metrics

K, NOTE = 10, "figures of held-out units"
_AT_ONCE = 500  # users that the SavedModel is asked about

Ask = Callable[[NDArray[np.int32], int], NDArray[np.int32]]
"""From item numbers `[users, n]`, oldest first and then zeros, to the numbers of the k best items, `[users, k]`."""


def kept_figures(chain: Chain) -> tuple[Mapping[str, Any], str]:
    """The figures that a ledger holds, and why there are none; figures that it did not pay for are refused."""
    paid = {each.number: each.event for each in chain.paid if each.label == LABEL}
    notes = chain.notes(NOTE)
    if any(paid.get(each["payment"]) != GaussianDpEvent(each["noise_multiplier"]) for each in notes) or len(notes) > 1:
        raise ValueError(f"{chain.path} has figures of held-out users that it did not pay for: it is no run's ledger.")
    if notes:
        return notes[0]["figures"], ""
    return {}, "they were paid for, and lost before they were kept" if paid else "none were asked for, or paid for"


def release_figures(run: Path, noise_multiplier: float) -> None:
    """Pays for the figures of a run that has none, makes them, and keeps them in its ledger."""
    noise, path = check_noise(noise_multiplier), find(run, LEDGER)
    if LABEL in [each.label for each in read(path).paid]:
        raise ValueError(
            f"{path} has paid for figures of held-out users that a process ended before it kept: they would cost as "
            "much again, and are not made again. Leave the metrics out: the card is written without them."
        )
    config = json.loads(find(run, CONFIG).read_text(encoding="utf-8"))
    settings = dataclasses.replace(JobSettings.from_config(config), mechanism=())  # no sampling is asked for
    if settings.days > 1 or settings.engine:
        raise ValueError(
            "Figures are released for runs of one day whose log is grouped here: a run of several days has promised "
            "its whole budget to its days, and a log on Spark is not read here. Leave the metrics out."
        )
    source = choose_source(settings)
    source.check_settings()
    rows, columns = source.rows()
    items = WarmStart.load(run).items
    log, ask = Interactions.read(rows, **columns), asker(run, items)
    if len(log) != config["num_users"]:
        raise ValueError(
            "The log that the run was made from has another number of users now: put its files back as they were, or "
            "leave the metrics out. Nothing was paid."
        )
    with Ledger(path, "user", Snapshot(len(log), "user, item, time")) as ledger:
        with interruption.defer_signals():
            payment = ledger.pay(GaussianDpEvent(noise), label=LABEL, settings={"sampling": None})
        try:
            figures = _measure(log.with_items(items), settings, ask, noise)
            with interruption.defer_signals():
                ledger.note(NOTE, {"payment": payment, "noise_multiplier": noise, "figures": figures})
        except (KeyboardInterrupt, OSError):
            if not ledger.notes(NOTE):
                ledger.give_back(payment, 1)
            raise


def asker(run: Path, items: Items) -> Ask:
    """Asks the SavedModel of a run by numbers of its items."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(find_servable(run)))
    ids = items.ids.to_pylist()
    named = np.array(["" if isinstance(ids[0], str) else Catalogue(np.array(ids)).padding, *ids], object)
    kind = tf.string if isinstance(ids[0], str) else tf.int64

    def ask(histories: NDArray[np.int32], k: int) -> NDArray[np.int32]:
        asked = tf.constant(named[histories].tolist(), kind, histories.shape)
        found = loaded.signatures["top_k"](history=asked, k=tf.constant(k))["ids"].numpy()
        texts = [each.decode() if isinstance(each, bytes) else each for each in found.ravel().tolist()]
        return items.numbers(texts).reshape(found.shape)

    return ask


def _measure(log: Interactions, settings: JobSettings, ask: Ask, noise: float) -> dict[str, Any]:
    """Figures by name, as a ledger keeps them."""
    held_out, num_items = split_users(log, settings).test, log.num_items
    examples = NewItemExamples(log, held_out).by_own_rows(log.uniforms(f"tfdp-rec card {settings.seed}"))
    there, label = examples["label"] >= 0, examples["label"]
    contexts, k = examples["context"][there], min(K, num_items)
    parts = range(0, len(contexts), _AT_ONCE)
    lists = np.concatenate([np.zeros([0, k], np.int32), *(ask(contexts[at : at + _AT_ONCE], k) for at in parts)])
    relevant = list(label[there][:, None])
    popular = ask(np.zeros([1, HISTORY], np.int32), -(-num_items // 10))[0]
    found = private_metrics(
        held_out[there], noise_multiplier=noise, lists=RecommendedLists(lists, num_items, len(held_out)),
        means={f"recall@{K}": recall_at_k(lists, relevant), f"nDCG@{K}": ndcg_at_k(lists, relevant),
               "popularity share": popular_share(lists, popular)},
    )  # fmt: skip
    return {name: dataclasses.asdict(figure) for name, figure in found.figures.items()}
