"""Random names: of samplings, which batches carry to the step that trains on them, and of iterations.

**Iterations** of a sampling's batches have random names, from which the process that began them can be read:

    name = 24 bits of this process, then 38 bits of the iteration

A draw that another process kept in a file is known for that by its iteration: two processes have the same 24 bits with
a chance of 6e-8, and a thousand iterations of one process share 38 with a chance of 2e-6, which refuses a batch.
"""

from __future__ import annotations

import secrets
import weakref
from typing import Any

NAMED: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The samplings of this process, by name."""

_ITERATION_BITS = 38
PROCESS = secrets.randbits(24)


def iteration_name(bits: Any) -> Any:
    """Name of an iteration that this process began, from random bits: an int or an int64 tensor."""
    return PROCESS * 2**_ITERATION_BITS + bits % 2**_ITERATION_BITS


def new_iteration() -> int:
    """A new random name."""
    return iteration_name(secrets.randbits(_ITERATION_BITS))


def process_of(iteration: Any) -> Any:
    """The bits of the process that began an iteration: an int or an int64 tensor."""
    return iteration // 2**_ITERATION_BITS
