"""What the studies share: train one model under several mechanisms and noises, measure, resume, plot.

A *cell* is one mechanism at one noise with one seed. Each cell trains on the same units with the same planted
canaries, and leaves one JSON file, so a study that was stopped goes on with the cells it has not finished.

Noise is given as in the paper's Algorithms 1 and 2: s, the standard deviation added to the *average* of clipped
gradients, in units of the clipping norm C. A mechanism's noise multiplier is relative to their sum, so it is s · B
with B the expected batch size: 0.01 at B = 64 is a noise multiplier of 0.64.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec import mechanisms
from tfdp_rec.audit import Canaries, exposure_extrapolation, exposure_interpolation, skew_normal_fit_error
from tfdp_rec.callbacks.exposure import per_example_losses
from tfdp_rec.data import PoissonSampling
from tfdp_rec.files import writing
from tfdp_rec.privacy import Accountant, calibrate_noise

MECHANISMS = {mechanism.label: mechanism for mechanism in mechanisms.COMMON}
_EXPOSURES = ("exposure", "exposure_extrapolated")
_WARM_UP = 10  # steps before the clock starts: tracing, and memory being found


@dataclasses.dataclass(frozen=True)
class Cell:
    """One mechanism at one noise with one seed.

    Attributes:
        mechanism: "SGD" or a key of `MECHANISMS`.
        noise: s, as in the paper's algorithms; 0 for SGD.
        label: of the noise, for plots: "0.01", "ε = 8".
        seed: of the model's initial weights.
    """

    mechanism: str
    noise: float
    label: str
    seed: int = 0

    @property
    def name(self) -> str:
        """File name of the cell."""
        words = [self.mechanism, *([self.label.replace(" = ", "")] if self.label else []), str(self.seed)]
        return "-".join(words).replace("ε", "epsilon")

    @property
    def title(self) -> str:
        """For legends."""
        return f"{self.mechanism}, {self.label}" if self.label else self.mechanism


@dataclasses.dataclass
class Task:
    """A model, its data, and how to measure it.

    Attributes:
        name: of the study.
        make_model: seed -> an untrained model.
        fetch: unit indices -> features, canary units included.
        sampling: of the units.
        canaries: planted among the units.
        negatives: draws what the examples of a batch share in training.
        shared: inputs all examples share when losses are computed for exposure.
        measure: trained model -> metrics such as precision@10.
        steps, learning_rate, clip: of every training.
    """

    name: str
    make_model: Callable[[int], keras.Model]
    fetch: Callable[[np.ndarray], Any]
    sampling: PoissonSampling
    canaries: Canaries
    negatives: Callable[[], dict[str, Any]]
    shared: Mapping[str, np.ndarray]
    measure: Callable[[keras.Model], dict[str, float]]
    steps: int
    learning_rate: float
    clip: float
    delta: float

    @property
    def batch_size(self) -> float:
        """B."""
        return self.sampling.expected_batch_size

    def noise_for(self, epsilon: float) -> float:
        """s that spends `epsilon` over the whole training."""
        found = calibrate_noise(epsilon, self.delta, self.sampling, self.steps, accountant="rdp")
        return found / self.batch_size


def cells_of(task: Task, mechanisms: Sequence[str], noises: Sequence[float], epsilon: float, seeds: int) -> list[Cell]:
    """SGD once a seed, and every mechanism at every noise.

    Args:
        task: whose noise for `epsilon` is added to `noises`; no such noise when `epsilon` is 0.
        mechanisms: of "SGD" and `MECHANISMS`.
        noises: s of the paper.
        epsilon: the budget of the last noise.
        seeds: how many times.
    """
    labelled = [(noise, f"{noise:g}") for noise in noises]
    if epsilon:
        labelled.append((task.noise_for(epsilon), f"ε = {epsilon:g}"))
    cells = []
    for seed in range(seeds):
        for mechanism in mechanisms:
            if mechanism == "SGD":
                cells.append(Cell("SGD", 0.0, "", seed))
            else:
                cells += [Cell(mechanism, noise, label, seed) for noise, label in labelled]
    return cells


class Clock(keras.callbacks.Callback):
    """Times steps after a warm-up and moves the progress bar."""

    def __init__(self, advance: Callable[[], None]):
        super().__init__()
        self.advance, self.step, self.started = advance, 0, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        if self.step == _WARM_UP:
            self.started = time.perf_counter()
        self.last = time.perf_counter()
        self.advance()

    @property
    def steps_per_second(self) -> float | None:
        """Of the steps after the warm-up, data included."""
        timed = self.step - _WARM_UP
        return timed / (self.last - self.started) if timed > 0 else None


def run_cell(task: Task, cell: Cell, advance: Callable[[], None]) -> dict[str, Any]:
    """Trains and measures one cell.

    Args:
        task: model and data.
        cell: mechanism, noise and seed.
        advance: called after each step.

    Returns:
        Metrics, exposures by repeat count (by rank and extrapolated), speed and ε (None where there is none).
    """
    keras.utils.set_random_seed(cell.seed)
    model = task.make_model(cell.seed)
    model.compile(optimizer=_optimizer(task, cell))
    clock = Clock(advance)
    batches = task.sampling.batches(task.fetch, shared=task.negatives)
    model.fit(batches, steps_per_epoch=task.steps, verbose=0, callbacks=[clock], shuffle=False)
    return {
        **dataclasses.asdict(cell),
        "noise_multiplier": cell.noise * task.batch_size,
        "epsilon": _epsilon(task, model),
        "steps": clock.step,
        "steps_per_second": clock.steps_per_second,
        "metrics": task.measure(model),
        **_exposures(task, model),
    }


def _optimizer(task: Task, cell: Cell) -> keras.optimizers.Optimizer:
    if cell.mechanism == "SGD":
        return keras.optimizers.SGD(task.learning_rate)
    return MECHANISMS[cell.mechanism].optimizer(
        task.learning_rate,
        l2_norm_clip=task.clip,
        noise_multiplier=cell.noise * task.batch_size,
        expected_batch_size=task.batch_size,
    )


def _epsilon(task: Task, model: Any) -> float | None:
    if not model.is_private:
        return None
    accountant = Accountant(model.optimizer.dp_event(), task.sampling, task.delta, accountant="rdp")
    epsilon = accountant.epsilon(steps=task.steps)
    return epsilon if math.isfinite(epsilon) else None


def _exposures(task: Task, model: keras.Model) -> dict[str, Any]:
    losses = task.canaries.by_repeats(per_example_losses(model, task.canaries.features, task.shared))
    references = per_example_losses(model, task.canaries.references, task.shared)
    found: dict[str, Any] = {"exposure": _lists(exposure_interpolation(losses, references))}
    found["exposure_extrapolated"] = _lists(exposure_extrapolation(losses, references))
    found["skew_normal_fit_error"] = skew_normal_fit_error(references)
    return found


def _lists(exposures: Mapping[int, np.ndarray]) -> dict[str, list[float]]:
    return {str(count): np.round(values, 4).tolist() for count, values in exposures.items()}


class StudyFolder:
    """A run folder that knows which cells are done.

    Args:
        path: made if it is not there.
        config: what the cells depend on; a folder with another config is refused.

    Raises:
        ValueError: the folder holds a study with another config.
    """

    def __init__(self, path: str | Path, config: Mapping[str, Any]):
        self.path, self.config = Path(path), dict(config)
        (self.path / "cells").mkdir(parents=True, exist_ok=True)
        saved = self.path / "config.json"
        if saved.exists() and (before := json.loads(saved.read_text())) != json.loads(json.dumps(self.config)):
            changed = sorted(key for key in {*before, *self.config} if before.get(key) != self.config.get(key))
            raise ValueError(
                f"{self.path} holds a study with other settings ({', '.join(changed)}): give another --out."
            )
        self.write("config.json", self.config)

    def write(self, name: str, value: Any) -> None:
        """Writes a JSON file whole."""
        with writing(self.path / name) as file:
            json.dump(value, file, indent=1, allow_nan=False)

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """What a cell found, if it is done."""
        path = self.path / "cells" / f"{cell.name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def run(self, task: Task, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Runs what is not done, with a progress bar, and returns all results."""
        todo = [cell for cell in cells if self.result(cell) is None]
        with progress_bar(len(todo) * task.steps) as (advance, say):
            for number, cell in enumerate(todo, start=1):
                say(f"{cell.title}, seed {cell.seed} ({number} of {len(todo)})")
                self.write(f"cells/{cell.name}.json", run_cell(task, cell, advance))
                keras.backend.clear_session()  # or the graphs of all cells stay in memory
                gc.collect()
        results = [self.result(cell) for cell in cells]
        self.write("results.json", results)
        return [result for result in results if result is not None]


class progress_bar:  # noqa: N801
    """A bar with the time that is left; gives (advance by one step, set the text)."""

    def __init__(self, steps: int):
        from rich import progress

        self.bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn(),
        )  # fmt: skip
        self.steps = steps

    def __enter__(self) -> tuple[Callable[[], None], Callable[[str], None]]:
        self.bar.__enter__()
        self.task = self.bar.add_task("", total=max(self.steps, 1))

        def say(text: str) -> None:
            if self.bar.console.is_terminal:
                self.bar.update(self.task, description=text)
            else:
                print(text, flush=True)

        return lambda: self.bar.advance(self.task), say

    def __exit__(self, *problem: Any) -> None:
        self.bar.__exit__(*problem)


def averaged(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """(title, results of all seeds) of each mechanism and noise, in order."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        title = f"{result['mechanism']}, {result['label']}" if result["label"] else result["mechanism"]
        groups.setdefault(title, []).append(result)
    yield from groups.items()


def median_exposure(result: Mapping[str, Any], key: str = "exposure") -> dict[int, float]:
    """Median exposure by repeat count."""
    return {int(count): float(np.median(values)) for count, values in result[key].items()}


def plot_precision(results: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """precision@k against k, a line for each mechanism and noise (Figures 4 and 6)."""
    figure, axes = _axes("k", "precision@k on test individuals", title)
    for name, seeds in averaged(results):
        metrics: dict[str, list[float]] = {}
        for result in seeds:
            for key, value in result["metrics"].items():
                metrics.setdefault(key, []).append(value)
        points = sorted((int(key.split("@")[1]), np.mean(v)) for key, v in metrics.items() if "precision" in key)
        axes.plot(*zip(*points), **_style(name), label=name)
        axes.set_xticks([k for k, _ in points])
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def plot_exposure(results: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Median exposure against repeats, by rank and extrapolated, a line a mechanism and noise (Figures 5 and 7).

    Several seeds give the mean and, shaded, the least and the greatest.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(title)
    for axes, key, name in zip(figure.subplots(1, 2), _EXPOSURES, ("by rank", "extrapolated by a skew-normal")):
        axes.set(xscale="log", xlabel="copies of the canary", ylabel="median exposure (bits)", title=name)
        axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
        axes.grid(alpha=0.3)
        for label, seeds in averaged(results):
            medians = [median_exposure(result, key) for result in seeds]
            counts = sorted(medians[0])
            values = np.array([[m[count] for count in counts] for m in medians])
            style = _style(label)
            axes.plot(counts, values.mean(axis=0), **style, label=label)
            if len(seeds) > 1:
                axes.fill_between(counts, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.15)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def speed_table(results: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Steps per second by mechanism, the best of its cells (Table 3)."""
    speeds: dict[str, float | None] = {}
    for result in results:
        speed = result["steps_per_second"]
        before = speeds.get(result["mechanism"])
        speeds[result["mechanism"]] = speed if before is None else max(before, speed or 0.0)
    return speeds


def report(results: Sequence[Mapping[str, Any]], title: str, figures: Sequence[str]) -> str:
    """A Markdown page of one study."""
    counts = sorted(median_exposure(results[0]))
    ks = sorted((key for key in results[0]["metrics"] if "precision" in key), key=lambda key: int(key.split("@")[1]))
    most = counts[-1]
    head = ["cell", "noise multiplier", "ε", *ks, *(f"exposure, {count}×" for count in counts)]
    head += [f"extrapolated, {most}×", "steps/s"]
    rows = [f"# {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, seeds in averaged(results):
        first = seeds[0]
        epsilon = f"{first['epsilon']:.3g}" if first["epsilon"] is not None else "none"
        values = [np.mean([s["metrics"][k] for s in seeds]) for k in ks]
        exposures = [np.mean([median_exposure(s)[c] for s in seeds]) for c in counts]
        beyond = np.mean([median_exposure(s, "exposure_extrapolated")[most] for s in seeds])
        speed = np.mean([s["steps_per_second"] or math.nan for s in seeds])
        cells = [name, f"{first['noise_multiplier']:.3g}", epsilon, *(f"{v:.4f}" for v in values),
                 *(f"{e:.1f}" for e in exposures), f"{beyond:.1f}", f"{speed:.1f}"]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    notes = [
        "",
        "ε is for one unit; a canary with n copies is n units. EANA and SGD have none. Exposure 1 is chance.",
        "",
    ]
    return "\n".join([*rows, *notes, *(f"![{name}]({name})" for name in figures), ""])


def _axes(x: str, y: str, title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    return figure, axes


def _style(name: str) -> dict[str, Any]:
    """Colour by mechanism, dash by noise."""
    mechanism, _, noise = name.partition(", ")
    colour = MECHANISMS[mechanism].colour if mechanism in MECHANISMS else "black"
    dash = {"": "-", "0.001": "-", "0.01": "--"}.get(noise, ":")
    return {"color": colour, "linestyle": dash, "marker": "o", "markersize": 3}


def shuffled_ids(count: int, size: int) -> np.ndarray:
    """`size` distinct ids from 1 to `count`: negatives, uniform from the public catalogue."""
    return 1 + np.random.default_rng().choice(count, size, replace=False, shuffle=False)


def held_out(features: Mapping[str, np.ndarray], shared: Mapping[str, np.ndarray], size: int = 500) -> tf.data.Dataset:
    """Batches of fixed examples, each with what all examples share."""
    pieces = [
        {name: values[i : i + size] for name, values in features.items()} for i in range(0, _count(features), size)
    ]
    signature = {
        **{name: tf.TensorSpec([None, *v.shape[1:]], v.dtype) for name, v in features.items()},
        **{name: tf.TensorSpec(v.shape, v.dtype) for name, v in shared.items()},
    }
    batches = tf.data.Dataset.from_generator(
        lambda: ({**piece, **shared} for piece in pieces), output_signature=signature
    )
    return batches.apply(tf.data.experimental.assert_cardinality(len(pieces))).cache()


def _count(features: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(features.values())))
