"""The statement of a guarantee.

The first lines hold in general. TF Privacy's text follows if its assumptions hold: Poisson sampling, one Gaussian of
constant noise per step, one row per unit, and no other use of the data.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import ModuleType

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

from tfdp_rec.core.claim import events
from tfdp_rec.core.claim.events import RepeatAndSelectDpEvent
from tfdp_rec.core.claim.filters import PrivacyFilter
from tfdp_rec.core.claim.schemes import Sampling


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


def statement(
    *, sampling: Sampling, epsilon: float, delta: float, whole: ComposedDpEvent, runs: Sequence[tuple[DpEvent, int]],
    besides: Sequence[tuple[DpEvent, str]], ordinary: Mapping[str, int], void: str, made: bool,
    ledger: str, limit: PrivacyFilter | None, accountant: str,
) -> Statement:  # fmt: skip
    """The statement of an accountant's guarantee: `whole` is all that was spent, `runs` and `besides` its parts."""
    unit, drawn = sampling.unit, sampling.describe()
    if made and not void:
        drawn += "; every batch carried the proof of its draw"
    held = epsilon if not ordinary else math.inf
    kept = [CHOICE] if not any(isinstance(each, RepeatAndSelectDpEvent) for each, _ in besides) else [_SECRET]
    fields = {
        "Guarantee": _guarantee(void, epsilon, delta, ordinary),
        "Protected unit": f"one {unit}, giving at most one row to any batch",
        "Adjacency": f"{sampling.adjacency}: data sets that differ by one {unit}, which contributes nothing in one of "
        "them",
        "Sampling": drawn,
        "Mechanism": "; ".join(f"{n} steps of {events.describe(each)}" for each, n in runs) or "no step yet",
        "Spent besides": "; ".join(f"{label}: {events.describe(each)}" for each, label in besides),
        "Ledger": ledger,
        "Accountant": f"{limit or accountant.upper()}, dp-accounting {importlib.metadata.version('dp-accounting')}",
        "Public": f"the number of {unit}s, {sampling.num_units}, and with it the batch size and sampling rate",
        "Covers": "" if math.isinf(held) else _COVERS,
        "Does not cover": "; ".join([OBSERVERS, *kept, LOOKED_AT, *([] if limit else [FIXED])]),
    }
    # A filter's claim is no composition's, and what has no guarantee has no ε to agree with.
    theirs = None if math.isinf(held) or limit else _tf_privacy_statement(sampling.num_units, delta, whole, accountant)
    heading = (
        f"TF Privacy's statement (its «example» is one {unit} here; the batches are really Poisson-sampled,\n"
        "so the second of its two figures is the one that holds):"
    )
    return Statement({name: said for name, said in fields.items() if said}, f"{heading}\n\n{theirs}" if theirs else "")


_COVERS = "every set of weights that leaves training by a released model or checkpoint"
OBSERVERS = (
    "an observer of the training's memory, of the units that were sampled, or of losses and metrics of training data"
)
CHOICE = "choosing hyper-parameters on the same data"
_SECRET = (
    "who learns how many trainings there were, of which the best was released, or sees the model or the score of "
    "another one"
)
LOOKED_AT = (
    "steps, rates or noise that were chosen after looking at exact losses or metrics of training data (EarlyStopping, "
    "ReduceLROnPlateau, TerminateOnNaN, or any callback)"
)
FIXED = (
    "steps, rates or noise that were chosen, or a stop that was decided, after looking at weights that were "
    "released before: the total is of a plan that was fixed beforehand, and no odometer"
)


def _guarantee(void: str, epsilon: float, delta: float, ordinary: Mapping[str, int]) -> str:
    if void:
        return f"none: epsilon is infinite, since {void}"
    if math.isinf(epsilon):
        return (
            "none: epsilon is infinite. This mechanism has no (epsilon, delta) guarantee at any delta; what "
            "can be said of it is a data-dependent bound (EANA) or a measured exposure"
        )
    said = f"(epsilon = {round_up(epsilon):g}, delta = {delta:g})-differential privacy"
    if ordinary:
        steps = " and ".join(f"{steps} steps of {name}" for name, steps in ordinary.items())
        return (
            f"none, since {steps} before or after private training are covered by no epsilon, unless they were made on "
            f"public data. The private training alone has {said}"
        )
    return said


def round_up(epsilon: float) -> float:
    """ε to four digits, rounded up; less than 10^-12 of it is taken for an error of floating point.

    Example:
        >>> round_up(2.71412), round_up(12.0)
        (2.715, 12.0)
    """
    if epsilon == 0 or math.isinf(epsilon):
        return epsilon
    digits = 3 - math.floor(math.log10(epsilon))
    return math.ceil(round(epsilon * 10.0**digits, 9)) / 10.0**digits


def _tf_privacy_statement(units: int, delta: float, whole: ComposedDpEvent, accountant: str) -> str | None:
    """TF Privacy's text; None if it is not installed, or if an assumption of it does not hold."""
    library, repeated = _tf_privacy(), whole.events[0] if len(whole.events) == 1 else None
    if library is None or not isinstance(repeated, SelfComposedDpEvent) or not events.is_private(repeated):
        return None
    step = repeated.event
    if not isinstance(step, PoissonSampledDpEvent) or not isinstance(step.event, GaussianDpEvent):
        return None
    batch_size = step.sampling_probability * units
    return library.compute_dp_sgd_privacy_statement(
        number_of_examples=units, batch_size=int(batch_size) if batch_size == round(batch_size) else batch_size,
        num_epochs=_epochs(repeated.count, batch_size / units), noise_multiplier=step.event.noise_multiplier,
        delta=delta, used_microbatching=False, max_examples_per_user=1,
        accountant_type=library.AccountantType[accountant.upper()],
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
