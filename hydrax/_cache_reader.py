"""Reading ahead in the disk cache: threads that map and check the batches that come next.

The training thread takes what is there; what no thread has begun yet it reads itself.
"""

from __future__ import annotations

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

    def run(self) -> CachedBatch:
        """Read it; see CacheFolder.read()."""
        return self.folder.read(self.key, self.item_count)


class _Entry:
    """A task and what has become of it; guarded by the reader's condition."""

    def __init__(self, task: ReadTask) -> None:
        self.task = task
        self.is_begun = False
        self.result: CachedBatch | Exception | None = None


class CacheReader:
    """Threads that read ahead; they start with the first task.

    Args:
        thread_count: How many; 0 reads everything when it is taken.
    """

    def __init__(self, thread_count: int) -> None:
        self._thread_count = thread_count
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}
        self._is_closed = False

    def read_ahead(self, tasks: Iterable[tuple[int, ReadTask]]) -> None:
        """Read these too, given as serial number and task, in this order."""
        if self._thread_count == 0:
            return
        with self._changed:
            is_new = False
            for serial, task in tasks:
                if serial not in self._entries:
                    self._entries[serial] = _Entry(task)
                    is_new = True
            if not is_new:
                return
            self._changed.notify_all()
            while len(self._threads) < self._thread_count:
                thread = threading.Thread(target=self._run, name="hydrax-cache-read", daemon=True)
                self._threads.append(thread)
                thread.start()

    def take(self, serial: int, task: ReadTask, check: Callable[[], None]) -> CachedBatch:
        """The batch of a task, read ahead or now.

        Args:
            serial: Its serial number.
            task: The task, in case that it was not read ahead.
            check: Called now and then while this waits; raises if it is to end.

        Raises:
            DamagedFileError: It cannot be had.
        """
        with self._changed:
            entry = self._entries.get(serial)
            if entry is not None and not entry.is_begun:
                del self._entries[serial]
                entry = None
            while entry is not None and entry.result is None:
                self._changed.wait(_PIECE_S)
                check()
            self._entries.pop(serial, None)
        if entry is None:
            return task.run()
        assert entry.result is not None
        if isinstance(entry.result, Exception):
            raise entry.result
        return entry.result

    def clear(self) -> None:
        """Forget all tasks and what was read for them."""
        with self._changed:
            self._entries.clear()

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._is_closed = True
            self._entries.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            result: CachedBatch | Exception
            try:
                result = entry.task.run()
            except Exception as error:  # whatever it is, it is for the one who wanted the batch
                result = error.with_traceback(None)
            with self._changed:
                entry.result = result
                self._changed.notify_all()
            del entry, result  # or this thread would keep the file mapped while it waits

    def _next(self) -> _Entry | None:
        """The next task that nobody has begun; None at the end."""
        with self._changed:
            while not self._is_closed:
                for entry in self._entries.values():
                    if not entry.is_begun:
                        entry.is_begun = True
                        return entry
                self._changed.wait()
        return None
