"""Private figures of a run: what is released, asked about its held-out users, once and for a price.

    all of it stands in the run's ledger:    pay  →  note that one asks  →  ask the SavedModel, add noise  →  note

The last note is the one place of the figures; it is durable before anything is shown. A process that is killed between
the two notes may have asked: the figures stay paid for, and are not made again. After Ctrl-C and a disk that fails
nothing that depends on them has left the process, so that another note says that one may ask again. `tfdp-rec train`
pays before it trains, since the statement of a training tells of it; a run that is cut off then goes on and asks later.

A user's example is chosen by their own rows and a hash of their own id, and all held-out users are asked, not the first
some: no user has a say in the value of another (docs/privacy-metrics.md). Popular are a tenth of the items, those that
the released recommender names first for an empty history.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.claim.events import GaussianDpEvent
from tfdp_rec.core.claim.ledger import Chain, Ledger
from tfdp_rec.core.ground.files import row_chunks
from tfdp_rec.datasets.log import Catalogue
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.job.evaluation import HISTORY, NewItemExamples
from tfdp_rec.job.run_folder import find_servable
from tfdp_rec.metrics import ndcg_at_k, popular_share, recall_at_k
from tfdp_rec.sums.private_metrics import LABEL, Figure, RecommendedLists, private_metrics

K, NOTE, ASKS = 10, "figures of held-out units", "held-out units are asked"
_AT_ONCE = 2**24  # scores, 64 MB
Ask = Callable[[NDArray[np.int32], int], NDArray[np.int32]]
"""From item numbers `[users, n]`, oldest first and then zeros, to the numbers of the k best items, `[users, k]`."""


def kept_figures(chain: Chain) -> tuple[Mapping[str, Any], str]:
    """The figures that a ledger holds, and why there are none; figures that it did not pay for are refused."""
    paid = {each.number: each.event for each in chain.paid if each.label == LABEL}
    notes = chain.notes(NOTE)
    if any(paid.get(each["payment"]) != GaussianDpEvent(each["noise_multiplier"]) for each in notes) or len(notes) > 1:
        raise ValueError(f"{chain.path} has figures that it did not pay for: get the ledger of the run itself.")
    why = "they were paid for, and lost before they were kept" if paid else "none were asked for, or paid for"
    return (notes[0]["figures"], "") if notes else ({}, why)


def figure_of(kept: Mapping[str, Any]) -> Figure:
    """A figure as a ledger keeps it, where infinity is a word."""
    return Figure(**{name: float(value) for name, value in kept.items()})


def pay_for_figures(ledger: Ledger, event: GaussianDpEvent) -> int | None:
    """The payment for figures that are still to be made, made now if there is none; None if they were made or lost."""
    paid = [each.number for each in ledger.paid if each.label == LABEL]
    if not paid:
        return ledger.pay(event, label=LABEL, settings={"sampling": None})
    asked = ledger.notes(ASKS)
    return None if asked and asked[-1]["payment"] == paid[0] else paid[0]


def make_figures(
    ledger: Ledger, payment: int, event: GaussianDpEvent, log: Interactions, held_out: NDArray[np.int64], seed: int,
    ask: Ask,
) -> None:  # fmt: skip
    """Asks, and keeps the figures that were paid for in the ledger."""
    try:
        ledger.note(ASKS, {"payment": payment})
        found = private_metrics(**values_of(log, held_out, seed, ask), noise_multiplier=event.noise_multiplier).figures
        figures = {name: dataclasses.asdict(figure) for name, figure in found.items()}
        ledger.note(NOTE, {"payment": payment, "noise_multiplier": event.noise_multiplier, "figures": figures})
    except (KeyboardInterrupt, OSError):
        if not ledger.notes(NOTE):
            ledger.note(ASKS, {"payment": None})
        raise


def load_released(run: Path, items: Items) -> Ask:
    """The SavedModel of a run, to be asked by numbers of its items."""
    import tensorflow as tf

    loaded, ids = tf.saved_model.load(str(find_servable(run))), items.ids.to_pylist()
    is_text = isinstance(ids[0], str)
    named = np.array(["" if is_text else Catalogue(np.array(ids)).padding, *ids], object)

    def ask(histories: NDArray[np.int32], k: int) -> NDArray[np.int32]:
        found = np.zeros([len(histories), k], np.int32)
        for start, end in row_chunks([len(histories), len(ids)], _AT_ONCE):
            typed = named[histories[start:end]].tolist()
            asked = tf.constant(typed, tf.string if is_text else tf.int64, [end - start, histories.shape[1]])
            best = loaded.signatures["top_k"](history=asked, k=tf.constant(k))["ids"].numpy().ravel()
            numbers = items.numbers([each.decode() if is_text else each for each in best])
            found[start:end] = numbers.reshape(end - start, k)
        return found

    return ask


def values_of(log: Interactions, held_out: NDArray[np.int64], seed: int, ask: Ask) -> dict[str, Any]:
    """What `private_metrics` is given: values without noise, of each user who can be asked."""
    contexts, labels = NewItemExamples(log, held_out).by_own_rows(log.uniforms(f"tfdp-rec card {seed}"))
    num_items = log.num_items
    there, k = labels >= 0, min(K, num_items)
    lists, relevant = ask(contexts[there], k), list(labels[there][:, None])
    popular = ask(np.zeros([1, HISTORY], np.int32), -(-num_items // 10))[0]
    means = {
        f"recall@{k}": recall_at_k(lists, relevant), f"nDCG@{k}": ndcg_at_k(lists, relevant),
        "popularity share": popular_share(lists, popular),
    }  # fmt: skip
    return {"units": held_out[there], "means": means, "lists": RecommendedLists(lists, num_items, len(held_out))}
