"""The command `tfdp-rec`. A subcommand is a module here with HELP, add_arguments(parser) and run(args) -> exit code.

Only the module that is asked for is imported (help reads the first line of the others' HELP from their source), so
help and accounting answer at once. `study` and `bench` gather the modules of their packages, which look the same.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

COMMANDS = (
    "train",
    "recommend",
    "export",
    "epsilon",
    "calibrate",
    "audit",
    "federate",
    "server",
    "plan",
)
GROUPS = {
    "study": ("tfdp_rec.studies", "repeat a published experiment"),
    "bench": ("tfdp_rec.benchmarks", "measure speed and memory"),
}

DESCRIPTION = """\
Differentially private training of recommenders.

  tfdp-rec train                                    train the main job on embedded data
  tfdp-rec calibrate --epsilon 8 --units 110794 --batch-size 1024 --steps 2000 --delta 1e-6
  tfdp-rec epsilon --noise-multiplier 1.0 --units 110794 --batch-size 1024 --steps 2000 --delta 1e-6

Each command explains itself: tfdp-rec COMMAND --help
"""


class _Parser(argparse.ArgumentParser):
    """Answers a wrong argument in one line, and nothing else."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tfdp-rec`.

    Args:
      argv: the arguments; sys.argv's if left out.

    Returns:
      The exit code: 0; 1 for a check that failed; 2 for a wrong argument; 130 after Ctrl-C.

    Example:
      >>> main("epsilon --noise-multiplier 2 --units 1000 --batch-size 10 --steps 100 --delta 1e-4 --rdp".split())
      epsilon = 0.1913 at delta = 0.0001 (RDP, Poisson sampling, q = 0.01)
      0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser(arguments).parse_args(arguments)
    if os.environ.get("TFDP_REC_DEBUG"):
        return args.run(args)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("tfdp-rec: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as problem:
        message = " ".join(str(problem).split()) or type(problem).__name__
        print(f"tfdp-rec: error: {message} (TFDP_REC_DEBUG=1 shows where)", file=sys.stderr)
        return 2


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    """The parser. Only the module that the arguments ask for is imported; the others just lend their headlines."""
    asked, member = [*arguments, "", ""][:2]
    parser = _Parser(prog="tfdp-rec", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = _subcommands(parser)
    for name in COMMANDS:
        _add(commands, name, f"tfdp_rec.cli.{name}", asked)
    for group, (package, purpose) in GROUPS.items():
        members = _subcommands(commands.add_parser(group, help=purpose, description=purpose))
        for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
            module = f"{package}.{info.name}"
            if _headline(module):
                _add(members, info.name.replace("_", "-"), module, member if asked == group else "")
    return parser


def _headline(module: str) -> str:
    """The first line of a module's HELP, read from its source; empty if it has none."""
    origin = importlib.util.find_spec(module)
    if origin is None or origin.origin is None:
        raise ModuleNotFoundError(f"tfdp-rec lists {module}, which is not there.")
    for node in ast.parse(Path(origin.origin).read_text(encoding="utf-8")).body:
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(getattr(t, "id", "") == "HELP" for t in targets):
            return str(ast.literal_eval(node.value)).split("\n")[0] if node.value else ""
    return ""


def _subcommands(parser: argparse.ArgumentParser) -> argparse._SubParsersAction:
    return parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)


def _add(commands: argparse._SubParsersAction, name: str, module: str, asked: str) -> None:
    parser = commands.add_parser(
        name, help=_headline(module).replace("%", "%%"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if name == asked:
        command = importlib.import_module(module)
        parser.description = command.HELP
        command.add_arguments(parser)
        parser.set_defaults(run=command.run)
