"""`python -m experiments.eana kg`: knowledge-graph entities at large vocabularies (EANA paper, section 4.2).

  python -m experiments.eana kg --quick                          ten minutes on two cores
  python -m experiments.eana kg --vocabulary 5000000             the paper's larger vocabulary
  python -m experiments.eana kg --data people.parquet --vocabularies terms/

A transformer reads three features of each activity, each with its own table, and predicts an entity. The data are
generated timelines over a planted graph, or yours (JSON lines or Parquet; terms/ holds entities.txt, unigrams.txt
and bigrams.txt, one public term a line). Speed is measured at every vocabulary of --speed, in steps a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

from experiments import tables
from experiments.eana import command
from tfdp_rec.mechanisms import dp_sgd, eana, lazy_dp_sgd
from tfdp_rec.settings import POSITIVE, choose, option


@dataclasses.dataclass(frozen=True)
class Sizes(command.Sizes):
    """Sizes of the study; the defaults are the paper's as far as one machine holds them."""

    width: int = option(32, "of the embeddings", POSITIVE)
    per_repeat: int = option(1000, "canaries for each number of copies", POSITIVE)
    negatives: int = 1000
    individuals: int = option(1_000_000, "generated timelines", POSITIVE)
    vocabulary: int = option(100_000, "entities, unigrams and bigrams each", POSITIVE)
    topics: int = 200
    max_repeats: int = option(1000, "most copies of a canary", POSITIVE)
    test_individuals: int = 8000
    speed_width: int = 16
    speed_steps: int = 200


QUICK = Sizes(
    width=16, steps=800, per_repeat=10, negatives=200, individuals=30_000, vocabulary=2000, topics=20,
    max_repeats=100, test_individuals=2000, speed_width=8, speed_steps=30,
)  # fmt: skip
SPEED_VOCABULARIES = (100_000, 5_000_000)
# Keras' SGD copies the tables that Keras' layers read.
SPEED_WAYS = ("SGD", "sparse SGD", eana.label, lazy_dp_sgd.label, dp_sgd.label)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `study kg`."""
    parser.add_argument("--data", metavar="FILE", help="timelines, .jsonl or .parquet; left out, generated ones")
    parser.add_argument("--vocabularies", metavar="FOLDER", help="public term lists, with --data")
    parser.add_argument(
        "--speed", nargs="*", type=int, default=SPEED_VOCABULARIES, metavar="N",
        help="vocabularies for Table 3; default: 100000 5000000",
    )  # fmt: skip
    command.add_arguments(parser, Sizes, out="runs/study-kg")


def run(args: argparse.Namespace) -> int:
    """Runs the study and writes its folder."""
    sizes = choose(args, QUICK if args.quick else Sizes())
    if bool(args.data) != bool(args.vocabularies):
        raise ValueError("--data and --vocabularies go together: a list read off the data would be a release.")

    def measure_speed(study: Any) -> tuple[dict[str, Any], str]:
        speeds = {f"{count:,}": speed_of(study, sizes, count) for count in args.speed}
        return speeds, speed_page(sizes, speeds)

    title = "KG entities (EANA, section 4.2)"
    make = lambda: make_task(sizes, args.data, args.vocabularies)  # noqa: E731
    return command.run(args, sizes, make, title, ["Figure 6", "Figure 7"], measure_speed)


def make_task(sizes: Sizes, data: str | None = None, vocabularies: str | None = None) -> Any:
    """The KG model on generated or given timelines, with planted canaries.

    Args:
        sizes: of everything.
        data: file of timelines, or None for generated ones.
        vocabularies: folder of public term lists, with `data`.
    """
    import numpy as np

    from experiments.eana import cells
    from experiments.eana.timelines import split_individuals
    from experiments.generated.knowledge_graph import FEATURES
    from tfdp_rec.audit import REPEATS, Canaries, Uniform
    from tfdp_rec.data import PoissonSampling
    from tfdp_rec.models import KGEntity

    source, rows = _source(sizes, data, vocabularies)
    train, test = split_individuals(source.num_individuals)
    values = source.values_per_activity
    catalogue = {f: Uniform(rows[f], shape=(source.context_length, values[f]), low=1, dtype="int32") for f in FEATURES}
    catalogue["label"] = Uniform(rows["entities"], low=1)
    repeats = tuple(count for count in (*REPEATS, 1000) if count <= sizes.max_repeats)
    canaries = Canaries.draw(
        catalogue, repeats=repeats, per_repeat=sizes.per_repeat, num_references=sizes.references, seed=0
    )
    labels = rows["entities"] - 1

    fetch, units = canaries.insert(lambda indices: source.fetch(train[indices]), len(train))
    tested = source.fetch(test[: sizes.test_individuals], seed=0)
    shared = np.random.default_rng(0).choice(labels, min(4096, labels), replace=False) + 1
    return cells.Task(
        name="kg",
        make_model=lambda seed: KGEntity(rows, rows["entities"], sizes.width, source.context_length, num_blocks=1),
        fetch=fetch,
        sampling=PoissonSampling(units, sizes.batch_size, unit="individual"),
        canaries=canaries,
        negatives=lambda: {"negatives": cells.shuffled_ids(labels, min(sizes.negatives, labels))},
        shared={"negatives": shared},
        measure=lambda model: measure(model, tested),
        steps=sizes.steps,
        learning_rate=sizes.learning_rate,
        clip=sizes.clip,
        delta=min(1e-6, 1 / units),
    )


def _source(sizes: Sizes, data: str | None, vocabularies: str | None) -> tuple[Any, dict[str, int]]:
    """Where examples come from, and the rows of each feature's table."""
    from pathlib import Path

    from experiments.eana.timelines import TimelineStore, Vocabulary, read_timelines
    from experiments.generated.knowledge_graph import FEATURES, SyntheticKG

    if data is None or vocabularies is None:
        kg = SyntheticKG(sizes.individuals, sizes.vocabulary, sizes.topics)
        return kg, dict.fromkeys(FEATURES, sizes.vocabulary + 1)
    terms = {feature: Vocabulary.from_file(Path(vocabularies) / f"{feature}.txt") for feature in FEATURES}
    return TimelineStore(read_timelines(data), terms), {f: vocabulary.size for f, vocabulary in terms.items()}


def measure(model: Any, features: dict[str, Any], most_scores: int = 2**27) -> dict[str, float]:
    """precision@k and recall@k over the whole catalogue.

    Args:
        model: a `KGEntity`.
        features: held-out examples with their labels.
        most_scores: in memory at a time; at 5,000,000 labels 500 examples would take 10 GB.
    """
    import numpy as np

    from tfdp_rec.metrics import recall_at_k

    found, batch_size = [], max(1, min(500, most_scores // model.num_labels))
    for start in range(0, len(features["label"]), batch_size):
        batch = {name: values[start : start + batch_size] for name, values in features.items()}
        found.append(model.top_k(batch, 20)[1].numpy())
    answers, label = np.concatenate(found), features["label"][:, None]
    recalls = {f"recall@{k}": float(recall_at_k(answers[:, :k], label).mean()) for k in (1, 5, 10, 20)}
    return recalls | {f"precision@{k}": recalls[f"recall@{k}"] / k for k in (1, 5, 10, 20)}


def speed_of(study: Any, sizes: Sizes, vocabulary: int) -> dict[str, Any]:
    """Steps a second of every mechanism at one vocabulary (Table 3), a cell of the study.

    Args:
        study: a `Study`.
        sizes: batch, steps and `speed_width`.
        vocabulary: rows of each of the four tables.
    """
    ways = lambda: {name: time_mechanism(name, sizes, vocabulary) for name in SPEED_WAYS}  # noqa: E731
    return study.cell(f"speed_{vocabulary}_{sizes.speed_width}", ways)


def time_mechanism(name: str, sizes: Sizes, vocabulary: int) -> dict[str, float]:
    """Median seconds of a step of one mechanism, in `fit` on batches made beforehand.

    LazyDPSGD's settling at the end, once a training, is not in it. DPSGD gets a tenth of the steps, since each of
    its steps touches every row.

    Args:
        name: one of `SPEED_WAYS`.
        sizes: batch, steps and `speed_width`.
        vocabulary: rows of each table.
    """
    import gc

    import keras
    import numpy as np
    import tensorflow as tf

    from experiments.eana import cells
    from experiments.generated.knowledge_graph import FEATURES, SyntheticKG
    from experiments.study import Clock
    from tfdp_rec.models import KGEntity

    kg = SyntheticKG(10**9, vocabulary, sizes.topics)
    rows = dict.fromkeys(FEATURES, vocabulary + 1)
    model = KGEntity(rows, vocabulary + 1, sizes.speed_width, kg.context_length, num_blocks=1)
    if name == "sparse SGD":
        for table in (*model.tables.values(), model.positions):
            table.call = functools.partial(_gathered, table)
    rng, steps = np.random.default_rng(0), 3 + max(3, sizes.speed_steps // (10 if name == dp_sgd.label else 1))
    made = [
        {
            **kg.fetch(rng.integers(0, 10**9, sizes.batch_size)),
            "negatives": 1 + rng.choice(vocabulary, sizes.negatives, replace=False, shuffle=False),
        }
        for _ in range(steps)
    ]
    signature = {key: tf.TensorSpec([None, *values.shape[1:]], values.dtype) for key, values in made[0].items()}
    signature["negatives"] = tf.TensorSpec(made[0]["negatives"].shape, made[0]["negatives"].dtype)
    batches = tf.data.Dataset.from_generator(lambda: iter(made), output_signature=signature)
    batch, private = sizes.batch_size, cells.MECHANISMS.get(name)
    optimizer = keras.optimizers.SGD(sizes.learning_rate)
    if private is not None:
        optimizer = private.optimizer(
            sizes.learning_rate, l2_norm_clip=sizes.clip, noise_multiplier=0.01 * batch, expected_batch_size=batch
        )
    clock = Clock()
    model.compile(optimizer)
    model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[clock], shuffle=False)
    seconds = clock.median_seconds(warm_up=3)
    del model, optimizer
    keras.backend.clear_session()
    gc.collect()
    return {"seconds_a_step": seconds, "steps_per_second": 1 / seconds, "steps": steps}


def _gathered(table: Any, ids: Any) -> Any:
    """Rows of a table read from the variable itself, as the private step reads them."""
    import tensorflow as tf

    return tf.gather(table.embeddings.value, ids)


def speed_page(sizes: Sizes, speeds: dict[str, dict[str, dict[str, float]]]) -> str:
    """Table 3 as Markdown."""
    if not speeds:
        return ""
    rows = [
        [name, *(f"{speed[name]['steps_per_second']:.2f}" for speed in speeds.values())] for name in SPEED_WAYS
    ]
    lines = tables.markdown(["mechanism", *(f"{count} rows a table" for count in speeds)], rows)
    title = f"## Table 3: steps a second, width {sizes.speed_width}, batches of {sizes.batch_size}"
    return "\n".join(["", title, "", *lines, ""])
