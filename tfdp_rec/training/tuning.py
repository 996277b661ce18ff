"""`tune`: several private trainings with different settings, of which the best alone is released, for one ε.

    settings       learning_rate 0.1, 0.3 or 1.0; clip 0.5 or 1.0              what `train` takes beside the plan
    number of runs drawn, ten on average; secret, as are the scores            each run: settings drawn anew
    a run          train(plan, **settings) -> model -> its score on units that are held out, with noise
    the release    the model of the best score, which tells the ε of all runs

ε is for who sees the released model, its settings and its score. Who watches the trainings sees more: how many there
were, how long they took, and which of them was the best. A run may read nothing of another one.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.best_run import BestRun
from tfdp_rec.core.claim.calibration import least_noise
from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent
from tfdp_rec.core.claim.ledger import Ledger, compose
from tfdp_rec.core.claim.schemes import Sampling
from tfdp_rec.core.claim.secret_draws import number_of_runs, uniform_numbers
from tfdp_rec.core.claim.selection import chance_to_end
from tfdp_rec.core.ground.files import Path
from tfdp_rec.core.ground.keras_internals import numbered_from, object_numbers, round_up_function_numbers
from tfdp_rec.core.sensitivity.weights import Auto
from tfdp_rec.sums.fixed_point import ONE, check_noise, release_sums
from tfdp_rec.training.private_fit import PrivateFit
from tfdp_rec.training.private_plan import PrivatePlan
from tfdp_rec.training.search import Search

SHAPES = {"geometric": 1.0, "logarithmic": 0.0}
_LEAST_SCORE_NOISE = 5.0


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The best of several trainings.

    Args:
        model: Its model, whose privacy history has the price of all trainings.
        settings: Its settings.
        score: Its mean score, with noise.
        accountant: Accountant that follows the model.
    """

    model: Any
    settings: Mapping[str, Any]
    score: float
    accountant: Accountant

    @property
    def epsilon(self) -> float:
        """ε of the release, with all else that the accountant counts."""
        return self.accountant.epsilon()

    def statement(self) -> str:
        """The guarantee as text."""
        return self.accountant.statement()


def tune(
    train: Callable[..., Any], space: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]], *,
    score: Callable[[Any], Any], held_out: int, sampling: Sampling, delta: float, steps: int, epsilon: float,
    runs: float = 10.0, distribution: str = "geometric", score_noise: float | None = None,
    l2_norm_clip: float | Auto = 1.0, accountant: str = "pld",
    make_event: Callable[[float], DpEvent] = GaussianDpEvent, ledger: Path | Ledger | None = None,
    folder: Path | None = None, verbose: Any = "auto",
) -> Tuned:  # fmt: skip
    """Trains with different settings and returns the best model; ε is for all trainings and their scores together.

    Guarantee: what is returned is (ε, δ)-differentially private. The number of trainings, the models and the scores of
    the others must stay secret.

    Args:
        train: Function `train(plan, **settings)` that trains a new model with the plan, on the plan's batches, and
            returns it, or what `make_private(..., plan=plan)` returned. It must not use anything of another run.
        space: Values of each setting, of which every combination is as likely; or a list of settings. Public.
        score: Function from a trained model to one value from 0 to 1 for each held-out unit, larger ones better, which
            depends on that unit's rows alone; 0 for one without rows.
        held_out: Number of units that `score` gives values for; public.
        sampling: Sampling scheme of each training.
        delta: Probability δ.
        steps: Number of steps of each training.
        epsilon: ε of the release.
        runs: Number of trainings on average, from 1.01 to 1,000.
        distribution: How their number is drawn: "geometric", or "logarithmic", which costs less and is often small.
        score_noise: Noise multiplier of the sum of a model's values; by default a quarter of √held_out, at least 5,
            half of what chance does at most to a score.
        l2_norm_clip: Clip C of optimizers that are given none.
        accountant: "pld" or "rdp".
        make_event: As for `PrivatePlan`.
        ledger: File, or `Ledger`, in which all is paid for before the first training.
        folder: Private folder in which the search is kept: called again with it, `tune` goes on after a crash. It is of
            one `train`, `score` and data.
        verbose: 0 for no line at each training; by default these lines are for a terminal alone, since they tell how
            many there are.

    Raises:
        ValueError: A value is out of range, or no noise meets the budget.
        NotPrivate: A run has used the data in another way than with its plan.
    """
    choices = _list_settings(space)
    if int(held_out) != held_out or held_out < 1:
        raise ValueError(f"held_out must be the number of units that score gives values for, got {held_out!r}.")
    if distribution not in SHAPES:
        raise ValueError(f"distribution must be one of {', '.join(SHAPES)}, got {distribution!r}.")
    noise_of_score = check_noise(max(_LEAST_SCORE_NOISE, held_out**0.5 / 4) if score_noise is None else score_noise)
    payer = Accountant(make_event(1.0), sampling, delta, accountant, ledger=ledger)

    def plan_release(noise: float, id: str) -> BestRun:
        return BestRun(sampling, make_event(noise), steps, noise_of_score, runs, SHAPES[distribution], id)

    def begin() -> dict[str, Any]:
        opened = payer.spending.payments.ledger
        noise = least_noise(
            epsilon, delta, sampling, steps, accountant, make_event, [compose(opened.paid)] if opened else [],
            payer.limit, contain=plan_release(1.0, "").contain,
        )  # fmt: skip
        number = number_of_runs(chance_to_end(runs, SHAPES[distribution]), SHAPES[distribution])
        return {"noise": noise, "runs": uniform_numbers(number, len(choices)).tolist(), "names": object_numbers()}

    shows = sys.stdout.isatty() if verbose == "auto" else bool(verbose)
    about = [sampling.get_state(), delta, steps, epsilon, runs, distribution, noise_of_score, accountant]
    about += [repr(choices), *(getattr(each, "__qualname__", "") for each in (train, score))]
    try:
        with Search(folder, about, payer.spending.payments, begin) as search:
            if search.state["ended"] and shows:
                print(f"The search in {folder} has ended: this is its best model.")
            release = plan_release(search.state["noise"], search.state["id"])
            payer.set_event(release.step)
            payer.spend(*release.use, release.id)
            round_up_function_numbers()
            while search.state["runs"]:
                settings = choices[search.state["runs"][0]]
                if shows:
                    print("Training with " + ", ".join(f"{name}={value}" for name, value in settings.items()))
                plan = PrivatePlan(
                    sampling=sampling, delta=delta, steps=steps, noise_multiplier=search.state["noise"],
                    accountant=accountant, make_event=make_event, l2_norm_clip=l2_norm_clip,
                )  # fmt: skip
                with numbered_from(search.state["names"]):  # the best one's names must not tell how many came before
                    trained = train(plan, **settings)
                model = trained.model if isinstance(trained, PrivateFit) else trained
                value = _noisy_mean(score(model), held_out, noise_of_score)
                release.refuse_other(model, plan.accountant)  # after the score, which might use the data, too
                if is_best := search.model is None or value > search.state["score"]:
                    release.release(model)
                search.end_run(value, model if is_best else None)
            search.end()
            round_up_function_numbers()
            payer.follow(search.model)
            return Tuned(search.model, choices[search.state["best"]], search.state["score"], payer)
    except BaseException:
        if not isinstance(ledger, Ledger):
            payer.close()
        raise


def _list_settings(space: Any) -> list[Mapping[str, Any]]:
    if isinstance(space, Mapping):
        for name, values in space.items():
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise TypeError(f"space gives each setting a list of values: {name}=[{values!r}].")
        space = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    choices: list[Mapping[str, Any]] = [dict(each) for each in space]
    if not choices:
        raise ValueError("space holds no settings to choose from.")
    return choices


def _noisy_mean(values: Any, held_out: int, noise: float) -> float:
    """The mean of one value from 0 to 1 a unit, as one Gaussian release: each moves their sum by at most 1."""
    found = np.asarray(values, np.float64)
    if found.shape != (held_out,) or not np.isfinite(found).all() or found.min() < 0 or found.max() > 1:
        raise ValueError(
            f"score must give one number from 0 to 1 for each of {held_out:,} held-out units; its answer has the shape "
            f"{found.shape}, or other numbers."
        )
    total = np.floor(found * ONE).astype(np.int64).sum(keepdims=True)
    return float(release_sums(total, noise)[0] / held_out)
