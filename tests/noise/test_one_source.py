"""The product draws its noise in `core/mechanism/noise` and nowhere else."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "tfdp_rec"
LAWS = {
    "normal", "standard_normal", "random_normal", "truncated_normal", "stateless_normal", "stateless_truncated_normal",
    "stateless_random_normal", "parameterized_truncated_normal", "multivariate_normal", "normalvariate", "gauss",
    "lognormal", "lognormvariate", "laplace", "gumbel", "exponential", "standard_exponential", "geometric", "logistic",
    "standard_t", "standard_cauchy", "rvs",
}  # fmt: skip
HOME = "tfdp_rec.noise", "tfdp_rec.core.mechanism.noise"
SYNTHETIC = {"generated.py", "generated_rows.py"}  # generated data: its randomness is no protection


def draws_in(source):
    """Lines that call something named after a law of noise, but not of `core/mechanism/noise`."""
    tree = ast.parse(source)
    ours = {"noise", "source", "_source", "inner"}  # a source that was given, and modules of that room
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(HOME):
            ours |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in LAWS:
            of = node.func.value
            name = of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""
            if name not in ours:
                yield node.lineno
        elif isinstance(node.func, ast.Name) and node.func.id in LAWS - ours:
            yield node.lineno


@pytest.mark.parametrize(
    "source",
    [
        "np.random.default_rng().standard_normal(3)",
        "rng.normal(size=3)",
        "tf.random.normal([3])",
        "tf.random.Generator.from_state(s, alg='philox').normal([3])",
        "random.gauss(0, 1)",
        "from numpy.random import laplace\nlaplace()",
        "stats.norm.rvs(size=3)",
        "keras.random.truncated_normal([3])",
    ],
)
def test_a_draw_of_ones_own_would_be_found(source):
    assert list(draws_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "from tfdp_rec.core.mechanism.noise import words\nwords.laplace(s, (3,))",
        "self.noise.normal(0, rows, step, 3)",
        "law.sf(3)",
    ],
)
def test_noise_of_the_house_is_let_be(source):
    assert not list(draws_in(source))


def test_the_product_draws_noise_nowhere_else():
    files = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name not in SYNTHETIC and "noise" not in path.relative_to(PACKAGE).parts
    ]
    assert len(files) > 100
    found = [f"{path}:{line}" for path in files for line in draws_in(path.read_text())]
    assert not found, "draw it from tfdp_rec.noise: " + ", ".join(found)
