"""Files are whole or not there."""

import os
import shutil
import stat

import pytest

from tfdp_rec.core.ground.files import (
    hold,
    hold_if_free,
    open_atomically,
    replace_atomically,
    row_chunks,
    rows_at_a_time,
)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_the_older_file(tmp_path, error):
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(error), open_atomically(path) as file:
        file.write("half")
        raise error
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["f"]


def test_nothing_is_to_be_seen_before_it_is_whole(tmp_path):
    with open_atomically(tmp_path / "f") as file:
        file.write("half")
        file.flush()
        assert not (tmp_path / "f").exists()
        file.write(" and half")
    assert (tmp_path / "f").read_text() == "half and half"


def test_the_old_stays_when_nothing_was_written(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    with replace_atomically(path):
        pass
    assert path.read_text() == "old"


def test_a_folder_takes_the_place_of_a_folder(tmp_path):
    for content in ("one", "two"):
        with replace_atomically(tmp_path / "folder") as temporary:
            os.mkdir(temporary)
            with open(os.path.join(temporary, content), "w") as file:
                file.write(content)
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == ["two"]


def test_content_and_name_are_synced_in_that_order(tmp_path, monkeypatch):
    """The content before the name that promises it, and then the folder that holds the name."""
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(os.readlink(f"/proc/self/fd/{handle}")), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("in place"), replace(*names)))
    with open_atomically(tmp_path / "f") as file:
        file.write("whole")
    assert [os.path.basename(name)[-2:] for name in done] == [".f", "in place"[-2:], tmp_path.name[-2:]]


def test_private_files_are_their_owners_alone(tmp_path):
    with open_atomically(tmp_path / "f", "wb", private=True) as file:
        file.write(b"secret")
        temporary = next(name for name in os.listdir(tmp_path) if name.startswith("."))
        assert stat.S_IMODE(os.stat(tmp_path / temporary).st_mode) == 0o600  # from the first byte
    assert stat.S_IMODE(os.stat(tmp_path / "f").st_mode) == 0o600


@pytest.mark.parametrize("shape", [[0, 3], [7, 3], [7], [1000, 0], [5, 1 << 30]])
def test_chunks_are_all_rows_once(shape):
    chunks = list(row_chunks(shape, values=10))
    assert [row for start, end in chunks for row in range(start, end)] == list(range(shape[0]))
    assert all(1 <= end - start <= rows_at_a_time(shape, 10) for start, end in chunks)


def test_a_directory_that_was_removed_is_held_anew(tmp_path):
    hold(tmp_path / "training")
    shutil.rmtree(tmp_path / "training")
    (tmp_path / "training").mkdir()
    (tmp_path / "training/in-use").touch()  # by another process
    hold(tmp_path / "training")
    with hold_if_free(tmp_path / "training") as free:
        assert not free


def test_a_forked_process_does_not_hold_what_its_parent_holds(tmp_path, monkeypatch):
    hold(tmp_path)
    hold(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ValueError, match="Another process trains"):
        hold(tmp_path)
