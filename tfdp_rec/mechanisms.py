"""The mechanisms: what each is called, where its class is, and what holds of it. The only list of them.

A record loads nothing: its class is imported when it is asked for, so that `tfdp-rec --help` need not wait for
TensorFlow. A new mechanism is its file in `optimizers`, its import in `optimizers/__init__.py` and its record here; the
commands, the plan for a cluster, the reports and the contract that every mechanism is tested against take it from here.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from typing import Any, Literal

NoisyRows = Literal["none", "every", "owed", "touched", "chosen"]


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """What holds of a mechanism, whatever its settings.

    Attributes:
        name: on the command line and in files.
        class_name: of the optimizer.
        module: where the class is.
        rows: of a table, which get noise in a step: every one; those that owe some and are about to be read; those that
            the batch touched; those that were chosen privately.
        colour: in plots.
        claims_epsilon: whether its event has a guarantee.
        own: settings that it needs beside those that all have.
        in_order: whether its steps have to be made in one order, as correlated noise is.
        says: what to call it where its class's name does not say enough.

    Example:
        >>> lazy_dp_sgd.label, lazy_dp_sgd.served, ada_fest.served
        ('LazyDPSGD', True, False)
        >>> optimizer = lazy_dp_sgd.optimizer(0.5, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=1024)
        >>> of(optimizer) is lazy_dp_sgd
        True
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
        """In tables, plots and on the screen."""
        return self.says or self.class_name

    @property
    def served(self) -> bool:
        """Whether parameter servers have it: each decides about its own rows, as steps come, and knows of no others."""
        return self.rows != "chosen" and not self.in_order

    @property
    def kind(self) -> type:
        """The optimizer's class."""
        return getattr(importlib.import_module(self.module), self.class_name)

    def optimizer(self, learning_rate: Any, **settings: Any) -> Any:
        """A fresh optimizer.

        Args:
            learning_rate: float or Keras schedule.
            **settings: l2_norm_clip, noise_multiplier, expected_batch_size, its `own`, and what else the class takes.
        """
        return self.kind(learning_rate, **settings)


sgd = Mechanism(
    "sgd", "SGD", "keras.optimizers", "none", "#555555", claims_epsilon=False, says="SGD (no privacy)"
)
"""What the mechanisms are compared with; not one of them."""

dp_sgd = Mechanism("dpsgd", "DPSGD", "tfdp_rec.optimizers.dp_sgd", "every", "#1f77b4")
lazy_dp_sgd = Mechanism("lazydpsgd", "LazyDPSGD", "tfdp_rec.optimizers.lazy.lazy_dp_sgd", "owed", "#d62728")
eana = Mechanism("eana", "EANA", "tfdp_rec.optimizers.eana", "touched", "#2ca02c", claims_epsilon=False)
fest = Mechanism("fest", "FEST", "tfdp_rec.optimizers.sparse.fest", "chosen", "#9467bd", own=("preselection",))
ada_fest = Mechanism(
    "adafest",
    "AdaFEST",
    "tfdp_rec.optimizers.sparse.ada_fest",
    "chosen",
    "#ff7f0e",
    own=("contribution_clip", "contribution_noise_multiplier", "threshold"),
)
exponential = Mechanism(
    "exponential",
    "ExponentialSelectionSGD",
    "tfdp_rec.optimizers.sparse.exponential",
    "chosen",
    "#8c564b",
    own=("num_survivors", "selection_epsilon"),
    says="exponential",
)

dp_ftrl = Mechanism(
    "dpftrl", "DPFTRL", "tfdp_rec.optimizers.dp_ftrl", "every", "#17becf", own=("correlation",), in_order=True
)
lazy_dp_ftrl = Mechanism(
    "lazydpftrl",
    "LazyDPFTRL",
    "tfdp_rec.optimizers.lazy.lazy_dp_ftrl",
    "owed",
    "#e377c2",
    own=("correlation",),
    in_order=True,
)

MECHANISMS = (dp_sgd, lazy_dp_sgd, eana, fest, ada_fest, exponential, dp_ftrl, lazy_dp_ftrl)
COMMON = tuple(mechanism for mechanism in MECHANISMS if not mechanism.own)
"""Those that the settings that all have are enough for."""


def named(name: str) -> Mechanism:
    """The mechanism of that name; `sgd` too.

    Raises:
        ValueError: there is none.

    Example:
        >>> named("dpsgd").rows
        'every'
    """
    known = {mechanism.name: mechanism for mechanism in (sgd, *MECHANISMS)}
    if name not in known:
        raise ValueError(f"There is no mechanism {name!r}; there are {', '.join(known)}.")
    return known[name]


def of(optimizer: Any) -> Mechanism | None:
    """The mechanism that an optimizer is, None if it is none of these; a subclass is another."""
    kind = type(optimizer)
    found = (m for m in MECHANISMS if (m.class_name, m.module) == (kind.__name__, kind.__module__))
    return next(found, None)


def names(mechanisms: Iterable[Mechanism]) -> tuple[str, ...]:
    """Their names on the command line."""
    return tuple(mechanism.name for mechanism in mechanisms)
