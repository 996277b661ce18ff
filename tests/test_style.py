"""The house's dialect, where ruff cannot see it: Greek letters, errors as sentences.

And two rules for tests: each of them asserts, and none asserts on a clock.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(path for folder in ("tfdp_rec", "experiments") for path in (ROOT / folder).rglob("*.py"))
LETTERS = "alpha|beta|gamma|delta|epsilon|eta|theta|kappa|lambda|mu|sigma|tau|phi|rho"
GREEK = re.compile(rf"(?<![\w.=/'-])({LETTERS})(?![\w(=\[:'*]|\.\w)", re.I)
CUSTOM = ("AttributeError", "KeyError", "StopIteration", "SystemExit")  # their messages are names, not sentences


def prose(source):
    """(line, text) of comments and docstrings, without examples, `code`, quotations and names of arguments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            example = False
            for number, line in enumerate(node.body[0].value.value.split("\n"), node.body[0].lineno):
                example = line.strip().startswith(">>>") or (example and bool(line.strip()))
                if not example:
                    yield number, re.sub(r"^ *\*{0,2}\w+(, \w+)*: |`[^`]*`|\"[^\"]*\"", "", line)
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


@pytest.mark.parametrize("rule", [wrong_maths, wrong_errors], ids=lambda rule: rule.__name__)
def test_the_house_is_written_in_one_hand(rule):
    found = [f"{p.relative_to(ROOT)}:{n}: {what}" for p in FILES for n, what in rule(p.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "rule, source, wrong",
    [
        (wrong_maths, '"""Costs epsilon."""', True),
        (wrong_maths, "x = 1  # at most delta", True),
        (wrong_maths, '"""Costs ε, the `epsilon` that `delta=1e-6` gives."""', False),
        (wrong_maths, 'def f(delta):\n    """Does.\n\n    Args:\n        delta: δ.\n    """', False),
        (wrong_errors, 'raise ValueError(f"{x} is wrong, got {y}")', True),
        (wrong_errors, 'raise ValueError("long " + f"and {x} split")', True),
        (wrong_errors, 'raise KeyError("name")', False),
        (wrong_errors, 'raise ValueError(f"got {x!r}.")', False),
    ],
)
def test_what_is_wrong_is_seen(rule, source, wrong):
    assert bool(list(rule(source))) == wrong


# Tests. A test asserts itself or through a function of tests/ that does, and never on what a clock says.

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "time", "time_ns"}
ABOUT_TIME = "test_constant_outcome.py"  # that the time of an answer tells nothing is what it shows


def functions_of(sources):
    return [n for source in sources for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]


def uses(node):
    """Names of what a part of a module calls or enters, without what stands before a last dot; `assert` among them."""
    nodes = list(ast.walk(node))
    called = [each.func for each in nodes if isinstance(each, ast.Call)]
    called += [each.context_expr for each in nodes if isinstance(each, ast.withitem)]
    found = {getattr(each, "attr", getattr(each, "id", "")) for each in called}
    return found | {"assert"} if any(isinstance(each, ast.Assert) for each in nodes) else found


def without_assertion(functions):
    """Tests that pass whatever the code does, unless it raises."""
    used = [(node.name, uses(node)) for node in functions]
    asserting = {"assert", "raises", "warns", "deprecated_call", "fail", "AssertionError", "REFUSED"}
    asserting |= {name for _, names in used for name in names if name.startswith("assert_")}
    while more := {name for name, names in used if names & asserting} - asserting:
        asserting |= more
    return [name for name, _ in used if name.startswith("test_") and name not in asserting]


def on_a_clock(functions):
    """Tests that assert on what a clock said, or on a number that was computed from it."""
    found = []
    for node in functions:
        known, before = set(CLOCKS), 0
        says = lambda part, known=known: any(  # noqa: E731
            getattr(each, "id", getattr(each, "attr", "")) in known for each in ast.walk(part)
        )
        while len(known) > before:
            before = len(known)
            for each in ast.walk(node):
                if isinstance(each, ast.Assign):
                    values = getattr(each.value, "elts", [each.value] * 9)  # of several at once, those alone
                    for target in each.targets:
                        targets = getattr(target, "elts", [target])
                        known |= {t.id for t, v in zip(targets, values) if isinstance(t, ast.Name) and says(v)}
        if any(isinstance(each, ast.Assert) and says(each.test) for each in ast.walk(node)):
            found.append(node.name)
    return found


def test_tests_assert_and_not_on_time():
    files = [path for path in (ROOT / "tests").rglob("*.py")]
    assert without_assertion(functions_of(path.read_text(encoding="utf-8") for path in files)) == []
    timed = [path.read_text(encoding="utf-8") for path in files if path.name != ABOUT_TIME]
    assert on_a_clock(functions_of(text for text in timed if "import time" in text)) == []


HELPER = "def check(x):\n    assert x\n\ndef through(x):\n    check(x)\n\ndef told(x):\n    return x\n"


@pytest.mark.parametrize(
    "rule, body, wrong",
    [
        (without_assertion, "told(f())", True),
        (without_assertion, "with pytest.raises(ValueError):\n        f()", False),
        (without_assertion, "through(f())", False),
        (on_a_clock, "assert time.monotonic() < 3", True),
        (on_a_clock, "x, t = 1, time.monotonic()\n    spent = time.monotonic() - t\n    assert spent < x", True),
        (on_a_clock, "x, t = 1, time.monotonic()\n    assert x", False),
    ],
)
def test_a_test_that_shows_nothing_is_seen(rule, body, wrong):
    assert bool(rule(functions_of([HELPER, f"def test_one():\n    {body}\n"]))) == wrong
