"""One arena, and those who load into it: loader processes, or the main process itself.

It waits for batches, reads what was recorded of them, and counts the work. Which batches there are
to be is planned by hydrax._flow, and what a loader process does is in hydrax._item_loader.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from hydrax import _core
from hydrax._debug import SlotWatch
from hydrax._item_loader import ItemLoader
from hydrax._memory import format_nbytes
from hydrax._records import (
    BatchFailure,
    BatchRecords,
    failure_of_all,
    failure_of_change,
    read_records,
)
from hydrax._schedule import PlannedBatch
from hydrax._setup import Setup
from hydrax._stats import WorkerStats
from hydrax._waiting import BatchWaiter, Describe
from hydrax._workers import WorkerPool
from hydrax.errors import ArenaMemoryError

__all__ = ["Loading"]

logger = logging.getLogger(__name__)


class Loading:
    """Loads what is published in an arena of its own, from when it is made until :meth:`stop`.

    Args:
        setup: What to load, and by how many.
        publish: Publishes the first batches, so that they are there when loading begins.
        indices_of: See WorkerPool.
        runs_startup_func: Whether the main process, if it is to load, runs startup_func first;
            loader processes always do.

    Attributes:
        arena: The arena. Arrays that are still held keep it alive.
        addresses: Range of its addresses.
        pool: The loader processes; None if the main process loads.
        waiter: Waits for batches.
        watch: What is watched in debug mode; None otherwise.

    Raises:
        ArenaMemoryError: There is not enough memory.
        WorkerStartError: A loader process could not be started.
    """

    def __init__(
        self,
        setup: Setup,
        publish: Callable[[_core.Arena], None],
        indices_of: Callable[[int, int, int], list[int]],
        *,
        runs_startup_func: bool,
    ) -> None:
        self._setup = setup
        try:
            self.arena = _core.Arena(**setup.arena_config)
        except MemoryError as error:
            raise ArenaMemoryError(
                f"the arena of {format_nbytes(setup.arena_nbytes)} could not be made: {error}"
            ) from error
        address = self.arena.address
        self.addresses = range(address, address + memoryview(self.arena).nbytes)
        self.watch = SlotWatch(self.arena) if setup.job.is_debug else None
        self.pool: WorkerPool | None = None
        self._inline: ItemLoader | None = None
        try:
            publish(self.arena)
            if setup.loader_count == 0:
                if runs_startup_func and setup.job.startup_func is not None:
                    setup.job.startup_func()
                self._inline = ItemLoader(self.arena, setup.job)
                self.waiter = BatchWaiter(self.arena, self._inline, setup.timeout_s)
            else:
                self.pool = WorkerPool(
                    self.arena,
                    setup.loader_count,
                    setup.start_method,
                    setup.job,
                    setup.packed_job,
                    setup.timeout_s,
                    setup.max_restarts,
                    indices_of,
                )
                self.pool.start()
                self.waiter = BatchWaiter(self.arena, self.pool, setup.timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the loader processes and close the arena; may be called again."""
        if self.pool is not None:
            self.pool.stop()
        else:
            self.arena.close()

    def look_after(self, describe: Describe) -> None:
        """Replace a loader process that has ended, or raise, without waiting.

        Raises:
            WorkerDiedError: It is not to be replaced.
            WorkerStartError: It could not be replaced.
        """
        if self.pool is not None and (ended := self.pool.find_ended()) is not None:
            self.pool.replace(ended, describe)

    def read_records(
        self, planned: PlannedBatch, lease: _core.Lease
    ) -> BatchRecords | BatchFailure:
        """What was left with a batch; items that were skipped are logged."""
        group = self._setup.groups[planned.group_number]
        read = read_records(
            planned,
            group,
            lease.records(),
            is_batched=self._setup.job.is_batched,
            inline=self._inline,
        )
        if isinstance(read, BatchRecords):
            if self.watch is not None:
                layouts = self._setup.layouts[planned.group_number]
                arrays = self.watch.arrays(lease.slot, layouts, planned.item_count)
                changed = failure_of_change(planned, group, arrays, read)
                if changed is not None:
                    return changed
            for error in read.skipped.values():
                logger.warning("an item is skipped: %s", str(error))
            if len(read.skipped) == planned.valid_count:
                return failure_of_all(planned, read)
        return read

    def worker_stats(self, elapsed_sec: float) -> list[WorkerStats]:
        """What each loader process has done, or the main process if there are none."""
        return [
            self._worker_stats(index, elapsed_sec)
            for index in range(max(self._setup.loader_count, 1))
        ]

    def _worker_stats(self, index: int, elapsed_sec: float) -> WorkerStats:
        _, _, run_sec, item_count, busy_ns = self.arena.worker_state(index)
        busy_sec = busy_ns * 1e-9 + (run_sec or 0.0)
        return WorkerStats(
            pid=os.getpid() if self.pool is None else self.pool.pids[index],
            item_count=item_count,
            busy_sec=busy_sec,
            slot_wait_sec=self.arena.worker_slot_wait_ns(index) * 1e-9,
            busy_share=busy_sec / elapsed_sec,
        )
