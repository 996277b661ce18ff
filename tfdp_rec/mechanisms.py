"""The only list of the mechanisms: names, classes and properties.

A record imports its class when it is asked for, so that `tfdp-rec --help` does not wait for TensorFlow. A new mechanism
is its file, its imports in `optimizers/__init__.py` and `tfdp_rec/__init__.py`, and its record here; commands,
clusters, reports and the tests that all mechanisms must pass take it from here.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from typing import Any, Literal

NoisyRows = Literal["none", "every", "owed", "touched", "chosen"]


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """Properties of a mechanism that hold under all its settings.

    Attributes:
        name: Name on the command line and in files.
        class_name: Name of the optimizer's class.
        module: Module of the class.
        rows: Rows of a table that get noise in a step: every one; those that owe some and are about to be read; those
            that the batch touched; those that were chosen privately.
        colour: Colour in plots.
        claims_epsilon: Whether its event has a guarantee.
        own: Settings that it needs beside the common ones.
        in_order: Whether its steps must be made in one order, as correlated noise is.
        says: Name in tables and plots, if not the class's.

    Example:
        >>> lazy_dp_sgd.label, lazy_dp_sgd.served, ada_fest.served
        ('LazyDPSGD', True, False)
    """

    name: str
    class_name: str
    module: str
    rows: NoisyRows
    colour: str
    claims_epsilon: bool = True
    own: tuple[str, ...] = ()
    in_order: bool = False
    says: str = ""

    @property
    def label(self) -> str:
        """Name in tables and plots, and on the screen."""
        return self.says or self.class_name

    @property
    def served(self) -> bool:
        """Whether parameter servers offer it: a server decides about its own rows, in no fixed order of steps."""
        return self.rows != "chosen" and not self.in_order

    @property
    def kind(self) -> type:
        """The optimizer's class."""
        return getattr(importlib.import_module(self.module), self.class_name)

    def optimizer(self, learning_rate: Any, **settings: Any) -> Any:
        """A new optimizer, with the arguments of its class."""
        return self.kind(learning_rate, **settings)


# For comparison; not one of the mechanisms.
sgd = Mechanism("sgd", "SGD", "keras.optimizers", "none", "#555555", claims_epsilon=False, says="SGD (no privacy)")

dp_sgd = Mechanism("dpsgd", "DPSGD", "tfdp_rec.core.mechanism.dp_sgd", "every", "#1f77b4")
lazy_dp_sgd = Mechanism("lazydpsgd", "LazyDPSGD", "tfdp_rec.core.mechanism.lazy_dp_sgd", "owed", "#d62728")
eana = Mechanism("eana", "EANA", "tfdp_rec.sparse.eana", "touched", "#2ca02c", claims_epsilon=False)
fest = Mechanism("fest", "FEST", "tfdp_rec.sparse.fest", "chosen", "#9467bd", own=("preselection",))
ada_fest = Mechanism(
    "adafest",
    "AdaFEST",
    "tfdp_rec.sparse.ada_fest",
    "chosen",
    "#ff7f0e",
    own=("contribution_clip", "contribution_noise_multiplier", "threshold"),
)
exponential = Mechanism(
    "exponential",
    "ExponentialSelectionSGD",
    "tfdp_rec.sparse.exponential",
    "chosen",
    "#8c564b",
    own=("num_survivors", "selection_epsilon"),
    says="exponential",
)

dp_ftrl = Mechanism(
    "dpftrl", "DPFTRL", "tfdp_rec.correlated.dp_ftrl", "every", "#17becf", own=("correlation",), in_order=True
)
lazy_dp_ftrl = Mechanism(
    "lazydpftrl",
    "LazyDPFTRL",
    "tfdp_rec.correlated.lazy_dp_ftrl",
    "owed",
    "#e377c2",
    own=("correlation",),
    in_order=True,
)

MECHANISMS = (dp_sgd, lazy_dp_sgd, eana, fest, ada_fest, exponential, dp_ftrl, lazy_dp_ftrl)
COMMON = tuple(mechanism for mechanism in MECHANISMS if not mechanism.own)  # without settings of their own


def named(name: str) -> Mechanism:
    """The mechanism of that name, or `sgd`."""
    known = {mechanism.name: mechanism for mechanism in (sgd, *MECHANISMS)}
    if name not in known:
        raise ValueError(f"There is no mechanism {name!r}; there are {', '.join(known)}.")
    return known[name]


def of(optimizer: Any) -> Mechanism | None:
    """The mechanism of an optimizer; None for other optimizers, subclasses of these included."""
    kind = type(optimizer)
    return next((m for m in MECHANISMS if (m.class_name, m.module) == (kind.__name__, kind.__module__)), None)


def names(mechanisms: Iterable[Mechanism]) -> tuple[str, ...]:
    """The mechanisms' names on the command line."""
    return tuple(mechanism.name for mechanism in mechanisms)
