"""A step is timed on larger catalogues when that is asked for, for all alike, and without data."""

import pytest

from tfdp_rec import quiet
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.step_times import COMPARED, step_times

TINY = JobSettings(step_at=(400,), batch_size=8, width=4, hidden=0, negatives=300)


@pytest.mark.slow
def test_every_size_is_timed_for_every_mechanism_and_the_runs_own_comes_first(capsys):
    quiet.import_tensorflow()
    found = step_times(TINY, own=40, verbose=1)
    assert list(found) == ["40", "400"]  # with 40 movies there are no 300 negatives
    for seconds in found.values():
        assert set(seconds) == {each.name for each in COMPARED} and all(each > 0 for each in seconds.values())
    assert "Timing a step with 400 items: SGD" in capsys.readouterr().out


def test_nothing_is_timed_that_nobody_asked_for():
    assert step_times(JobSettings(), own=40) == {}
