"""Waiting for a batch: what ends it, and what is said when it has taken too long."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from hydrax import _core
from hydrax._item_loader import ItemLoader
from hydrax._workers import WorkerPool
from hydrax.errors import BatchTimeoutError

__all__ = ["BatchWaiter"]

_LEASED = 4  # enum hx_slot_state
_FOREVER_NS = 2**63
# All slots held for so long: it may be garbage that holds them.
_COLLECT_AFTER_NS = 100_000_000


class BatchWaiter:
    """Waits for the batches of one arena.

    Args:
        arena: The arena.
        loading: The loader processes, or the loader in this process.
        timeout_s: Seconds after which waiting ends; None waits for ever.
        describe_item: Text for the item at a position of a batch with a serial number.
    """

    def __init__(
        self,
        arena: _core.Arena,
        loading: WorkerPool | ItemLoader,
        timeout_s: float | None,
        describe_item: Callable[[int, int], str],
    ) -> None:
        self._arena = arena
        self._loading = loading
        self._timeout_s = timeout_s
        self._describe_item = describe_item

    def wait(self, serial: int | None, check: Callable[[], None]) -> _core.Lease:
        """The batch of a serial number, or for None any, as soon as it is ready.

        Args:
            serial: Which batch.
            check: Called whenever the wait is interrupted; raises if it is to end.

        Raises:
            BatchTimeoutError: The time is over; says what everybody is doing.
            WorkerDiedError: A loader process has ended.
            RuntimeError: The arena was closed.
        """
        start = time.monotonic_ns()
        end = _FOREVER_NS if self._timeout_s is None else start + int(self._timeout_s * 1e9)
        deadline = min(end, start + _COLLECT_AFTER_NS) if self._are_slots_kept() else end
        while True:
            result = self._attempt(serial, deadline)
            if isinstance(result, _core.Lease):
                return result
            check()
            if result >= 0:
                assert isinstance(self._loading, WorkerPool)
                raise self._loading.ended(result, self._describe_item)
            if result == _core.CLOSED:
                raise RuntimeError("the Dataloader was closed while next() was waiting")
            if result == _core.TIMED_OUT and deadline == end:
                raise BatchTimeoutError(self._describe())
            if result == _core.TIMED_OUT:
                gc.collect()  # batches may hang in reference cycles
                deadline = end

    def _are_slots_kept(self) -> bool:
        """Whether all slots are held; JAX then gives back those that it no longer needs.

        What it took through the buffer protocol it lets go of only when it is called, or when
        garbage is collected, however little.
        """
        are_kept = all(state == _LEASED for state in self._arena.slot_states())
        if are_kept:
            gc.collect(0)
        return are_kept

    def _attempt(self, serial: int | None, deadline: int) -> _core.Lease | int:
        """Wait once; the result is that of Arena.wait()."""
        if isinstance(self._loading, WorkerPool):
            return self._arena.wait(serial, deadline)
        run = self._arena.claim(0, -1, deadline)
        if run is None:
            return _core.TIMED_OUT if time.monotonic_ns() >= deadline else _core.INTERRUPTED
        self._loading.random.install()
        try:
            self._loading.load(run)
        finally:
            self._loading.random.uninstall()
        return self._arena.take(serial) or _core.INTERRUPTED

    def _describe(self) -> str:
        """What everybody is doing, for the time-out's message."""
        states = self._arena.slot_states()
        lines = [f"no batch came within timeout_sec={self._timeout_s:g} seconds"]
        if states.count(_LEASED) == len(states):
            lines.append(
                f"all {len(states)} slots (depth) are held by arrays of earlier batches: delete "
                "batches and their arrays before asking for the next one (enumerate() and zip() "
                "hold the last one, too: use a larger depth), or keep batch.copy(); "
                "hydrax.debug_batch_references() shows what holds them"
            )
        if isinstance(self._loading, WorkerPool):
            lines.extend(map(self._describe_worker, range(len(self._loading)), self._loading.pids))
        return "\n".join(lines)

    def _describe_worker(self, index: int, pid: int) -> str:
        is_started, item, seconds, count = self._arena.worker_state(index)
        if not is_started:
            doing = "is still in startup_func"
        elif item is None:
            doing = f"has nothing to do, after {count} items"
        else:
            doing = f"has been loading for {seconds:.1f} s, now at {self._describe_item(*item)}"
        return f"loader process {index} (pid {pid}) {doing}"
