"""The statement of a guarantee.

The first lines hold in general. TF Privacy's text follows if its assumptions hold: Poisson sampling, one Gaussian of
constant noise per step, one row per unit, and no other use of the data.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import ModuleType

import dp_accounting
from dp_accounting import DpEvent

from tfdp_rec.pricing import events
from tfdp_rec.sampling.schemes import Sampling
from tfdp_rec.spending.filters import PrivacyFilter
from tfdp_rec.spending.ledger import used
from tfdp_rec.spending.ledger_lines import Chain


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


@dataclasses.dataclass(frozen=True)
class Facts:
    """Contents of a statement."""

    sampling: Sampling
    runs: Sequence[tuple[DpEvent, int]]  # (event, steps), in order
    spent_besides: Sequence[tuple[DpEvent, str]]  # (event, label) of other uses of the data
    epsilon: float  # of everything, at δ
    delta: float
    accountant: str
    void: str  # reason why no ε holds
    checked: bool  # whether every batch carried the proof of its draw
    asserted: str  # what drew the batches, if `sampling` did not
    made: bool  # whether any step was made
    ordinary: Mapping[str, int]  # steps after private training, by name of their optimizer
    chain: Chain | None  # ledger that everything was paid in

    @property
    def limit(self) -> PrivacyFilter | None:
        """The ledger's privacy filter, if it has one."""
        return self.chain.limit if self.chain else None


def statement(facts: Facts) -> Statement:
    """The statement of a guarantee."""
    theirs = tf_privacy_statement(facts)
    heading = (
        f"TF Privacy's statement (its «example» is one {facts.sampling.unit} here; the batches are "
        "really Poisson-sampled,\nso the second of its two figures is the one that holds):"
    )
    return Statement(dict(_own_lines(facts)), f"{heading}\n\n{theirs}" if theirs else "")


def _own_lines(facts: Facts) -> list[tuple[str, str]]:
    sampling, unit = facts.sampling, facts.sampling.unit
    mechanism = "; ".join(f"{count} steps of {events.in_words(event)}" for event, count in facts.runs)
    spent = "; ".join(f"{label}: {events.in_words(event)}" for event, label in facts.spent_besides)
    library = f"dp-accounting {importlib.metadata.version('dp-accounting')}"
    lines = [
        ("Guarantee", _guarantee(facts)),
        ("Protected unit", f"one {unit}, giving at most one row to any batch"),
        ("Adjacency", f"{sampling.adjacency}: data sets that differ by one {unit} whose rows count as empty"),
        ("Sampling", _sampling(facts)),
        ("Mechanism", mechanism or "no step yet"),
        ("Spent besides", spent),
        ("Ledger", _ledger(facts.chain)),
        ("Accountant", f"{facts.limit or facts.accountant.upper()}, {library}"),
        ("Public", f"the number of {unit}s, {sampling.num_units}, and with it the batch size and sampling rate"),
        ("Covers", "" if math.isinf(facts.epsilon) else _COVERS),
        ("Does not cover", "; ".join([*_ordinary(facts.ordinary), _DOES_NOT_COVER, *_fixed(facts)])),
    ]
    return [(name, text) for name, text in lines if text]


_COVERS = "every set of weights that leaves training by a released model or checkpoint"
_DOES_NOT_COVER = (
    "an observer of the training's memory, of the units that were sampled, or of losses and metrics of training data; "
    "choosing hyper-parameters on the same data; steps, rates or noise that were chosen after looking at exact losses "
    "or metrics of training data (EarlyStopping, ReduceLROnPlateau, TerminateOnNaN, or any callback)"
)


def _fixed(facts: Facts) -> list[str]:
    if facts.limit is not None:
        return []
    return [
        "steps, rates or noise that were chosen, or a stop that was decided, after looking at weights that were "
        "released before: the total is of a plan that was fixed beforehand, and no odometer"
    ]


def _ordinary(steps_by_optimizer: Mapping[str, int]) -> list[str]:
    return [
        f"{steps} steps of {name} that were made after private training, which no epsilon covers unless they were made "
        "on public data"
        for name, steps in steps_by_optimizer.items()
    ]


def _guarantee(facts: Facts) -> str:
    if facts.void:
        return f"none: epsilon is infinite, since {facts.void}"
    if math.isinf(facts.epsilon):
        return (
            "none: epsilon is infinite. This mechanism has no (epsilon, delta) guarantee at any delta; what "
            "can be said of it is a data-dependent bound (EANA) or a measured exposure"
        )
    return f"(epsilon = {rounded_up(facts.epsilon):g}, delta = {facts.delta:g})-differential privacy"


def _sampling(facts: Facts) -> str:
    said = facts.sampling.describe()
    if facts.asserted:
        return f"{said}; asserted, not checked: {facts.asserted}"
    if not facts.checked:
        return f"{said}; steps recorded by hand are asserted, not checked"
    return f"{said}; every batch carried the proof of its draw" if facts.made else said


def _ledger(chain: Chain | None) -> str:
    if chain is None:
        return ""
    place = f"line {len(chain.lines)}, {chain.head[:16]}; {kind_of(chain)}"
    return f"all of it was paid for in ledger {chain.id} before it was done; {place}"


def kind_of(chain: Chain) -> str:
    """What a ledger's payments may depend on, as text."""
    if chain.limit is None:
        return "payments fixed in advance"
    share = f"{used(chain):.2%} of it is used"
    return f"filter: payments may depend on earlier releases, and the claim is its budget; {share}"


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


def fields_of(text: str) -> dict[str, str]:
    r"""The fields of a statement's text, by name.

    Example:
        >>> fields_of("Guarantee:      none: it\n                is a test.\nCovers:         nothing.\n\nMore: words.")
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


def tf_privacy_statement(facts: Facts) -> str | None:
    """TF Privacy's text; None if it is not installed, or if an assumption of it does not hold."""
    if facts.void or facts.limit or facts.spent_besides or len(facts.runs) != 1:
        return None
    event, count = _unpacked(facts.sampling.compose_history(facts.runs))
    library = _tf_privacy()
    if library is None or event is None:
        return None
    batch_size = event.sampling_probability * facts.sampling.num_units
    return library.compute_dp_sgd_privacy_statement(
        number_of_examples=facts.sampling.num_units,
        batch_size=int(batch_size) if batch_size == round(batch_size) else batch_size,
        num_epochs=_epochs(count, batch_size / facts.sampling.num_units),
        noise_multiplier=event.event.noise_multiplier,
        delta=facts.delta,
        used_microbatching=False,
        max_examples_per_user=1,
        accountant_type=library.AccountantType[facts.accountant.upper()],
    )


def _unpacked(event: DpEvent) -> tuple[DpEvent | None, int]:
    """(event, count) of a repeated Poisson-sampled Gaussian; (None, 0) for other events."""
    if not isinstance(event, dp_accounting.SelfComposedDpEvent) or not events.is_private(event):
        return None, 0
    sampled = event.event
    if isinstance(sampled, dp_accounting.PoissonSampledDpEvent) and isinstance(
        sampled.event, dp_accounting.GaussianDpEvent
    ):
        return sampled, event.count
    return None, 0


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
