"""What Ctrl+C does while batches flow: stop softly, then raise, then end at once.

One handler of SIGINT serves all Dataloaders that are entered, in whatever order they are left; it
is there from the first that is entered to the last that is left.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["InterruptHandler"]

_active: weakref.WeakSet[InterruptHandler] = weakref.WeakSet()
_previous: Any = None
_is_installed = False


class InterruptHandler:
    """Handles SIGINT for one Dataloader between :meth:`install` and :meth:`restore`.

    The first signal calls ``on_first``; the second is raised as KeyboardInterrupt by the next
    :meth:`check`; the third ends the process as an unhandled SIGINT does. Off the main thread
    Python has no signal handlers, and none is touched.

    Args:
        on_first: Bound method to call at the first signal, in the handler; held weakly.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = weakref.WeakMethod(on_first)
        self._count = 0

    def install(self) -> None:
        """Take over SIGINT, unless it is ignored or handled outside Python."""
        global _previous, _is_installed
        if threading.current_thread() is not threading.main_thread():
            return
        if not _is_installed:
            previous = signal.getsignal(signal.SIGINT)
            if previous is None or previous is signal.SIG_IGN:
                return
            _previous = previous
            signal.signal(signal.SIGINT, _handle)
            _is_installed = True
        _active.add(self)

    def restore(self) -> None:
        """Put back the handler that was there, unless others need ours or somebody replaced it."""
        global _previous, _is_installed
        _active.discard(self)
        if _active or not _is_installed:
            return
        if threading.current_thread() is not threading.main_thread():
            return  # ours stays, and passes the signal on
        if signal.getsignal(signal.SIGINT) is _handle:
            signal.signal(signal.SIGINT, _previous)
        _is_installed = False
        _previous = None

    def check(self) -> None:
        """Raise KeyboardInterrupt if the user has asked for the second time."""
        if self._count >= 2:
            self._count = 1
            raise KeyboardInterrupt

    @property
    def is_signalled(self) -> bool:
        """Whether a signal has come."""
        return self._count > 0

    def reset(self) -> None:
        """Forget the signals so far."""
        self._count = 0

    def count(self) -> int:
        """Take notice of a signal; returns how many there have been."""
        self._count += 1
        on_first = self._on_first()
        if self._count == 1 and on_first is not None:
            on_first()
        return self._count


def _handle(signum: int, frame: FrameType | None) -> None:
    handlers = list(_active)
    if handlers:
        ends = max([handler.count() for handler in handlers]) >= 3
    else:
        # Left behind by a Dataloader that was left off the main thread.
        ends = _previous == signal.SIG_DFL
        if callable(_previous):
            _previous(signum, frame)
    if ends:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
