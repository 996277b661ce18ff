"""Two rules for tests: each of them asserts, itself or through a function of tests/ that does, and none on a clock."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
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
    files = list(TESTS.rglob("*.py"))
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
