"""`tfdp-rec doctor`.

  tfdp-rec doctor my_module:model_fn

model_fn takes no arguments and returns (model, batch): a Keras model, compiled if its loss is given to compile, and a
batch of any values in the form of the training data. Nothing is trained. The exit code is 0 if a private step is
possible, and 1 if anything is refused. my_module may be in the folder where the command is run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `doctor`."""
    parser.add_argument("model", metavar="MODULE:FUNCTION", help="function that returns (model, batch)")


def run(args: argparse.Namespace) -> int:
    """Prints the report."""
    function = _function(args.model)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfdp_rec.training.validation import validate

    made = function()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"{args.model} must return (model, batch), got {type(made).__name__}.")
    report = validate(*made)
    print(report)
    return 0 if report.ok else 1


def _function(named: str) -> Any:
    module, _, name = named.partition(":")
    if not module or not name:
        raise ValueError(f"the model must be MODULE:FUNCTION, such as my_module:model_fn, got {named!r}.")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as problem:
        raise ValueError(f"there is no module {problem.name} in this folder or on Python's path.") from problem
    function = getattr(found, name, None)
    if not callable(function):
        raise ValueError(f"module {module} has no function {name}.")
    return function
