"""The house's dialect, where ruff cannot see it: sections of docstrings, Greek letters, errors as sentences."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path for folder in ("tfdp_rec", "experiments") for path in (ROOT / folder).rglob("*.py"))

SECTIONS = ("Args", "Attributes", "Call arguments", "Example", "Raises", "Reference", "Returns", "Yields")
OTHER_NAMES = ("Arguments", "Examples", "References", "Parameters", "Return", "Raise", "Yield")
ENTRIES = ("Args", "Attributes", "Call arguments", "Raises")
HEAD = re.compile(rf"( *)({'|'.join(SECTIONS + OTHER_NAMES)}):(.*)")
LETTERS = "alpha|beta|gamma|delta|epsilon|eta|theta|kappa|lambda|mu|sigma|tau|phi|rho"
GREEK = re.compile(rf"(?<![\w.=/'-])({LETTERS})(?![\w(=\[:'*]|\.\w)", re.I)
CUSTOM = ("AttributeError", "KeyError", "StopIteration", "SystemExit")  # their messages are names, not sentences


def docstrings(tree):
    """(line, text as it stands, indentation) of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            value = node.body[0].value
            yield value.lineno, value.value, value.col_offset


def wrong_sections(source):
    """Headings that are not the house's, or whose content is not indented by four."""
    for first, text, column in docstrings(ast.parse(source)):
        lines = [line[column:] if not line[:column].strip() else line for line in text.split("\n")]
        for number, line in enumerate(lines[1:], 1):
            found = HEAD.fullmatch(line)
            if not found or (found[1] and found[2] not in SECTIONS):
                continue
            if found[1]:
                continue  # within another section: an entry that is called so
            after = next((text for text in lines[number + 1 :]), "")
            if found[2] in OTHER_NAMES:
                yield first + number, f"{found[2]}: is not a section's name here; there are {', '.join(SECTIONS)}"
            elif found[3]:
                yield first + number, f"{found[2]}: stands alone on its line"
            elif len(after) - len(after.lstrip()) != 4:
                yield first + number, f"the content of {found[2]}: begins on the next line, indented by 4"


def prose(source):
    """(line, text) of comments and docstrings, without examples, `code`, quotations and names of arguments."""
    for first, text, _ in docstrings(ast.parse(source)):
        example = False
        for number, line in enumerate(text.split("\n")):
            example = line.strip().startswith(">>>") or (example and bool(line.strip()))
            if not example:
                yield first + number, re.sub(r"^ *\*{0,2}\w+(, \w+)*: |`[^`]*`|\"[^\"]*\"", "", line)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], re.sub(r"`[^`]*`|\"[^\"]*\"", "", token.string)


def wrong_maths(source):
    """Greek letters that are spelled out."""
    for line, text in prose(source):
        for found in GREEK.findall(text):
            yield line, f"{found}: maths is written in Greek letters; names of the code stand in backticks"


def last_words(node):
    """How a message ends; None if it ends in a value, or is not written here."""
    if isinstance(node, ast.BinOp):
        return last_words(node.right)
    if isinstance(node, ast.JoinedStr):
        node = node.values[-1] if node.values else ast.Constant("")
        return "{}" if isinstance(node, ast.FormattedValue) else last_words(node)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def wrong_errors(source):
    """Errors that are no sentence."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            words = last_words(node.exc.args[0])
            if getattr(node.exc.func, "id", "") not in CUSTOM and words is not None and not words.endswith((".", "?")):
                yield node.lineno, f"an error ends in a full stop, not in {words[-20:]!r}"


@pytest.mark.parametrize("rule", [wrong_sections, wrong_maths, wrong_errors], ids=lambda rule: rule.__name__)
def test_the_house_is_written_in_one_hand(rule):
    found = [f"{p.relative_to(ROOT)}:{n}: {what}" for p in FILES for n, what in rule(p.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


FLUSH = '''
def f():
    """Does.

    Example:

    >>> f()
    """
'''


@pytest.mark.parametrize(
    "rule, source",
    [
        (wrong_sections, FLUSH),
        (wrong_sections, FLUSH.replace("\n\n    >>>", "\n      >>>")),
        (wrong_sections, FLUSH.replace("Example:", "Reference: somebody, 1999.")),
        (wrong_sections, FLUSH.replace("Example:\n\n    ", "Examples:\n        ")),
        (wrong_maths, '"""Costs epsilon."""'),
        (wrong_maths, "x = 1  # at most delta"),
        (wrong_maths, '"""(epsilon, delta)-DP."""'),
        (wrong_errors, 'raise ValueError("no full stop")'),
        (wrong_errors, 'raise ValueError(f"{x} is wrong, got {y}")'),
        (wrong_errors, 'raise ValueError("long " + f"and {x} split")'),
    ],
)
def test_what_is_wrong_is_seen(rule, source):
    assert list(rule(source))


@pytest.mark.parametrize(
    "rule, source",
    [
        (wrong_sections, FLUSH.replace("\n\n    >>>", "\n        >>>")),
        (wrong_maths, '"""Costs ε, the `epsilon` that `delta=1e-6` gives."""'),
        (wrong_maths, 'def f(delta):\n    """Does.\n\n    Args:\n        delta: δ.\n    """'),
        (wrong_errors, 'raise KeyError("name")'),
        (wrong_errors, 'raise ValueError(f"got {x!r}.")'),
    ],
)
def test_what_is_right_passes(rule, source):
    assert not list(rule(source))
