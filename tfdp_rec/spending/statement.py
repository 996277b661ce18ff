"""The statement of a guarantee.

The first lines hold in general. TF Privacy's text follows if its assumptions hold: Poisson sampling, one Gaussian of
constant noise per step, one row per unit, and no other use of the data.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
import textwrap
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeAlias

from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

from tfdp_rec.pricing import events
from tfdp_rec.spending.ledger import Chain

Accountant: TypeAlias = Any  # `spending.accountant.Accountant`, whose file imports this one


class Statement(str):
    """A guarantee as text, and the fields that it is made of.

    Args:
        fields: Text of each field by its name, in order.
        more: Text that follows the fields.

    Attributes:
        fields: Text of each field by its name.

    Example:
        >>> said = Statement({"Guarantee": "none", "Covers": "nothing"})
        >>> print(said, end="")
        Guarantee:      none.
        Covers:         nothing.
        >>> said.fields["Covers"]
        'nothing'
    """

    fields: Mapping[str, str]

    def __new__(cls, fields: Mapping[str, str], more: str = "") -> Statement:
        lines = "\n".join(
            textwrap.fill(f"{name + ':':<16}{said}.", 100, subsequent_indent=" " * 16) for name, said in fields.items()
        )
        made = super().__new__(cls, f"{lines}\n\n{more}" if more else f"{lines}\n")
        made.fields = fields
        return made


def statement(accountant: Accountant, steps: int) -> Statement:
    """The statement of a guarantee after some number of steps."""
    theirs = tf_privacy_statement(accountant, steps)
    heading = (
        f"TF Privacy's statement (its «example» is one {accountant.sampling.unit} here; the batches are "
        "really Poisson-sampled,\nso the second of its two figures is the one that holds):"
    )
    return Statement(dict(_own_lines(accountant, steps)), f"{heading}\n\n{theirs}" if theirs else "")


def _own_lines(accountant: Accountant, steps: int) -> list[tuple[str, str]]:
    sampling, unit, epsilon = accountant.sampling, accountant.sampling.unit, accountant.epsilon(steps)
    runs, ordinary = accountant.runs(steps), accountant.carried.ordinary
    library = f"dp-accounting {importlib.metadata.version('dp-accounting')}"
    lines = [
        ("Guarantee", _guarantee(accountant, epsilon)),
        ("Protected unit", f"one {unit}, giving at most one row to any batch"),
        ("Adjacency", f"{sampling.adjacency}: data sets that differ by one {unit} whose rows count as empty"),
        ("Sampling", _sampling(accountant)),
        ("Mechanism", "; ".join(f"{n} steps of {events.in_words(each)}" for each, n in runs) or "no step yet"),
        ("Spent besides", "; ".join(f"{label}: {events.in_words(e)}" for e, label in accountant.spent_besides)),
        ("Ledger", _ledger(accountant.payments.ledger) if accountant.payments else ""),
        ("Accountant", f"{accountant.limit or accountant.accountant.upper()}, {library}"),
        ("Public", f"the number of {unit}s, {sampling.num_units}, and with it the batch size and sampling rate"),
        ("Covers", "" if math.isinf(epsilon) else _COVERS),
        ("Does not cover", "; ".join([*_ordinary(ordinary), _DOES_NOT_COVER, *([] if accountant.limit else [_FIXED])])),
    ]
    return [(name, text) for name, text in lines if text]


_COVERS = "every set of weights that leaves training by a released model or checkpoint"
_DOES_NOT_COVER = (
    "an observer of the training's memory, of the units that were sampled, or of losses and metrics of training data; "
    "choosing hyper-parameters on the same data; steps, rates or noise that were chosen after looking at exact losses "
    "or metrics of training data (EarlyStopping, ReduceLROnPlateau, TerminateOnNaN, or any callback)"
)


_FIXED = (
    "steps, rates or noise that were chosen, or a stop that was decided, after looking at weights that were "
    "released before: the total is of a plan that was fixed beforehand, and no odometer"
)


def _ordinary(steps_by_optimizer: Mapping[str, int]) -> list[str]:
    return [
        f"{steps} steps of {name} that were made after private training, which no epsilon covers unless they were made "
        "on public data"
        for name, steps in steps_by_optimizer.items()
    ]


def _guarantee(accountant: Accountant, epsilon: float) -> str:
    if accountant.void:
        return f"none: epsilon is infinite, since {accountant.void}"
    if math.isinf(epsilon):
        return (
            "none: epsilon is infinite. This mechanism has no (epsilon, delta) guarantee at any delta; what "
            "can be said of it is a data-dependent bound (EANA) or a measured exposure"
        )
    return f"(epsilon = {rounded_up(epsilon):g}, delta = {accountant.delta:g})-differential privacy"


def _sampling(accountant: Accountant) -> str:
    said = accountant.sampling.describe()
    if accountant.asserted:
        return f"{said}; asserted, not checked: {accountant.asserted}"
    if not accountant.checked:
        return f"{said}; steps recorded by hand are asserted, not checked"
    return f"{said}; every batch carried the proof of its draw" if accountant.steps else said


def _ledger(chain: Chain) -> str:
    place = f"line {len(chain.lines)}, {chain.head[:16]}; {kind_of(chain)}"
    return f"all of it was paid for in ledger {chain.id} before it was done; {place}"


def kind_of(chain: Chain) -> str:
    """What a ledger's payments may depend on, as text."""
    if chain.limit is None:
        return "payments fixed in advance"
    share = f"{chain.used:.2%} of it is used"
    return f"filter: payments may depend on earlier releases, and the claim is its budget; {share}"


def rounded_up(epsilon: float) -> float:
    """ε to four digits, rounded up; less than 10^-12 of it is taken for an error of floating point.

    Example:
        >>> rounded_up(2.71412), rounded_up(12.0)
        (2.715, 12.0)
    """
    if epsilon == 0 or math.isinf(epsilon):
        return epsilon
    digits = 3 - math.floor(math.log10(epsilon))
    return math.ceil(round(epsilon * 10.0**digits, 9)) / 10.0**digits


def tf_privacy_statement(accountant: Accountant, steps: int) -> str | None:
    """TF Privacy's text; None if it is not installed, or if an assumption of it does not hold."""
    runs, sampling = accountant.runs(steps), accountant.sampling
    if accountant.void or accountant.limit or accountant.spent_besides or len(runs) != 1:
        return None
    repeated, library = sampling.compose_history(runs), _tf_privacy()
    if library is None or not isinstance(repeated, SelfComposedDpEvent) or not events.is_private(repeated):
        return None
    step = repeated.event
    if not isinstance(step, PoissonSampledDpEvent) or not isinstance(step.event, GaussianDpEvent):
        return None
    batch_size = step.sampling_probability * sampling.num_units
    return library.compute_dp_sgd_privacy_statement(
        number_of_examples=sampling.num_units,
        batch_size=int(batch_size) if batch_size == round(batch_size) else batch_size,
        num_epochs=_epochs(repeated.count, batch_size / sampling.num_units),
        noise_multiplier=step.event.noise_multiplier,
        delta=accountant.delta,
        used_microbatching=False,
        max_examples_per_user=1,
        accountant_type=library.AccountantType[accountant.accountant.upper()],
    )


def _epochs(steps: int, probability: float) -> float:
    # TF Privacy makes ceil(epochs / q) steps of them, which must not be one too many by rounding.
    epochs = steps * probability
    while math.ceil(epochs / probability) > steps:
        epochs = math.nextafter(epochs, 0)
    return epochs


def _tf_privacy() -> ModuleType | None:
    # The whole package fails to import beside TensorFlow ≥ 2.16. Its switch for stand-alone scripts leaves the broken
    # part out, and is set for this import alone.
    switch = "skip_tf_privacy_import"
    was_set = hasattr(sys, switch)
    setattr(sys, switch, True)
    try:
        from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib
    except ImportError:
        return None
    finally:
        if not was_set:
            delattr(sys, switch)
    return compute_dp_sgd_privacy_lib
