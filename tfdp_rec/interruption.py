"""One answer to every polite request to stop: Ctrl-C, SIGTERM (docker stop, systemd, batch queues), a closed terminal.

All three raise `KeyboardInterrupt` in the main thread, so that what a program does after Ctrl-C it does after each.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_asked: int | None = None  # the signal that asked last
_deferring, _deferred = 0, False


class Asked:
    """Which signal asked a program to stop.

    Attributes:
        code: what a shell expects of a program that it ended.
    """

    @property
    def code(self) -> int:
        """128 and the signal's number."""
        return 128 + last()


def last() -> int:
    """The signal that asked last."""
    return _asked or signal.SIGINT


@contextlib.contextmanager
def answered() -> Iterator[Asked]:
    """Has the three signals raise `KeyboardInterrupt` as long as the block lasts.

    A signal that is ignored, as nohup has it with SIGHUP, stays ignored. Once a program was told to stop, SIGTERM and
    SIGHUP say nothing new: it cleans up. A second Ctrl-C interrupts that, too.

    Example:
        >>> import os
        >>> with answered() as asked:
        ...     try:
        ...         os.kill(os.getpid(), signal.SIGTERM)
        ...     except KeyboardInterrupt:
        ...         print(asked.code)
        143
    """
    global _asked
    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody set a handler
        yield Asked()
        return
    _asked = None
    taken = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _stop) for number in taken}
    try:
        yield Asked()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Lets the block end before the program is interrupted: for what must be done whole, and is short."""
    global _deferring, _deferred
    _deferring += 1
    try:
        yield
    finally:
        _deferring -= 1
        if _deferred and not _deferring:
            _deferred = False
            raise KeyboardInterrupt


def _stop(number: int, frame: FrameType | None) -> None:
    global _asked, _deferred
    if _asked is not None and number != signal.SIGINT:
        return
    _asked = number
    if _deferring:
        _deferred = True
    else:
        raise KeyboardInterrupt
