"""What Ctrl+C does while batches flow: stop softly, then raise, then end at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["InterruptHandler"]


class InterruptHandler:
    """Handles SIGINT between :meth:`install` and :meth:`restore`.

    The first signal calls ``on_first``; the second is raised as KeyboardInterrupt by the next
    :meth:`check`; the third ends the process as an unhandled SIGINT does. Off the main thread
    Python has no signal handlers, and none is touched.

    Args:
        on_first: Called at the first signal, in the handler.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._count = 0
        self._previous: Any = None
        self._is_installed = False

    def install(self) -> None:
        """Take over SIGINT, unless it is ignored or handled outside Python."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGINT)
        if previous is None or previous is signal.SIG_IGN:
            return
        self._previous = previous
        signal.signal(signal.SIGINT, self._handle)
        self._is_installed = True

    def restore(self) -> None:
        """Put back the handler that was there, unless somebody replaced ours."""
        if not self._is_installed:
            return
        self._is_installed = False
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raise KeyboardInterrupt if the user has asked for the second time."""
        if self._count >= 2:
            self._count = 1
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1:
            self._on_first()
        elif self._count >= 3:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
