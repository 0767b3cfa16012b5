"""Counts and times of a Dataloader, and what they say."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["LoaderStats", "WorkerStats"]

# Waiting for less than this share of the time is not worth a word.
_SMALL_SHARE = 0.05
# Workers that load for less than this share of the time are not what is missing.
_BUSY_SHARE = 0.7


@dataclass(frozen=True, kw_only=True)
class WorkerStats:
    """What one loader process has done.

    Attributes:
        pid: Its process id.
        item_count: Items it has loaded, or tried to.
        busy_sec: Seconds it has spent in loading.
        slot_wait_sec: Seconds it had nothing to do because every slot was in use: with batches
            that are ready, or that the training loop or unfinished computations hold.
        busy_share: ``busy_sec`` as a share of the time.
    """

    pid: int
    item_count: int
    busy_sec: float
    slot_wait_sec: float
    busy_share: float


_IDLE = WorkerStats(pid=0, item_count=0, busy_sec=0.0, slot_wait_sec=0.0, busy_share=0.0)


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """What a Dataloader has done since its block was entered, or since a state was set in it.

    Every item is in one of the counts: ``items_delivered + items_dropped + items_skipped +
    items_pending`` are the items of all batches that were planned so far.

    Attributes:
        batches_delivered: Batches that ``next`` has returned.
        items_delivered: Their items, without those that only pad a last batch and those skipped.
        batches_dropped: Batches that never came because an item of them failed: left out, or with
            an error in their place, see ``on_error``.
        items_dropped: Their items.
        items_skipped: Items of delivered batches that could not be loaded and are masked.
        items_pending: Items of batches that are planned, being loaded, or ready.
        items_retried: Items that were loaded again because a loader process died.
        worker_restarts: Loader processes that were replaced.
        batches_ready: Batches that are loaded and wait for ``next`` at this moment.
        elapsed_sec: Seconds since the block was entered.
        starved_sec: Seconds that ``next`` has waited for batches to be loaded.
        blocked_sec: Seconds that it has waited while every slot was held by batches that are kept
            or by computations that JAX had not finished.
        loading_sec: Seconds spent in loading, of all loader processes together.
        slot_wait_sec: Seconds that loader processes had to wait for a free slot, all together.
        workers: One entry for each loader process; empty with ``loader_count=0``.
        batches_cached: Batches delivered that came from the disk cache.
        batches_saved: Batches that the disk cache has got, and that are safe on the disk. Both
            count from when the block was entered.
    """

    batches_delivered: int
    items_delivered: int
    batches_dropped: int
    items_dropped: int
    items_skipped: int
    items_pending: int
    items_retried: int
    worker_restarts: int
    batches_ready: int
    elapsed_sec: float
    starved_sec: float
    blocked_sec: float
    loading_sec: float
    slot_wait_sec: float
    workers: tuple[WorkerStats, ...]
    batches_cached: int = 0
    batches_saved: int = 0

    @property
    def idle_sec(self) -> float:
        """Seconds that ``next`` has waited, for whatever reason."""
        return self.starved_sec + self.blocked_sec

    def since(self, earlier: LoaderStats) -> LoaderStats:
        """What has happened between an earlier call of ``stats()`` and this one.

        What is true at a moment, ``items_pending`` and ``batches_ready``, stays as it is.

        Example:
            >>> with hydrax.Dataloader(load, group) as dataloader:  # doctest: +SKIP
            ...     before = dataloader.stats()
            ...     train_epoch(dataloader)
            ...     print(dataloader.stats().since(before).verdict)
        """
        if earlier.elapsed_sec > self.elapsed_sec:  # a state was set in between
            return self
        elapsed_sec = max(self.elapsed_sec - earlier.elapsed_sec, 1e-9)
        before = {worker.pid: worker for worker in earlier.workers}
        workers = []
        for worker in self.workers:
            old = before.get(worker.pid, _IDLE)
            workers.append(
                WorkerStats(
                    pid=worker.pid,
                    item_count=worker.item_count - old.item_count,
                    busy_sec=worker.busy_sec - old.busy_sec,
                    slot_wait_sec=worker.slot_wait_sec - old.slot_wait_sec,
                    busy_share=(worker.busy_sec - old.busy_sec) / elapsed_sec,
                )
            )
        of_now = ("items_pending", "batches_ready")
        differences = {
            field.name: getattr(self, field.name)
            - (0 if field.name in of_now else getattr(earlier, field.name))
            for field in fields(self)
            if field.name != "workers"
        }
        return LoaderStats(**differences, workers=tuple(workers))

    @property
    def verdict(self) -> str:
        """In plain words, whether loading keeps up, and what to do if it does not.

        It begins with "keeping up", "starved" or "blocked".
        """
        elapsed = max(self.elapsed_sec, 1e-9)
        starved, blocked = self.starved_sec / elapsed, self.blocked_sec / elapsed
        if max(starved, blocked) < _SMALL_SHARE:
            return f"keeping up: waited {starved + blocked:.0%} of the time"
        if blocked >= starved:
            return (
                f"blocked {blocked:.0%} of the time: slots leased, batches are kept or depth is "
                "small"
            )
        if not self.workers:
            return f"starved {starved:.0%} of the time: loading in the main process; use workers"
        busy = sum(worker.busy_share for worker in self.workers) / len(self.workers)
        slot_wait = self.slot_wait_sec / len(self.workers) / elapsed
        if busy >= _BUSY_SHARE:
            advice = "add workers or make the loader faster"
        elif slot_wait >= _SMALL_SHARE:
            advice = f"without a free slot {slot_wait:.0%}, a larger depth may help"
        else:
            advice = "they start up or wait for processors"
        return f"starved {starved:.0%} of the time: workers busy {busy:.0%}, {advice}"
