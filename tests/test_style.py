"""The house's dialect, where ruff cannot see it: sections of docstrings, Greek letters, errors as sentences.

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


# Tests. A test asserts itself or through a function of tests/ that does, and never on what a clock says.

TESTS = {".".join(p.relative_to(ROOT / "tests").with_suffix("").parts): p for p in (ROOT / "tests").rglob("*.py")}
RAISING = {"raises", "warns", "deprecated_call", "fail"}
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "time", "time_ns"}
ABOUT_TIME = {"federated.test_constant_outcome"}  # that the time of an answer tells nothing is what it shows


def dotted(node):
    """`a.b.c` as it is written, of a name or an attribute; of anything else what comes last."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class Code:
    """What the rules ask of a part of a test module: whether it asserts, and what it calls."""

    def __init__(self, node):
        self.node, self.called, self.asserts = node, set(), False
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                self.called.add(dotted(each.func))
            elif isinstance(each, ast.withitem):
                self.called.add(dotted(each.context_expr))
            elif isinstance(each, ast.Assert):
                self.asserts = True
            elif isinstance(each, ast.Raise) and isinstance(each.exc, ast.Call):
                self.asserts |= dotted(each.exc.func) == "AssertionError"
        last = {name.rpartition(".")[2] for name in self.called}
        self.asserts |= bool(last & RAISING) or any(name.startswith("assert_") for name in last)


class ModuleOfTests:
    """The functions of a test module, what it imports, and names for errors that it expects."""

    def __init__(self, source):
        tree = ast.parse(source)
        nodes = list(ast.walk(tree))
        self.functions = {node.name: Code(node) for node in nodes if isinstance(node, ast.FunctionDef)}
        self.imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        expected = [node for node in tree.body if isinstance(node, ast.Assign) and Code(node.value).asserts]
        self.expected = {dotted(target) for node in expected for target in node.targets}  # REFUSED = pytest.raises(...)

    def asserting(self, modules):
        """Names of what it can call that asserts, by itself or through what that calls, in other modules too."""
        found = self.expected | {name for name, code in self.functions.items() if code.asserts}
        for node in self.imports:
            if node.module in modules:
                given = modules[node.module].asserting(modules)
                found |= {name.asname or name.name for name in node.names if name.name in given}
        while more := {name for name, code in self.functions.items() if found & code.called} - found:
            found |= more
        return found


def without_assertion(module, modules):
    """Tests that pass whatever the code does, unless it raises."""
    checked = modules[module]
    tests = {name: code for name, code in checked.functions.items() if name.startswith("test_") and not code.asserts}
    for name in tests.keys() - (checked.asserting(modules) if tests else ()):
        yield tests[name].node.lineno, f"{name} asserts nothing"


def on_a_clock(module, modules):
    """Assertions on what a clock said, or on a number that was computed from it."""
    timed = {f"time.{clock}" for clock in CLOCKS}
    checked = modules[module].functions if module not in ABOUT_TIME else {}
    for code in checked.values():
        known = timed & code.called
        says = lambda part, known=known: any(dotted(each) in known for each in ast.walk(part))  # noqa: E731
        assigned = [each for each in ast.walk(code.node) if isinstance(each, ast.Assign)] if known else ()
        while more := {name for each in assigned if says(each.value) for name in names_given(each, says)} - known:
            known |= more
        for each in ast.walk(code.node) if known else ():
            if isinstance(each, ast.Assert) and says(each.test):
                yield each.lineno, f"{code.node.name} asserts on a clock: assert on what was done"


def names_given(assigned, says):
    """Names that an assignment gives a value that `says` holds of; of several at once, those alone."""
    for target in assigned.targets:
        values = getattr(assigned.value, "elts", None)
        pairs = zip(target.elts, values) if values and isinstance(target, ast.Tuple) else [(target, assigned.value)]
        for name, value in pairs:
            if says(value):
                yield from (each.id for each in ast.walk(name) if isinstance(each, ast.Name))


@pytest.fixture(scope="module")
def modules():
    return {name: ModuleOfTests(path.read_text(encoding="utf-8")) for name, path in TESTS.items()}


@pytest.mark.parametrize("rule", [without_assertion, on_a_clock], ids=lambda rule: rule.__name__)
def test_tests_assert_and_not_on_time(rule, modules):
    found = [f"{TESTS[name]}:{line}: {what}" for name in modules for line, what in rule(name, modules)]
    assert not found, "\n".join(found)


HELPER = "def check(x):\n    assert x\n\ndef through(x):\n    check(x)\n\ndef told(x):\n    return x\n"


@pytest.mark.parametrize(
    "rule, body, wrong",
    [
        (without_assertion, "f()", True),
        (without_assertion, "told(f())", True),
        (without_assertion, "assert f()", False),
        (without_assertion, "with pytest.raises(ValueError):\n        f()", False),
        (without_assertion, "with REFUSED:\n        f()", False),
        (without_assertion, "through(f())", False),
        (on_a_clock, "assert time.monotonic() < 3", True),
        (on_a_clock, "x, t = 1, time.monotonic()\n    spent = time.monotonic() - t\n    assert spent < x", True),
        (on_a_clock, "x, t = 1, time.monotonic()\n    assert x", False),
    ],
)
def test_a_test_that_shows_nothing_is_seen(rule, body, wrong):
    source = f"from helper import told, through\nREFUSED = pytest.raises(ValueError)\ndef test_one():\n    {body}\n"
    assert bool(list(rule("test_it", {"helper": ModuleOfTests(HELPER), "test_it": ModuleOfTests(source)}))) == wrong


def test_the_tests_that_are_told_to_be_slow_are_there():
    for name in (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines():
        path, function = re.fullmatch(r"([^:]+)::(\w+)(?:\[.+\])?", name).groups()
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), name
