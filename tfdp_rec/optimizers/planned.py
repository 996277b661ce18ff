"""`plan=` for the mechanisms: settings that a `tfdp_rec.PrivatePlan` says once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def takes_plan(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that takes what it is not given from `plan`, and shows the plan what came of it.

    Args:
        init: of a mechanism; all its settings but the first are by name.
    """

    @functools.wraps(init)
    def __init__(self: Any, learning_rate: Any, *positional: Any, plan: Any = None, **settings: Any) -> None:
        init(self, learning_rate, *positional, **(settings if plan is None else plan.complete(settings)))
        if plan is not None:
            plan.accept(self)

    own = list(inspect.signature(init).parameters.values())
    plan = inspect.Parameter("plan", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Any")
    __init__.__signature__ = inspect.Signature([*own[:-1], plan, own[-1]])  # type: ignore[attr-defined]
    return __init__
