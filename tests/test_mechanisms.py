"""The mechanisms' records are true of their classes, load nothing, and are the only list of mechanisms there is."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from tfdp_rec import mechanisms
from tfdp_rec.mechanisms import COMMON, MECHANISMS

ROOT = Path(__file__).parent.parent
EVERY = pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)


def test_every_optimizer_has_its_record():
    import tfdp_rec.optimizers as room

    kinds = {
        kind
        for kind in vars(room).values()
        if inspect.isclass(kind) and issubclass(kind, room.PrivateOptimizer) and not inspect.isabstract(kind)
    }
    assert kinds == {mechanism.kind for mechanism in MECHANISMS} and len(kinds) == len(MECHANISMS)


def test_names_labels_and_colours_tell_mechanisms_apart():
    for told in ("name", "class_name", "label", "colour"):
        assert len({getattr(m, told) for m in (mechanisms.sgd, *MECHANISMS)}) == 1 + len(MECHANISMS)


@pytest.mark.parametrize("mechanism", COMMON, ids=lambda mechanism: mechanism.name)
def test_it_claims_what_its_event_claims(mechanism):
    from tfdp_rec.core.claim.events import is_private

    optimizer = mechanism.optimizer(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=8)
    assert is_private(optimizer.dp_event()) == mechanism.claims_epsilon
    assert mechanisms.of(optimizer) is mechanism


def test_a_subclass_is_another_mechanism():
    class Mine(mechanisms.dp_sgd.kind):
        pass

    assert mechanisms.of(Mine(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=8)) is None


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'dp-sgd'.*sgd, dpsgd, .*exponential"):
        mechanisms.named("dp-sgd")


def test_the_records_need_no_tensorflow():
    code = "import sys, tfdp_rec.mechanisms as m; m.names(m.MECHANISMS); print('tensorflow' in sys.modules)"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert asked.stdout.strip() == "False"


# No other list.


def spelled(node):
    """The mechanisms that a literal spells: by a name or label in quotes, or by their class."""
    words = {}
    for mechanism in MECHANISMS:
        words |= dict.fromkeys((mechanism.name, mechanism.label, mechanism.class_name), mechanism)
    kinds = {mechanism.class_name: mechanism for mechanism in MECHANISMS}
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            found.add(words.get(child.value))
        elif isinstance(child, (ast.Name, ast.Attribute)):
            found.add(kinds.get(child.id if isinstance(child, ast.Name) else child.attr))
    return found - {None}


def lists_in(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)) and len(spelled(node)) > 1:
            yield node.lineno


@pytest.mark.parametrize(
    "source",
    [
        "KNOWN = ('dpsgd', 'eana')",
        "OF = {'a': tfdp_rec.DPSGD, 'b': LazyDPSGD}",
        "def f(x):\n    return x in ['AdaFEST', 'FEST']",
        "PAIRS = [('exponential', 1), ('adafest', 2)]",
    ],
)
def test_a_second_list_would_be_found(source):
    assert list(lists_in(source))


@pytest.mark.parametrize("source", ["ONE = ('dpsgd', 'sgd', 'other')", "RECORDS = (mechanisms.eana, mechanisms.fest)"])
def test_what_is_no_second_list_is_let_be(source):
    assert not list(lists_in(source))


def test_there_is_no_other_list_of_mechanisms():
    files = [path for part in ("tfdp_rec", "experiments", "scripts") for path in sorted((ROOT / part).rglob("*.py"))]
    assert len(files) > 100
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in lists_in(path.read_text())]
    assert not found, "take it from tfdp_rec.mechanisms: " + ", ".join(found)
