"""The constructors of the mechanisms: each names what it adds, and passes `**settings` on to the one that it stands on.

`plan=` takes what is not given from a `tfdp_rec.PrivatePlan`, which says it once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def takes_plan(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor whose missing settings come from `plan`, which then sees the optimizer."""
    @functools.wraps(init)
    def __init__(self: Any, learning_rate: Any, *positional: Any, plan: Any = None, **settings: Any) -> None:
        init(self, learning_rate, *positional, **(settings if plan is None else plan.complete(settings)))
        if plan is not None:
            plan.accept(self)

    own = list(inspect.signature(init).parameters.values())
    plan = inspect.Parameter("plan", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Any")
    __init__.__signature__ = inspect.Signature([*own[:-1], plan, own[-1]])  # type: ignore[attr-defined]
    return __init__


def signature_of(kind: type, base: type) -> inspect.Signature:
    """All settings by name: the mechanism's own, and those of its bases down to `base`."""
    found: dict[str, inspect.Parameter] = {}
    for each in reversed(kind.__mro__[: kind.__mro__.index(base) + 1]):
        own = inspect.signature(each.__init__).parameters  # type: ignore[misc]
        found |= {name: parameter for name, parameter in own.items() if name != "settings"}
    del found["self"]
    return inspect.Signature(sorted(found.values(), key=lambda p: (p.kind, p.default is not p.empty)))
