"""The guarantee in words. Our own lines say what holds; TF Privacy's text follows where it makes our
assumptions.

Those are: Poisson sampling, one Gaussian of constant noise a step, one row a unit, and nothing spent besides.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
import textwrap
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import dp_accounting
from dp_accounting import DpEvent

from tfdp_rec.privacy import events

if TYPE_CHECKING:
    from tfdp_rec.spending.accountant import Accountant


class Statement(str):
    """A guarantee in words: text to print or write, and the fields that it is made of.

    Args:
        fields: Name -> what the statement says there, in order.
        more: Text that follows the fields.

    Attributes:
        fields: As given.

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


def statement(accountant: Accountant, steps: int | None = None) -> Statement:
    """The privacy statement of `steps` steps; see `Accountant.statement`."""
    if accountant.payments is not None:
        accountant.payments.ledger.refuse_lost()
    count = accountant.steps if steps is None else steps
    theirs = tf_privacy_statement(accountant, count)
    heading = (
        f"TF Privacy's statement (its «example» is one {accountant.sampling.unit} here; the batches are "
        "really Poisson-sampled,\nso the second of its two figures is the one that holds):"
    )
    return Statement(dict(_own_lines(accountant, count)), f"{heading}\n\n{theirs}" if theirs else "")


def _own_lines(accountant: Accountant, steps: int) -> list[tuple[str, str]]:
    sampling, unit = accountant.sampling, accountant.sampling.unit
    mechanism = "; ".join(f"{count} steps of {events.in_words(event)}" for event, count in accountant.runs(steps))
    spent = "; ".join(f"{label}: {events.in_words(event)}" for event, label in accountant.spent_besides)
    library = f"dp-accounting {importlib.metadata.version('dp-accounting')}"
    lines = [
        ("Guarantee", _guarantee(accountant, steps)),
        ("Protected unit", f"one {unit}, giving at most one row to any batch"),
        ("Adjacency", _ADJACENCIES[sampling.adjacency].format(unit=unit)),
        ("Sampling", _sampling(accountant)),
        ("Mechanism", mechanism or "no step yet"),
        ("Spent besides", spent),
        ("Ledger", _ledger(accountant)),
        ("Accountant", f"{accountant.accountant.upper()}, {library}"),
        (
            "Public",
            f"the number of {unit}s, {sampling.num_units}, and with it the batch size and sampling rate",
        ),
        ("Covers", _covers(accountant, steps)),
        ("Does not cover", "; ".join([*_ordinary(accountant), _DOES_NOT_COVER])),
    ]
    return [(name, text) for name, text in lines if text]


_DOES_NOT_COVER = (
    "an observer of the training's memory, of the units that were sampled, or of losses and metrics of training data; "
    "choosing hyper-parameters on the same data; steps, rates or noise that were chosen after looking at exact losses "
    "or metrics of training data (EarlyStopping, ReduceLROnPlateau, TerminateOnNaN, any callback), or at "
    "weights that were released before: the total is of a plan that was fixed beforehand"
)
_ADJACENCIES = {
    "add-or-remove-one": "add-or-remove-one: data sets that differ by one {unit} present or absent; the number of "
    "{unit}s is public, so that an absent one is drawn as an empty row",
    "zero-out": "zero-out: data sets that differ by one {unit} whose rows count as empty",
}


def _ordinary(accountant: Accountant) -> list[str]:
    return [
        f"{steps} steps of {name} that were made after private training, which no epsilon covers unless they were made "
        "on public data"
        for name, steps in accountant.carried.ordinary.items()
    ]


def _guarantee(accountant: Accountant, steps: int) -> str:
    epsilon = accountant.epsilon(steps)
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


def _ledger(accountant: Accountant) -> str:
    if accountant.payments is None:
        return ""
    mark = accountant.payments.ledger.mark
    return f"all of it was paid for in ledger {mark.ledger} before it was done; line {mark.lines}, {mark.head[:16]}"


def rounded_up(epsilon: float) -> float:
    """ε to four digits, never less than it is.

    Example:
        >>> rounded_up(2.71412), rounded_up(12.0)
        (2.715, 12.0)
    """
    if epsilon == 0 or math.isinf(epsilon):
        return epsilon
    digits = 3 - math.floor(math.log10(epsilon))
    return math.ceil(round(epsilon * 10.0**digits, 6)) / 10.0**digits


def entries(text: str) -> dict[str, str]:
    r"""What a statement says, by the names that its own lines begin with.

    Args:
        text: of a statement.

    Example:
        >>> entries("Guarantee:      none: it\n                is a test.\nCovers:         nothing.\n\nMore: words.")
        {'Guarantee': 'none: it is a test.', 'Covers': 'nothing.'}
    """
    found: dict[str, list[str]] = {}
    for line in text.strip().split("\n\n")[0].splitlines():
        name, said = line[:16].strip(), line[16:].strip()
        if name:
            found[name.removesuffix(":")] = [said]
        else:
            found[list(found)[-1]].append(said)
    return {name: " ".join(words) for name, words in found.items()}


def _covers(accountant: Accountant, steps: int) -> str:
    if math.isinf(accountant.epsilon(steps)):
        return ""
    return "every set of weights that leaves training by a released model or checkpoint"


def tf_privacy_statement(accountant: Accountant, steps: int) -> str | None:
    """TF Privacy's own text, or None where it is not installed or assumes something that does not hold
    here.
    """
    runs = accountant.runs(steps)
    if accountant.void or accountant.spent_besides or len(runs) != 1:
        return None
    event, count = _unpacked(accountant.sampling.compose_history(runs))
    library = _tf_privacy()
    if library is None or event is None:
        return None
    batch_size = event.sampling_probability * accountant.sampling.num_units
    return library.compute_dp_sgd_privacy_statement(
        number_of_examples=accountant.sampling.num_units,
        batch_size=int(batch_size) if batch_size == round(batch_size) else batch_size,
        num_epochs=_epochs(count, batch_size / accountant.sampling.num_units),
        noise_multiplier=event.event.noise_multiplier,
        delta=accountant.delta,
        used_microbatching=False,
        max_examples_per_user=1,
        accountant_type=library.AccountantType[accountant.accountant.upper()],
    )


def _unpacked(event: DpEvent) -> tuple[DpEvent | None, int]:
    """The Poisson-sampled Gaussian and its count, if that is what the event is."""
    if not isinstance(event, dp_accounting.SelfComposedDpEvent) or not events.is_private(event):
        return None, 0
    sampled = event.event
    if isinstance(sampled, dp_accounting.PoissonSampledDpEvent) and isinstance(
        sampled.event, dp_accounting.GaussianDpEvent
    ):
        return sampled, event.count
    return None, 0


def _epochs(steps: int, probability: float) -> float:
    """Epochs that TF Privacy's ceil(epochs / q) turns back into exactly `steps`."""
    epochs = steps * probability
    while math.ceil(epochs / probability) > steps:
        epochs = math.nextafter(epochs, 0)
    return epochs


def _tf_privacy() -> ModuleType | None:
    """TF Privacy's analysis module. The whole package fails to import beside TensorFlow ≥ 2.16; its own
    switch for stand-alone scripts leaves the broken part out, and is set for this one import only.
    """
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
