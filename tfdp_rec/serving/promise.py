"""What the statement beside a model promises, read from its text; without TensorFlow."""

from __future__ import annotations

import re
from typing import Any


def describe_statement(text: str) -> dict[str, Any]:
    """The statement of what is served; ε and δ are null where there is none, or where it promises nothing."""
    promised = re.match(r"Guarantee: +\(epsilon = ([\d.e+-]+), delta = ([\d.e+-]+)\)-differential privacy\.\n", text)
    epsilon, delta = map(float, promised.groups()) if promised else (None, None)
    message = "" if text else "There is no statement beside this model: no epsilon is known of it."
    return {"epsilon": epsilon, "delta": delta, "statement": text, "message": message}
