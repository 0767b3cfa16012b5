"""Counts and times of a Dataloader, and what they say."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoaderStats", "WorkerStats"]

# Waiting for less than this share of the time is not worth a word.
_SMALL_SHARE = 0.05


@dataclass(frozen=True)
class WorkerStats:
    """What one loader process has done.

    Attributes:
        pid: Its process id.
        item_count: Items it has loaded.
        busy_sec: Seconds it has spent in loading.
        busy_share: That as a share of the time since the block was entered.
    """

    pid: int
    item_count: int
    busy_sec: float
    busy_share: float


@dataclass(frozen=True)
class LoaderStats:
    """What a Dataloader has done since its block was entered, or since a state was set in it.

    Attributes:
        batches_delivered: Batches that ``next`` has returned.
        items_delivered: Their items, without those that only pad a last batch.
        batches_dropped: Batches that were left out because an item failed, see ``on_error``.
        items_dropped: Their items.
        elapsed_sec: Seconds since then.
        starved_sec: Seconds that ``next`` has waited for batches to be loaded.
        blocked_sec: Seconds that it has waited while every slot was held by batches that are kept
            or by computations that JAX had not finished.
        workers: One entry for each loader process; empty with ``loader_count=0``.
    """

    batches_delivered: int
    items_delivered: int
    batches_dropped: int
    items_dropped: int
    elapsed_sec: float
    starved_sec: float
    blocked_sec: float
    workers: tuple[WorkerStats, ...]

    @property
    def verdict(self) -> str:
        """In plain words, whether loading keeps up, and what to do if it does not.

        Example:
            >>> LoaderStats(10, 40, 0, 0, 2.0, 0.02, 0.0, ()).verdict
            'keeping up: waited 1% of the time'
            >>> workers = (WorkerStats(1, 40, 1.96, 0.98),)
            >>> LoaderStats(10, 40, 0, 0, 2.0, 1.0, 0.0, workers).verdict
            'starved 50% of the time: workers busy 98%, add workers or make the loader faster'
        """
        elapsed = max(self.elapsed_sec, 1e-9)
        starved, blocked = self.starved_sec / elapsed, self.blocked_sec / elapsed
        if max(starved, blocked) < _SMALL_SHARE:
            return f"keeping up: waited {starved + blocked:.0%} of the time"
        if blocked >= starved:
            return (
                f"blocked {blocked:.0%} of the time: all slots are held, by batches that are kept "
                "or by computations that are not finished; a larger depth may help"
            )
        if not self.workers:
            return f"starved {starved:.0%} of the time: loading in the main process; use workers"
        busy = sum(worker.busy_share for worker in self.workers) / len(self.workers)
        advice = (
            "add workers or make the loader faster"
            if busy > 0.7
            else "they wait for slots or processors; a larger depth may help"
        )
        return f"starved {starved:.0%} of the time: workers busy {busy:.0%}, {advice}"
