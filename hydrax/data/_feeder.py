"""Loading in a thread of this process, where the source cannot be in another one."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import NoReturn

from hydrax import _core
from hydrax.data._draw_loader import DrawJob

__all__ = ["Feeder"]

logger = logging.getLogger(__name__)

_GRACE_S = 5.0


class Feeder:
    """A thread in the part of the loader processes of an arena.

    Programs under ``jit`` wait for its loads as for those of a process, without the GIL; the
    thread takes the GIL while it loads.

    Args:
        arena: Where to load to; made for one worker.
        job: What to load.
    """

    def __init__(self, arena: _core.Arena, job: DrawJob) -> None:
        self._arena = arena
        self._thread = threading.Thread(
            target=_feed, args=(arena, job), name="hydrax-feeder", daemon=True
        )

    @property
    def pids(self) -> list[int]:
        """Process id of this process, which does the loading."""
        return [os.getpid()]

    def bury(self, index: int, describe: Callable[[int, int], str]) -> NoReturn:
        """There is no process that could have ended."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread once it has loaded what it is loading. May be called again."""
        self._arena.close()
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        self._thread.join(_GRACE_S)
        if self._thread.is_alive():
            logger.warning("a load that has not ended for %g s goes on in its thread", _GRACE_S)


def _feed(arena: _core.Arena, job: DrawJob) -> None:
    # Waiting asks for the process to watch; with -1 it would end at each signal.
    this_fd = os.pidfd_open(os.getpid())
    try:
        loader = job.make_loader(arena)
        failure: BaseException | None = None
        try:
            job.source.start()
        except BaseException as error:
            failure = error
        arena.set_started(0)
        while (run := arena.claim(0, this_fd, None)) is not None:
            if failure is None:
                loader.load(run)
            else:
                loader.fail(run, failure, "start, before loading")
    finally:
        os.close(this_fd)
