"""What every test starts from: a quiet TensorFlow on the CPU, plots without a screen, and a seed of its own.

The seed is for initial weights, dropout and numpy's old functions. What the package draws for privacy, samples and
noise, no seed reaches: a test that hangs on it says `batches(..., seed=)` and `noise=KeyedNoise(...)`.
"""

import os
import zlib
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(autouse=True)
def seeded(request):
    from seeding import seed

    seed(zlib.crc32(request.node.nodeid.encode()))


# Tests that took 5.5 s or more, with their fixtures, when `scripts/test --durations=0` was last read for them, without
# those that alone show the README, kills, lazy = eager, what is spent, or the rules of the house; and of a test that is
# made for many cases those beside the one or the few that show its property.
SLOW = frozenset(Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines())


@pytest.hookimpl(tryfirst=True)  # ahead of `-m`, which takes tests out by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
