"""The count of attempts: never below what was dispatched, whatever is killed when."""

import json
import subprocess
import sys
import threading

import pytest
from dp_accounting import GaussianDpEvent

from tfdp_rec.distribute.attempts import Attempts
from tfdp_rec.files import hold

ONE, TWO = GaussianDpEvent(1.0), GaussianDpEvent(2.0)


def on_disk(path):
    return Attempts(str(path)).count


def test_no_more_are_made_than_were_reserved():
    attempts = Attempts(None)
    block = attempts.reserve(ONE, 3)
    assert [attempts.take(block) for _ in range(5)] == [True, True, True, False, False]
    assert attempts.count == 3


def test_a_block_counts_from_before_its_first_attempt(tmp_path):
    attempts = Attempts(str(tmp_path / "attempts.json"))
    block = attempts.reserve(ONE, 10)
    assert on_disk(tmp_path / "attempts.json") == 10  # a coordinator killed now has made at most these
    attempts.take(block)
    assert attempts.count == 1 and on_disk(tmp_path / "attempts.json") == 10
    attempts.close()
    assert attempts.count == on_disk(tmp_path / "attempts.json") == 1


def test_what_was_not_made_is_taken_back_with_the_next_block(tmp_path):
    attempts = Attempts(str(tmp_path / "attempts.json"))
    first = attempts.reserve(ONE, 10)
    for _ in range(4):
        attempts.take(first)
    second = attempts.reserve(TWO, 5)
    assert on_disk(tmp_path / "attempts.json") == 9
    assert not attempts.take(first)  # a step of the block before that is only tried again now
    attempts.take(second)
    attempts.close()
    assert attempts.runs == [(ONE, 4), (TWO, 1)] == Attempts(str(tmp_path / "attempts.json")).runs


def test_a_count_that_is_read_again_goes_on(tmp_path):
    path = str(tmp_path / "attempts.json")
    Attempts(path).reserve(ONE, 10)  # and never closed
    again = Attempts(path)
    again.take(again.reserve(ONE, 5))
    again.close()
    assert again.runs == [(ONE, 11)]


def test_threads_share_a_block_exactly():
    attempts = Attempts(None)
    block = attempts.reserve(ONE, 1000)
    taken = []
    worker = lambda: taken.extend(attempts.take(block) for _ in range(400))  # noqa: E731
    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 1000 and len(taken) == 1600


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "attempts.json"
    path.write_text(json.dumps({"steps": 3}))
    with pytest.raises(ValueError, match="does not hold the attempts"):
        Attempts(str(path))


def test_a_directory_belongs_to_one_process_as_long_as_it_lives(tmp_path):
    script = "import sys, tfdp_rec.files as f; f.hold(sys.argv[1]); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        try:
            assert other.stdout.readline() == "1\n"
            with pytest.raises(ValueError, match="Another process trains"):
                hold(str(tmp_path))
        finally:
            other.kill()
    hold(str(tmp_path))
    hold(str(tmp_path))  # again by the same process: a second trainer, which goes on from the first
