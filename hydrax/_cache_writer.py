"""Writing to the disk cache beside training: one thread writes, another brings it to the disk.

A batch's memory is given back as soon as it has been written to its file. Bringing files to the
disk takes longer; it is done for many of them at a time.
"""

from __future__ import annotations

import errno
import logging
import queue
import shutil
import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple

from hydrax._cache import CacheFolder, Key, PendingFile
from hydrax._memory import format_nbytes

__all__ = ["CacheWriter", "WriteTarget", "WriteTask"]

logger = logging.getLogger(__name__)

# Files that are written and wait to be brought to the disk; each is an open file.
_UNSYNCED_FILES = 64


class WriteTarget:
    """Where the batches of one group go, until that has failed.

    Attributes:
        folder: The cache.
        is_stopped: Whether nothing more is written in this run.
    """

    def __init__(self, folder: CacheFolder) -> None:
        self.folder = folder
        self.is_stopped = False

    def stop(self, error: OSError, nbytes: int) -> None:
        """Write nothing more; says why, once."""
        if self.is_stopped:
            return
        self.is_stopped = True
        free = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            try:
                free_nbytes = shutil.disk_usage(self.folder.path).free
                free = f" ({format_nbytes(free_nbytes)}, {free_nbytes} bytes, are free)"
            except OSError:
                pass
        logger.warning(
            "the disk cache in %r takes no more batches in this run: writing one of %s (%d bytes) "
            "failed: %s%s; training goes on, and what is not cached is loaded each time",
            self.folder.path,
            format_nbytes(nbytes),
            nbytes,
            error.strerror or error,
            free,
        )


class WriteTask(NamedTuple):
    """A batch to write.

    Attributes:
        target: Where to.
        name: What the caller knows the batch by.
        key: Which batch.
        item_count: Its items.
        memory: Called by the writing thread for the arrays; see CacheFolder.write().
        additional: Its additional results, encoded.
        nbytes: Size of the file.
    """

    target: WriteTarget
    name: Hashable
    key: Key
    item_count: int
    memory: Callable[[], memoryview]
    additional: bytes
    nbytes: int


class CacheWriter:
    """Two threads that save batches; they start with the first batch.

    Args:
        depth: Batches that may wait to be written, beyond which add() waits.

    Attributes:
        saved_count: Batches that are on the disk under their names.
    """

    def __init__(self, depth: int) -> None:
        self._tasks: queue.Queue[WriteTask | None] = queue.Queue(depth)
        self._written: queue.Queue[tuple[WriteTask, PendingFile] | None] = queue.Queue(
            _UNSYNCED_FILES
        )
        self._changed = threading.Condition()
        self._saving: set[Hashable] = set()
        self._threads: list[threading.Thread] = []
        self.saved_count = 0

    def add(self, task: WriteTask) -> None:
        """Save a batch; waits while too many others have not been written."""
        if not self._threads:
            for name, target in (("write", self._write_all), ("sync", self._sync_all)):
                thread = threading.Thread(target=target, name=f"hydrax-cache-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()
        with self._changed:
            self._saving.add(task.name)
        self._tasks.put(task)

    def is_saving(self, name: Hashable) -> bool:
        """Whether a batch is on its way to the disk."""
        return name in self._saving

    def wait(self, name: Hashable, timeout_s: float) -> bool:
        """Wait for a batch to be saved, or to be given up; False after the time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: name not in self._saving, timeout_s)

    def close(self) -> None:
        """Save what has been added, and end the threads."""
        if self._threads:
            self._tasks.put(None)
            for thread in self._threads:
                thread.join()
            self._threads.clear()

    def _end(self, names: list[Hashable], saved_count: int) -> None:
        with self._changed:
            self.saved_count += saved_count
            self._saving.difference_update(names)
            self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                break
            self._write(task)
            del task  # it holds the batch's memory
        self._written.put(None)

    def _write(self, task: WriteTask) -> None:
        if task.target.is_stopped:
            self._end([task.name], 0)
            return
        try:
            file = task.target.folder.write(
                task.key, task.item_count, task.memory(), task.additional
            )
        except OSError as error:
            task.target.stop(error, task.nbytes)
            self._end([task.name], 0)
        except Exception as error:  # the arrays cannot be had: deleted, donated, out of range
            logger.warning("%s is not cached: %s", task.target.folder.path_of(task.key), str(error))
            self._end([task.name], 0)
        else:
            self._written.put((task._replace(memory=_nothing), file))

    def _sync_all(self) -> None:
        is_ended = False
        while not is_ended:
            files = [self._written.get()]
            while not self._written.empty():
                files.append(self._written.get())
            is_ended = files[-1] is None
            targets: dict[WriteTarget, list[tuple[WriteTask, PendingFile]]] = {}
            for entry in files:
                if entry is not None:
                    targets.setdefault(entry[0].target, []).append(entry)
            for target, entries in targets.items():
                self._sync(target, entries)

    def _sync(self, target: WriteTarget, entries: list[tuple[WriteTask, PendingFile]]) -> None:
        saved: list[Key] = []
        try:
            saved = target.folder.commit([file for _, file in entries])
        except OSError as error:
            target.stop(error, sum(file.nbytes for _, file in entries))
        for key in saved:
            logger.debug("saved %s", target.folder.path_of(key))
        self._end([task.name for task, _ in entries], len(saved))


def _nothing() -> memoryview:
    return memoryview(b"")
