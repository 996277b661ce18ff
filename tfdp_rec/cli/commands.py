"""A program made of a list of commands: one parser, one form of errors; only the command in use is imported.

A command's module has a docstring, whose later paragraphs are its help (examples and details), `add_arguments(parser)`
and `run(args)`, which returns the exit code: 0; 1 for a check that failed; 2 for a wrong argument; 128 and the signal's
number if a signal ended it: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import errno
import importlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from tfdp_rec.core.ground import interruption


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of a program."""

    name: str
    module: str  # imported when the command is used
    headline: str


class Parser(argparse.ArgumentParser):
    """Parser that reports a wrong argument in one line."""

    used: Parser | None = None  # of the command that was given, which knows its options

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        option, of = re.match(r"unrecognized arguments: (--[\w-]+)", message), self.used or self
        near = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), 1) if wrong else []
        near += difflib.get_close_matches(option[1], re.findall(r"--[\w-]+", of.format_usage()), 1) if option else []
        message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{of.prog}: error: {message} (see {of.prog} --help)\n")


def run(
    program: str, description: str, commands: Sequence[Command], argv: Sequence[str] | None = None, version: str = ""
) -> int:
    """Runs the command that the arguments name; returns the exit code.

    Args:
        program: Name of the program.
        description: Text of its help.
        commands: Its commands.
        argv: Arguments; those of the process if left out.
        version: Version of the program; empty for none.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog=program)
    _describe(parser, description)
    if version:
        parser.add_argument("--version", action="version", version=f"{program} {version}")
    members = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for command in commands:
        member = members.add_parser(command.name, help=command.headline.replace("%", "%%"))
        if command.name in given[:1]:
            _fill(member, command)
            parser.used = member
    return _answer(parser, given)


def run_one(program: str, command: Command, argv: Sequence[str] | None = None) -> int:
    """Runs a program that is one command; returns the exit code."""
    parser = Parser(prog=program)
    _fill(parser, command)
    return _answer(parser, list(sys.argv[1:] if argv is None else argv))


def _fill(parser: argparse.ArgumentParser, command: Command) -> None:
    module = importlib.import_module(command.module)
    details = (module.__doc__ or "").partition("\n\n")[2]
    _describe(parser, f"{command.headline}\n\n{details}")
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


def _describe(parser: argparse.ArgumentParser, text: str) -> None:
    """Paragraphs in lines of the terminal's width; what is indented, such as examples, as it stands."""
    width = shutil.get_terminal_size().columns - 2  # as in argparse
    parts = [part if part.startswith(" ") else textwrap.fill(part, width) for part in text.strip("\n").split("\n\n")]
    parser.description = "\n\n".join(parts) + "\n"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


_INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # and what turns words round
# Names of the library's arguments whose options have another name.
_ALIASES = {
    "target_epsilon": "epsilon", "num_units": "units", "expected_batch_size": "batch_size", "num_canaries": "canaries",
    "num_guesses": "guesses", "l2_norm_clip": "clip",
}  # fmt: skip


def _name_options(message: str, args: argparse.Namespace) -> str:
    """A message with names of options for the library's names of arguments: --epsilon for `target_epsilon`."""

    def option(word: re.Match[str]) -> str:
        given = word[0].removesuffix("=True")
        name = _ALIASES.get(given, given)
        return f"--{name.replace('_', '-')}" if hasattr(args, name) else word[0]

    return re.sub(r"(?<![\w./-])[a-z0-9]+(?:_[a-z0-9]+)+(?:=True|(?![\w./(=-]))|^[a-z]+(?= must )", option, message)


def _answer(parser: argparse.ArgumentParser, given: list[str]) -> int:
    args = parser.parse_args(given)
    args.given = given
    with interruption.handle_signals():
        try:
            return args.run(args)
        except (KeyboardInterrupt, ValueError, OSError, ImportError) as problem:
            if os.environ.get("TFDP_REC_DEBUG"):
                raise
            if isinstance(problem, KeyboardInterrupt):
                print(f"{parser.prog}: interrupted", file=sys.stderr)
                return interruption.exit_code()
            message = escape(_name_options(" ".join(_error_words(problem).split()), args)) or type(problem).__name__
            print(f"{parser.prog}: error: {message} (TFDP_REC_DEBUG=1 shows where)", file=sys.stderr)
            return 2


def escape(text: Any) -> str:
    r"""Text for a terminal: characters that move its cursor, or turn words round, stand as \u escapes.

    Example:
        >>> escape("\x1b[2Jtea")
        '\\u001b[2Jtea'
    """
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


def _error_words(problem: Exception) -> str:
    """An error's words; those of a system's error without its number, with the file."""
    if not isinstance(problem, OSError) or not problem.strerror:
        return str(problem)
    where = f": {problem.filename}" if problem.filename else ""
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT) and not problem.strerror.endswith(".")  # the system's words
    return f"{problem.strerror}{where}{'. Free some space, and try again' if full else ''}"
