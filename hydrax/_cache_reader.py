"""Reading ahead in the disk cache: the batches that come next are mapped, read and checked.

What takes time is done by threads; what none of them has begun yet when the training thread wants
it, that one reads itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hydrax._cache import CachedBatch, CacheFolder, Key

__all__ = ["CacheReader", "ReadTask"]

# How long to wait for a thread between two looks at whether waiting is to end.
_PIECE_S = 0.1


class ReadTask(NamedTuple):
    """A batch to read."""

    folder: CacheFolder
    key: Key
    item_count: int

    def run_now(self) -> CachedBatch | None:
        """Read it if that takes no waiting; see CacheFolder.read_now()."""
        return self.folder.read_now(self.key)

    def run(self) -> CachedBatch:
        """Read it; see CacheFolder.read()."""
        return self.folder.read(self.key, self.item_count)


class _Entry:
    """A task for the threads and what has become of it."""

    def __init__(self, task: ReadTask) -> None:
        self.task = task
        self.claim = threading.Lock()  # held by the thread that reads it, or has read it
        self.done = threading.Lock()  # held until result is there
        self.done.acquire()
        self.result: CachedBatch | Exception | None = None

    def run(self) -> None:
        """Read it, unless somebody else does."""
        if not self.claim.acquire(blocking=False):
            return
        try:
            self.result = self.task.run()
        except Exception as error:  # whatever it is, it is for the one who wanted the batch
            self.result = error.with_traceback(None)
        self.done.release()


class CacheReader:
    """Threads that read ahead what is not in memory, or not known to be right.

    They start with the first such task. What is in memory is mapped at once: to hand that to a
    thread takes longer than to do it.

    Args:
        thread_count: How many; 0 reads everything when it is taken.
    """

    def __init__(self, thread_count: int) -> None:
        self._thread_count = thread_count
        self._threads: list[threading.Thread] = []
        self._entries: dict[int, CachedBatch | _Entry] = {}
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()

    def read_ahead(self, tasks: Iterable[tuple[int, ReadTask]]) -> None:
        """Read these too, given as serial number and task, in this order."""
        if self._thread_count == 0:
            return
        for serial, task in tasks:
            if serial not in self._entries:
                self._entries[serial] = task.run_now() or self._hand_over(task)

    def _hand_over(self, task: ReadTask) -> _Entry:
        entry = _Entry(task)
        self._queue.put(entry)
        while len(self._threads) < self._thread_count:
            thread = threading.Thread(target=self._run, name="hydrax-cache-read", daemon=True)
            self._threads.append(thread)
            thread.start()
        return entry

    def take(self, serial: int, task: ReadTask, check: Callable[[], None]) -> CachedBatch:
        """The batch of a task, read ahead or now.

        Args:
            serial: Its serial number.
            task: The task, in case that it was not read ahead.
            check: Called now and then while this waits; raises if it is to end.

        Raises:
            DamagedFileError: It cannot be had.
        """
        entry = self._entries.get(serial)
        if isinstance(entry, _Entry) and not entry.claim.acquire(blocking=False):
            while not entry.done.acquire(timeout=_PIECE_S):
                check()
            del self._entries[serial]
            assert entry.result is not None
            if isinstance(entry.result, Exception):
                raise entry.result
            return entry.result
        self._entries.pop(serial, None)
        if isinstance(entry, CachedBatch):
            return entry
        return task.run_now() or task.run()

    def clear(self) -> None:
        """Forget all tasks and what was read for them."""
        for entry in self._entries.values():
            if isinstance(entry, _Entry):
                entry.claim.acquire(blocking=False)  # so that nobody begins it
        self._entries.clear()

    def close(self) -> None:
        """End the threads."""
        self.clear()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            entry.run()
            del entry  # or this thread would keep the file mapped while it waits
