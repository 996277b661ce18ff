"""What every test starts from: a quiet TensorFlow on the CPU, plots without a screen, and a seed of its own.

The seed is for initial weights, dropout and numpy's old functions. What the package draws for privacy, samples and
noise, no seed reaches: a test that hangs on it says `batches(..., seed=)` and `noise=KeyedNoise(...)`.
"""

import gc
import os
import zlib

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(autouse=True)
def seeded(request):
    from seeding import seed

    seed(zlib.crc32(request.node.nodeid.encode()))


def pytest_collection_finish(session):
    # What was imported stays: to look through it again and again is a tenth of the time of all tests.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_configure(config):
    config.addinivalue_line("markers", "fast_cases(*ids): of a test's cases all but these are slow")
    config.addinivalue_line("markers", "slow_cases(*ids): of a test's cases these are slow")


@pytest.hookimpl(wrapper=True)  # where all cases of a test stand together
def pytest_pycollect_makeitem(collector, name):
    """Marks as slow those cases of a test that its decorator names, or all beside those.

    Slow is what takes 5 s or more, unless it alone shows the README, a kill, lazy = eager, what is spent, a refusal or
    a rule of the house; and the cases of a test beside the one or the few that show its property.
    """
    made = yield
    cases = {case.callspec.id: case for case in made if hasattr(case, "callspec")} if isinstance(made, list) else {}
    for id_, case in cases.items():
        fast, slow = map(case.get_closest_marker, ("fast_cases", "slow_cases"))
        for mark in filter(None, (fast, slow)):
            assert cases.keys() >= set(mark.args), f"{case.nodeid}: no such case as {set(mark.args) - cases.keys()}"
        if (fast and id_ not in fast.args) or (slow and id_ in slow.args):
            case.add_marker(pytest.mark.slow)
    return made
