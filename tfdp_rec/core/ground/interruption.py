"""The same end for every request to stop: Ctrl-C, SIGTERM (docker stop, systemd, batch queues), a closed terminal.

All three raise `KeyboardInterrupt` in the main thread.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_asked = False  # whether a signal has asked the program to stop
_last = int(signal.SIGINT)
_deferring, _deferred = 0, False


def last_signal() -> int:
    """The last signal that asked the program to stop."""
    return _last


def exit_code() -> int:
    """The exit code that a shell expects of a program that a signal ended."""
    return 128 + _last


def check_interruption() -> None:
    """Raises `KeyboardInterrupt` if a signal asked the program to stop, for what must not begin after that."""
    # Python drops an exception in a callback of a weak reference or in `__del__`, and so the first of a signal there.
    if _asked:
        raise KeyboardInterrupt


@contextlib.contextmanager
def handle_signals() -> Iterator[None]:
    """A block in which the three signals raise `KeyboardInterrupt`."""
    # An ignored signal, such as SIGHUP under nohup, stays ignored. After the first request, SIGTERM and SIGHUP are no
    # news: the program cleans up. A second Ctrl-C interrupts that, too.
    global _asked, _last
    if threading.current_thread() is not threading.main_thread():  # handlers can be set there alone
        yield
        return
    _asked, _last = False, int(signal.SIGINT)
    taken = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _stop) for number in taken}
    try:
        yield
    finally:
        _asked = False
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def keep_interrupts() -> Iterator[None]:
    """A block after which Ctrl-C is handled as before it, whatever a library has set."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """A short block that ends before the program is interrupted."""
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
    global _asked, _last, _deferred
    if _asked and number != signal.SIGINT:
        return
    _asked, _last = True, number
    if _deferring:
        _deferred = True
    else:
        raise KeyboardInterrupt
