"""The flow of batches between entering and leaving a Dataloader's block.

What is planned, pending and delivered, where that stands, and what ends it: the schedule, an
interrupt, an error, the end of the block, or a fork of the process. Who loads is in
hydrax._loading, what the disk cache gives in hydrax._caching, and how memory becomes a batch in
hydrax._delivery. What is done about a failed batch is up to hydrax._dataloader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

from hydrax import _core
from hydrax._batch import Batch
from hydrax._caching import Caching
from hydrax._delivery import Delivery
from hydrax._interrupt import InterruptHandler
from hydrax._loading import Loading
from hydrax._records import BatchFailure, BatchRecords, describe_batch, describe_item
from hydrax._schedule import PlannedBatch, Position
from hydrax._setup import Setup, check_memory, make_caching
from hydrax._stats import LoaderStats
from hydrax.errors import (
    CacheError,
    CacheMissingError,
    HydraxError,
    JaxInWorkerError,
    WorkerDiedError,
    WorkerStartError,
)

__all__ = ["Flow", "entered_arenas"]

logger = logging.getLogger(__name__)

# JAX keeps a capsule of about 100 bytes for each array until it is next called or garbage is
# collected, which a loop that only reads arrays may never do.
_COLLECT_EVERY = 1024
# How often next() looks for loader processes that have ended while it need not wait.
_LOOK_EVERY_NS = 20_000_000


class Flow:
    """The batches of one Dataloader, one after the other.

    It may be made to begin elsewhere before it is opened, and again while it is open; once closed
    it stays so.

    Args:
        setup: Of the Dataloader.

    Attributes:
        state: How far it has come. ``"ended"``: there is no next batch, but the block goes on.
        position: Where the next batch stands in the schedule.
        first_position: Where the first one did.
        last_training: The training batch that was delivered last.
        is_interrupted: Whether it has been told to end.
        loading: Who loads, while it is open.
    """

    def __init__(self, setup: Setup) -> None:
        self.loading: Loading | None = None
        self._setup = setup
        self._caching = make_caching(setup)
        self._delivery: Delivery | None = None
        self.state: Literal["new", "running", "ended", "closed"] = "new"
        self.position = self.first_position = setup.schedule.start
        self._planner: Iterator[PlannedBatch] = iter(setup.schedule)
        self._next_planned: PlannedBatch | None = next(self._planner, None)
        self._pending: deque[PlannedBatch] = deque()
        self._fatal_error: HydraxError | None = None
        self.last_training: PlannedBatch | None = None
        self.is_interrupted = False
        self._interrupt_handler = InterruptHandler(self.interrupt)
        self._idle_ns = 0
        self._look_at_ns = 0
        self._final_stats: LoaderStats | None = None
        self._reset_counts()

    # From the first batch to the end

    def open(self) -> None:
        """Begin to load. On failure it is closed.

        Raises:
            CacheError: The disk cache does not fit, or is not there.
            ArenaMemoryError: There is not enough memory.
            WorkerStartError: A loader process could not be started.
        """
        # Again, as much may have been taken since the Dataloader was made.
        check_memory(self._setup.depth, self._setup.arena_nbytes)
        self._delivery = Delivery(self._setup)
        try:
            _entered.add(self)  # first, so that a process forked meanwhile leaves it alone
            if self._caching is not None:
                self._caching.open()
            self._reset_counts()
            self._start_loading()
            self._interrupt_handler.install()
        except BaseException:
            self.close()
            raise

    def go_to(self, position: Position) -> None:
        """Go on from a position; batches that were loaded ahead are given up."""
        is_open = self.state != "new"
        if is_open:
            self._stop_loading()
        else:
            self.first_position = position
        self.position = position
        self._planner = self._setup.schedule.batches(position)
        self._next_planned = next(self._planner, None)
        self.last_training = None
        self._forget_plans()
        self._fatal_error = None
        self.is_interrupted = False
        self._interrupt_handler.reset()
        if is_open:
            self._reset_counts()
            self._restart_loading()

    def interrupt(self) -> None:
        """Have the next :meth:`next` end the iteration. From any thread, or a signal handler."""
        self.is_interrupted = True
        loading = self.loading  # the block may be left at the same time
        if loading is not None:
            loading.arena.kick()

    def close(self, *, is_checked: bool = False) -> None:
        """End loading and give back what it took; may be called again.

        Args:
            is_checked: Whether to raise, in debug mode, for a delivered batch that was changed.

        Raises:
            ArrayChangedError: That is so.
        """
        watch = None if self.loading is None else self.loading.watch
        self.state = "closed"
        if self.loading is not None and self._final_stats is None:
            self._final_stats = self.stats()
        try:
            self._stop_loading()
        finally:
            if self._caching is not None:
                self._close_caching(self._caching)
            self.loading = None  # arrays that still live keep the arena's memory
            self._fatal_error = None
            self._interrupt_handler.restore()
            self._pending.clear()
        if is_checked and watch is not None:
            watch.check(is_end=True)

    def abandon(self) -> None:
        """In a process that the user forked: workers and arena are the parent's business."""
        self.state = "closed"
        loading, self.loading = self.loading, None
        if loading is not None and loading.pool is not None:
            loading.pool.abandon()
        if self._caching is not None:
            self._caching.abandon()
        self._interrupt_handler.restore()

    def __del__(self) -> None:
        # Only for one that was opened and then forgotten; the with block closes otherwise.
        loading = getattr(self, "loading", None)
        if loading is not None and loading.pool is not None:
            self.close()

    def _start_loading(self) -> Loading:
        """Have an arena and workers, and plan the first batches."""
        self.loading = loading = Loading(
            self._setup,
            self._plan_ahead,
            self._indices_of,
            runs_startup_func=self.loading is None,
        )
        self.state = "running"
        return loading

    def _restart_loading(self) -> Loading:
        try:
            return self._start_loading()
        except BaseException:
            self.close()
            raise

    def _stop_loading(self) -> None:
        """End the workers. Arrays that are still held keep the arena alive."""
        if self.loading is not None:
            self.loading.stop()

    def _close_caching(self, caching: Caching) -> None:
        caching.close()
        if self._final_stats is not None:
            self._final_stats = dataclasses.replace(
                self._final_stats, batches_saved=caching.saved_count
            )

    # Planning

    def _plan_ahead(self, arena: _core.Arena) -> None:
        """Publish plans until the ring is full or the schedule ends."""
        caching = self._caching
        while self._next_planned is not None:
            way = "load" if caching is None else caching.plan(self._next_planned)
            if way == "wait" or (way == "load" and not arena.publish(self._next_planned.plan)):
                return
            if caching is not None and way == "load":
                caching.published(self._next_planned)
            self._pending.append(self._next_planned)
            self._next_planned = next(self._planner, None)

    def _forget_plans(self) -> None:
        self._pending.clear()
        if self._caching is not None:
            self._caching.forget_plans()

    def _describe_item(self, serial: int, item: int) -> str:
        for planned in self._pending:
            if planned.plan.serial == serial:
                return describe_item(planned, self._setup.groups[planned.group_number], item)
        return f"item {item} of a batch"

    def _indices_of(self, serial: int, first: int, count: int) -> list[int]:
        for planned in self._pending:
            if planned.plan.serial == serial:
                return planned.plan.indices()[first : first + count]
        return []

    # The next batch

    def next(self) -> Batch[Any] | BatchFailure:
        """The next batch, or the error that stands in its place.

        Raises:
            StopIteration: There is none.
            RuntimeError: The block is not entered, or has been left.
            HydraxError: There are no more batches, or there is none for too long a time.
        """
        if self.state != "running":
            self._refuse_next()
        self._check_interrupted()
        pending = self._pending
        is_deterministic = self._setup.deterministic
        lease: _core.Lease | None = None
        if self._caching is not None:
            found = self._next_cached(self._caching)
            if isinstance(found, (Batch, BatchFailure)):
                return found
            lease = found
        if not pending:
            self.state = "ended"
            raise StopIteration
        loading = self.loading
        assert loading is not None
        serial = pending[0].plan.serial if is_deterministic else None
        if time.monotonic_ns() >= self._look_at_ns:
            self._look_after_workers(loading)
        if lease is None:
            lease = loading.arena.take(serial)
        if lease is None:
            lease = self._wait(loading, serial)
        if is_deterministic:
            planned = pending.popleft()
        else:
            planned = next(entry for entry in pending if entry.plan.serial == lease.serial)
            pending.remove(planned)
        self._plan_ahead(loading.arena)
        self.position = planned.following
        read = loading.read_records(planned, lease) if lease.has_records else None
        if isinstance(read, BatchFailure):
            if self._caching is not None:
                self._caching.failed(planned)
            # The traceback of an error that is kept keeps frames, which must not keep the slot.
            del lease
            return read
        is_saved = False
        if self._caching is not None:
            try:
                is_saved = self._save(self._caching, planned, lease, read)
            except CacheError as error:
                del lease
                return BatchFailure(error.with_traceback(None), planned.valid_count, False)
        return self._deliver(loading, planned, lease, read, is_uncached=not is_saved)

    def _refuse_next(self) -> NoReturn:
        if self.state == "new":
            raise RuntimeError("iterate over a Dataloader inside its with block")
        if self.state == "closed":
            raise RuntimeError("the Dataloader's with block has been left; make a new Dataloader")
        if self._fatal_error is not None:
            raise self._fatal_error  # not an end like any other
        self._interrupt_handler.check()
        raise StopIteration

    def _check_interrupted(self) -> None:
        """End the iteration if that has been asked for; in debug mode, look at what came back."""
        loading = self.loading
        if loading is not None and loading.watch is not None:
            loading.watch.check()
        if self.is_interrupted:
            self._interrupt_handler.check()
            self.state = "ended"
            logger.info(
                "stopped by %s %s%s",
                "Ctrl+C" if self._interrupt_handler.is_signalled else "interrupt()",
                "before the first training batch"
                if self.last_training is None
                else f"after {describe_batch(self.last_training)}",
                "; get_state() goes on from there" if self._setup.deterministic else "",
            )
            raise StopIteration

    def _wait(self, loading: Loading, serial: int | None) -> _core.Lease:
        """Wait for a batch, counting the time as idle."""
        start = time.monotonic_ns()
        try:
            with self._fatal_errors():
                return loading.waiter.wait(serial, self._check_interrupted, self._describe_item)
        finally:
            self._idle_ns += time.monotonic_ns() - start

    def _look_after_workers(self, loading: Loading) -> None:
        """Replace a worker that has ended, or raise, although there is no need to wait for it."""
        self._look_at_ns = time.monotonic_ns() + _LOOK_EVERY_NS
        with self._fatal_errors():
            loading.look_after(self._describe_item)

    @contextlib.contextmanager
    def _fatal_errors(self) -> Iterator[None]:
        """Keep an error after which there are no more batches."""
        try:
            yield
        except (WorkerDiedError, WorkerStartError, JaxInWorkerError) as error:
            self._fatal_error = error
            self.state = "ended"
            raise

    def _deliver(
        self,
        loading: Loading,
        planned: PlannedBatch,
        memory: _core.Lease | _core.Mapping,
        read: BatchRecords | None,
        *,
        is_uncached: bool,
    ) -> Batch[Any]:
        """The batch in a leased slot, or in a mapped file; it is watched and counted."""
        assert self._delivery is not None
        caching, number = self._caching, planned.group_number
        keep = None
        if (
            is_uncached
            and caching is not None
            and self._setup.groups[number].cache_location is not None
            and not (read is not None and read.skipped)
        ):
            keep = caching.save_made
        batch = self._delivery.make(
            planned, memory, loading.addresses, read, is_uncached=is_uncached, keep=keep
        )
        if isinstance(memory, _core.Lease) and loading.watch is not None:
            layouts = self._setup.layouts[number]
            loading.watch.hold(memory, layouts, planned.item_count, describe_batch(planned))
        if planned.kind == _core.TRAINING:
            self.last_training = planned
        self._batches_delivered += 1
        if self._batches_delivered % _COLLECT_EVERY == 0:
            gc.collect(0)
        self._items_delivered += batch.valid_count
        self._items_skipped += len(batch.skipped)
        return batch

    # The disk cache

    def _next_cached(self, caching: Caching) -> Batch[Any] | BatchFailure | _core.Lease | None:
        """The next batch, if it comes from the disk cache, or the error in its place.

        Otherwise a loaded batch that has turned out to be ready, or None.
        """
        pending = self._pending
        loading = self.loading
        assert loading is not None
        caching.begin()
        start = time.monotonic_ns()
        if not pending:
            self._plan_ahead(loading.arena)
        while not pending and self._next_planned is not None:
            caching.wait_for(self._next_planned, self._check_interrupted)
            self._plan_ahead(loading.arena)
        while pending:
            planned = pending[0]
            if not caching.is_read(planned):
                if self._setup.deterministic:
                    return None
                lease = loading.arena.take(None)
                other = caching.first_read(pending)
                if lease is not None or other is None:
                    return lease
                planned = other
            content = caching.take(planned, self._check_interrupted)
            if content is None:
                loading = self._load_after_all(loading, caching, planned)
                continue
            waited_ns = time.monotonic_ns() - start
            self._idle_ns += waited_ns
            loading.waiter.starved_ns += waited_ns
            pending.remove(planned)
            self._plan_ahead(loading.arena)
            self.position = planned.following
            if isinstance(content, CacheMissingError):
                return BatchFailure(content, planned.valid_count, False)
            read = None if content.additional is None else BatchRecords(content.additional, {}, {})
            return self._deliver(loading, planned, content.mapping, read, is_uncached=False)
        return None

    def _load_after_all(self, loading: Loading, caching: Caching, planned: PlannedBatch) -> Loading:
        """Have a planned batch loaded that turned out not to be in the disk cache.

        Returns:
            Who loads from now on.
        """
        if not caching.is_loading(entry for entry in self._pending if entry is not planned):
            loading.arena.publish(planned.plan)
            caching.published(planned)
            return loading
        # Batches behind it have been handed out to the workers, and may fill all slots.
        again = [*self._pending, *([] if self._next_planned is None else [self._next_planned])]
        self._planner = itertools.chain(again, self._planner)
        self._next_planned = next(self._planner, None)
        self._forget_plans()
        self._stop_loading()
        return self._restart_loading()

    def _save(
        self,
        caching: Caching,
        planned: PlannedBatch,
        lease: _core.Lease,
        read: BatchRecords | None,
    ) -> bool:
        """Have the disk cache keep a loaded batch, if it is to; returns whether it does."""
        assert self._delivery is not None
        if read is not None and read.skipped:
            caching.failed(planned)  # another run may be able to load all of it
            return False
        additional = None if read is None else read.additional
        return caching.save(planned, lease, additional, is_copied=self._delivery.is_by_user)

    # Counts

    def _reset_counts(self) -> None:
        self._batches_delivered = self._items_delivered = 0
        self._batches_dropped = self._items_dropped = self._items_skipped = 0
        self._entered_ns = time.monotonic_ns()

    def count_dropped(self, failure: BatchFailure) -> None:
        """Count a batch that did not come."""
        self._batches_dropped += 1
        self._items_dropped += failure.item_count

    def take_idle_ns(self) -> int:
        """Nanoseconds that :meth:`next` has waited since the last call of this."""
        idle_ns, self._idle_ns = self._idle_ns, 0
        return idle_ns

    def stats(self) -> LoaderStats:
        """Counts and times so far; after it was closed, what they were then.

        Raises:
            RuntimeError: It has not been opened.
        """
        if self._final_stats is not None:
            return self._final_stats
        loading = self.loading
        if loading is None:
            raise RuntimeError("a Dataloader has statistics once its with block is entered")
        elapsed_sec = max(time.monotonic_ns() - self._entered_ns, 1) * 1e-9
        workers = loading.worker_stats(elapsed_sec)
        return LoaderStats(
            batches_delivered=self._batches_delivered,
            items_delivered=self._items_delivered,
            batches_dropped=self._batches_dropped,
            items_dropped=self._items_dropped,
            items_skipped=self._items_skipped,
            items_pending=sum(planned.valid_count for planned in list(self._pending)),
            items_retried=0 if loading.pool is None else loading.pool.retried_count,
            worker_restarts=0 if loading.pool is None else loading.pool.restart_count,
            batches_ready=loading.arena.slot_states().count(_core.SLOT_READY),
            elapsed_sec=elapsed_sec,
            starved_sec=loading.waiter.starved_ns * 1e-9,
            blocked_sec=loading.waiter.blocked_ns * 1e-9,
            loading_sec=sum(worker.busy_sec for worker in workers),
            slot_wait_sec=sum(worker.slot_wait_sec for worker in workers),
            workers=() if loading.pool is None else tuple(workers),
            batches_cached=0 if self._caching is None else self._caching.read_count,
            batches_saved=0 if self._caching is None else self._caching.saved_count,
        )


_entered: weakref.WeakSet[Flow] = weakref.WeakSet()


def entered_arenas() -> list[_core.Arena]:
    """Arenas of all Dataloaders that were entered and still exist."""
    return [flow.loading.arena for flow in _entered if flow.loading is not None]


def _abandon_all() -> None:
    for flow in list(_entered):
        flow.abandon()
    _entered.clear()


os.register_at_fork(after_in_child=_abandon_all)
