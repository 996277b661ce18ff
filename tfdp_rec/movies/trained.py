"""What a contestant of the main job left behind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tfdp_rec.metrics import Mean
from tfdp_rec.spending.accountant import Accountant


@dataclasses.dataclass(frozen=True)
class Trained:
    """A recommender, what it cost and what it is worth.

    Attributes:
        model: with `save(path)` and `export(path, k=...)`.
        means: on the test users.
        epsilon: spent on it in all, on it alone; infinite where nothing is private.
        statement: what is promised; empty where nothing is private.
        noise_multiplier: None where there is none.
        steps: that were made; None where nothing is trained.
        steps_per_second: None if there were too few to tell.
    """

    model: Any
    means: Mapping[str, Mean]
    epsilon: float = math.inf
    statement: str = ""
    noise_multiplier: float | None = None
    steps: int | None = None
    steps_per_second: float | None = None

    def accounted(self, accountant: Accountant | None, noise_multiplier: float) -> Trained:
        """With what its steps cost.

        Args:
            accountant: of the steps; None where nothing is private.
            noise_multiplier: σ.
        """
        if accountant is None:
            return self
        return dataclasses.replace(
            self, epsilon=accountant.epsilon(), statement=accountant.statement(), noise_multiplier=noise_multiplier
        )

    def record(self, name: str) -> dict[str, Any]:
        """The line of results.json."""
        return {
            "mechanism": name,
            **measured_record(self.means),
            "steps": self.steps,
            "steps_per_second": self.steps_per_second,
            "epsilon": self.epsilon,
            "noise_multiplier": self.noise_multiplier,
        }


def measured_record(means: Mapping[str, Mean]) -> dict[str, Any]:
    """What was measured, for files: means, their standard errors, and of how many users."""
    recalls = {name: mean.value for name, mean in means.items()}
    ks = [int(name.split("@")[1]) for name in means if name.startswith("recall")]
    recalls |= {f"precision@{k}": means[f"recall@{k}"].value / k for k in ks}
    return {
        "recalls": recalls,
        "errors": {name: mean.error for name, mean in means.items()},
        "test_users": next(iter(means.values())).users,
    }
