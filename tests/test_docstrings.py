"""Docstrings in three levels: full for API, one line for what the package shares, none needed within a file."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tfdp_rec"
OWED = (  # rooms whose docstrings are still as before: take one out when it is rewritten
    "data", "privacy",
)  # fmt: skip
ALSO = {  # API that no façade hands out and no page imports, by module
    "tfdp_rec.models.own_catalogue": ("OwnCatalogue",),
    "tfdp_rec.core.claim.filters": ("PrivacyFilter",),
    "tfdp_rec.core.claim.statement": ("Statement",),
    "tfdp_rec.training.private_fit": ("PrivateFit",),
    "tfdp_rec.federated.local": ("GradientUpdate", "LocalUpdate"),
    "tfdp_rec.federated.vector": ("PureVectorMechanism", "VectorMechanism"),
}
NO_NOUN = frozenset(
    "about after also among as at before beside between by for from how if in instead not of on over per than that "
    "to under until what when where which while who whose with within without".split()
)
ENTRY = re.compile(r"    (\*{0,2}\w[\w, *]*): +(\S+)")


def room_of(path):
    return path.relative_to(PACKAGE).parts[0]


def definition(module, name, seen=frozenset()):
    """(file, name) of what a façade or a page calls so; the name is None for a module; None if it is not ours."""
    path = ROOT.joinpath(*module.split("."))
    if path.joinpath(f"{name}.py").is_file():
        return path / f"{name}.py", None
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return None
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if any(isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name for node in tree.body):
        return path, name
    seen |= {(module, name)}
    homes = [(home, own) for handed, home, own in handed_out(tree, module) if handed == name]
    found = (definition(*home, seen) for home in homes if home not in seen)
    return next(filter(None, found), None)


def handed_out(tree, module):
    """(name, module, name there) of what a module imports, or loads when asked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfdp_rec"):
            yield from ((alias.asname or alias.name, node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Dict):
            pairs = [(k, v) for k, v in zip(node.keys, node.values) if isinstance(k, ast.Constant)]
            homes = [(k.value, v.value) for k, v in pairs if isinstance(v, ast.Constant) and isinstance(v.value, str)]
            for parent in ("tfdp_rec", module):  # a façade gives homes below itself, or below the package
                yield from ((name, f"{parent}.{home}", name) for name, home in homes)


def imported_by_pages():
    """(module, name) of what README, docs and tutorials import."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "tutorials").glob("*.ipynb")]
    texts = [page.read_text(encoding="utf-8").replace("\\n", "\n") for page in pages]
    for text in texts:
        for module, names in re.findall(r"from (tfdp_rec[\w.]*) import (\([^)]*\)|[^\n]*)", text):
            for name in re.findall(r"\w+", names.split("#")[0]):
                yield module, name
                yield from ((f"{module}.{name}", used) for used in re.findall(rf"\b{name}\.(\w+)", "\n".join(texts)))


def public_names():
    """file -> names of API at its top level."""
    found = {}
    for facade in PACKAGE.rglob("__init__.py"):
        module = ".".join(facade.parent.relative_to(ROOT).parts)
        for name, home, own in handed_out(ast.parse(facade.read_text(encoding="utf-8")), module):
            if (where := definition(home, own)) is not None and not name.startswith("_"):
                found.setdefault(where[0], set()).add(where[1])
    for module, name in [*imported_by_pages(), *((m, n) for m, names in ALSO.items() for n in names)]:
        if (where := definition(module, name)) is not None and where[1]:
            found.setdefault(where[0], set()).add(where[1])
    for path in [path for path, names in found.items() if None in names and path.name != "__init__.py"]:
        body = ast.parse(path.read_text(encoding="utf-8")).body  # a module is handed out whole
        found[path] |= {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return found


def documented(tree, prefix=()):
    """(qualified name as a tuple, node) of each class and function that has a docstring."""
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                yield (*prefix, node.name), node
            yield from documented(node, (*prefix, node.name))
        elif isinstance(node, ast.If | ast.With | ast.Try):
            yield from documented(node, prefix)


@pytest.fixture(scope="module")
def levels():
    """(file, qualified name, node, whether it is API) of every docstring in the rooms that are done."""
    api, found = public_names(), []
    for path in sorted(PACKAGE.rglob("*.py")):
        if room_of(path) not in OWED and path.parent != PACKAGE:
            for name, node in documented(ast.parse(path.read_text(encoding="utf-8"))):
                public = name[0] in api.get(path, ()) and not any(part.startswith("_") for part in name)
                found.append((path, name, node, public))
    return found


def wrong_arguments(node):
    """Parameters of a function, or of a class' constructor, that its docstring neither lists nor names in backticks."""
    text = ast.get_docstring(node)
    if "Arguments as `" in text or "` makes one." in text:
        return []
    constructor = [each for each in node.body if getattr(each, "name", "") == "__init__"]
    makers = constructor if isinstance(node, ast.ClassDef) else [node]
    arguments = [a.arg for maker in makers for a in (*maker.args.args, *maker.args.kwonlyargs)]
    listed = ", ".join(re.findall(r"^    ([\w, ]+): ", text, re.M)).split(", ")
    entries = {*listed, *re.findall(r"`(\w+)`", text)}
    return [name for name in arguments if name not in {"self", "cls", "name", *entries}]


def said(found):
    return "\n".join(f"{path.relative_to(ROOT)}: {'.'.join(name)}: {what}" for path, name, what in found)


def lines_of(node):
    """Lines of a docstring, without the fields of a record and without an example that is run."""
    text = re.split(r"^(?:Attributes|Example):$", ast.get_docstring(node), maxsplit=1, flags=re.M)[0]
    return len(text.strip().splitlines())


def test_what_is_not_api_has_one_line(levels):
    long = [(path, name, lines_of(node)) for path, name, node, api in levels if not api and lines_of(node) > 1]
    assert not long, said(long)


def test_api_says_what_each_argument_is(levels):
    tops = [(path, name, node) for path, name, node, api in levels if api and len(name) == 1]
    assert len(tops) > 80
    wrong = [(path, name, missing) for path, name, node in tops if (missing := wrong_arguments(node))]
    assert not wrong, said(wrong)


def test_an_entry_is_a_noun_phrase_that_stands_alone(levels):
    wrong = [(path, name, entry) for path, name, node, _ in levels for entry in fragments(node)]
    assert not wrong, said(wrong)


def fragments(node):
    """Entries of Args and Attributes that begin with a preposition or the like."""
    section = None
    for line in ast.get_docstring(node).split("\n"):
        if re.fullmatch(r"\w[\w ]*:", line):
            section = line[:-1]
        elif section in ("Args", "Attributes", "Call arguments") and (found := ENTRY.match(line)):
            if found[2].lower().strip(",;:.") in NO_NOUN:
                yield line.strip()


@pytest.mark.parametrize("entry", ["about to be made.", "that will be made in all.", "of the job.", "When it began."])
def test_fragments_are_seen(entry):
    source = f'def f(steps):\n    """Does.\n\n    Args:\n        steps: {entry}\n    """'
    assert list(fragments(ast.parse(source).body[0]))
    assert not list(fragments(ast.parse(source.replace(entry, "Number of steps.")).body[0]))
