"""The study kernel: a cell is worked out once, and a folder holds one study."""

import pytest

from experiments.study import Study


@pytest.mark.slow
def test_a_stopped_study_goes_on_with_what_it_lacks(tmp_path):
    def stops():
        raise KeyboardInterrupt

    lines = []
    study = Study(tmp_path, {"steps": 3}, lines.append)
    with pytest.raises(KeyboardInterrupt):
        study.cells({"one": lambda: {"score": 0.5}, "two": stops})
    again = Study(tmp_path, {"steps": 3}, lines.append)
    results = again.cells({"one": lambda: pytest.fail("done twice"), "two": lambda: {"score": float("inf")}})
    assert results == {"one": {"score": 0.5}, "two": {"score": float("inf")}}
    assert sorted(path.name for path in (tmp_path / "cells").iterdir()) == ["one.json", "two.json"]
    assert lines[-1] == "  1 of 1 done, about 0 min left"


def test_a_folder_of_another_study_is_refused_by_what_differs(tmp_path):
    Study(tmp_path, {"steps": 3, "sizes": (1, 2), "data": None})
    Study(tmp_path, {"steps": 3, "sizes": [1, 2], "data": None})
    with pytest.raises(ValueError, match="with other settings \\(data, steps\\); give another --out"):
        Study(tmp_path, {"steps": 4, "sizes": (1, 2), "data": "files"})
