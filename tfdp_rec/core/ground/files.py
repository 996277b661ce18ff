"""Files and folders that are complete or not there, and large arrays a few rows at a time.

A file is written under a temporary name in the same folder, synced to disk, and then renamed, and the new name is
synced too. A reader of the name finds the old content or the new, also after a kill or a power cut; a half-written
temporary begins with a dot and ends as the name does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import math
import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, Any

Path = str | os.PathLike[str]


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_address(path: Path) -> bool:
    """Whether a path is an address of a cloud, where nothing is renamed, and no path of this machine."""
    return "://" in os.fspath(path)


def lines_of(path: Path) -> list[str]:
    """The lines of a text file that are not empty, as they are: an id may end in a space, or hold U+2028."""
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        return [line for row in file if (line := row.removesuffix("\n").removesuffix("\r"))]


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[str]:
    """A temporary name beside the path of a file or folder, which it replaces when the block ends, synced to disk."""
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f".{uuid.uuid4().hex[:12]}.{name}")  # ends as the name does: Keras looks there
    try:
        yield temporary
        if os.path.lexists(temporary):
            _sync(temporary)
            _move_into_place(temporary, os.path.join(folder, name))
            sync_entry(folder)
    finally:
        remove(temporary)


@contextlib.contextmanager
def open_atomically(path: Path, mode: str = "w", private: bool = False, reserve: int = 0) -> Iterator[IO[Any]]:
    """An open file that appears under its name when the block ends; `reserve` bytes of the disk are its own before."""
    with replace_atomically(path) as temporary:
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666)
        with open(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            if reserve:
                os.posix_fallocate(handle, 0, reserve)
            yield file
            if reserve:
                file.truncate()


def find_paths(pattern: str) -> list[str]:
    """The file or folder of that name; if there is none, those that the pattern fits, sorted."""
    # A shell that expands `w*.csv` gives the name `w[1].csv`, which as a pattern would mean `w1.csv`.
    return [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern))


def restrict_to_owner(path: Path) -> None:
    """Makes a file, or a folder with all that is in it, readable by its owner alone."""
    for folder, _, files in os.walk(path):
        os.chmod(folder, 0o700)
        for file in files:
            os.chmod(os.path.join(folder, file), 0o600)
    if os.path.isfile(path):
        os.chmod(path, 0o600)


def remove(path: Path) -> None:
    """Removes a file or a folder with all that is in it, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.remove(path)


@contextlib.contextmanager
def lock_path(path: Path) -> Iterator[None]:
    """A block in which no other process makes the file or folder of a path; removes what a killed one left of it."""
    # A lock file stays beside it.
    folder, name = os.path.split(os.path.abspath(path))
    with open(os.path.join(folder, f".{name}.lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in glob.glob(os.path.join(glob.escape(folder), f".{'?' * 12}.{glob.escape(name)}*")):
            remove(left)
        yield


@contextlib.contextmanager
def explain_full_disk(folder: Path, need: str) -> Iterator[None]:
    """One sentence instead of a traceback where the disk of a folder is full; `need` says what takes how much."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            problem.errno,
            f"The disk of {folder} is full, and what was made there is removed again. {need}: free some space, or "
            "choose a folder elsewhere.",
        ) from problem


_held: dict[str, tuple[int, Any]] = {}  # process and open file, as long as it lives


def hold(directory: Path) -> None:
    """Keeps the directory of a training for this process as long as it lives; refused if another process has it."""
    # Two processes that continued from one checkpoint would count as one.
    os.makedirs(directory, mode=0o700, exist_ok=True)
    path = os.path.realpath(os.path.join(directory, "in-use"))
    if path in _held:
        process, file = _held[path]
        # A forked process has the file open, too, and after a removal another process may hold a new one of the name.
        if process == os.getpid() and os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            return
    file = open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"Another process trains with {directory}: end it first, or use another directory.") from None
    _held[path] = os.getpid(), file


def end_hold(directory: Path) -> None:
    """Ends `hold`."""
    _, file = _held.pop(os.path.realpath(os.path.join(directory, "in-use")), (0, None))
    if file is not None:
        file.close()


@contextlib.contextmanager
def hold_if_free(directory: Path) -> Iterator[bool]:
    """Whether no process holds a directory; held by this one as long as the block lasts."""
    path = os.path.realpath(os.path.join(directory, "in-use"))
    with contextlib.ExitStack() as stack:
        free = False
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "r+", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        yield free


class Temporary:
    """A folder for its owner alone, by default in the system's for temporary files; lasts as long as this object."""

    def __init__(self, kind: str, folder: Path | None = None):
        # `kind` begins the folder's name. A process that was killed leaves its folder; the next of the kind removes it.
        remove_left(kind, folder)
        self.name = tempfile.mkdtemp(prefix=kind, dir=folder)
        lock = open(os.path.join(self.name, ".in-use"), "a", encoding="utf-8")
        fcntl.flock(lock, fcntl.LOCK_EX)  # before it has the name that others look for
        os.rename(lock.name, held := os.path.realpath(os.path.join(self.name, "in-use")))
        _held[held] = os.getpid(), lock
        self.cleanup = weakref.finalize(self, _remove_own, self.name, os.getpid())


def remove_left(kind: str, folder: Path | None = None) -> None:
    """Removes the temporary folders of a kind whose processes were killed."""
    for left in glob.glob(os.path.join(glob.escape(os.fspath(folder or tempfile.gettempdir())), f"{kind}*", "in-use")):
        # Another process may remove the same folder at this moment.
        with contextlib.suppress(FileNotFoundError), hold_if_free(os.path.dirname(left)) as free:
            if free and os.stat(left).st_uid == os.getuid():
                remove(os.path.dirname(left))


def _remove_own(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends, and its parent goes on
        end_hold(folder)
        remove(folder)


def rows_at_a_time(shape: Sequence[int], values: int) -> int:
    """The number of rows of an array that hold about so many values; at least one."""
    return max(1, values // max(1, math.prod(shape[1:])))


def row_chunks(shape: Sequence[int], values: int) -> Iterator[tuple[int, int]]:
    """First row and end of each chunk of an array, of about so many values."""
    rows = rows_at_a_time(shape, values)
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


def _move_into_place(temporary: str, path: str) -> None:
    if not os.path.isdir(path):
        os.replace(temporary, path)
        return
    old = f"{temporary}.old"  # a folder cannot be replaced in one operation; for a moment the name is free
    os.rename(path, old)
    os.rename(temporary, path)
    remove(old)


def _sync(path: str) -> None:
    # A file, or a folder with all that is in it.
    for folder, _, files in os.walk(path):
        for file in files:
            sync_entry(os.path.join(folder, file))
        sync_entry(folder)
    if os.path.isfile(path):
        sync_entry(path)


def sync_entry(path: str) -> None:
    """Flushes one file, or one folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
