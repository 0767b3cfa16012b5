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

Describe = Callable[[int, int], str]

_FOREVER_NS = 2**63
# All slots held for so long: it may be garbage that holds them.
_COLLECT_AFTER_NS = 100_000_000
# How long to wait between two looks while all slots are held.
_MIN_PIECE_NS, _MAX_PIECE_NS = 2_000_000, 100_000_000


class BatchWaiter:
    """Waits for the batches of one arena.

    Args:
        arena: The arena.
        loading: The loader processes, or the loader in this process.
        timeout_s: Seconds after which waiting ends; None waits for ever.

    Attributes:
        starved_ns: Time waited for batches to be loaded.
        blocked_ns: Time waited that began while all slots were held.
    """

    def __init__(
        self,
        arena: _core.Arena,
        loading: WorkerPool | ItemLoader,
        timeout_s: float | None,
    ) -> None:
        self._arena = arena
        self._loading = loading
        self._timeout_s = timeout_s
        self.starved_ns = 0
        self.blocked_ns = 0

    def wait(
        self, serial: int | None, check: Callable[[], None], describe: Describe
    ) -> _core.Lease:
        """The batch of a serial number, or for None any, as soon as it is ready.

        Args:
            serial: Which batch.
            check: Called whenever the wait is interrupted; raises if it is to end.
            describe: Text for the item at a position of a batch with a serial number.

        Raises:
            BatchTimeoutError: The time is over; says what everybody is doing.
            WorkerDiedError: A loader process has ended that is not to be replaced.
            RuntimeError: The arena was closed.
        """
        start = time.monotonic_ns()
        are_kept = self._are_slots_kept()
        try:
            return self._wait_from(start, serial, check, describe)
        finally:
            if are_kept:
                self.blocked_ns += time.monotonic_ns() - start
            else:
                self.starved_ns += time.monotonic_ns() - start

    def _wait_from(
        self, start: int, serial: int | None, check: Callable[[], None], describe: Describe
    ) -> _core.Lease:
        end = _FOREVER_NS if self._timeout_s is None else start + int(self._timeout_s * 1e9)
        is_collected = False
        while True:
            # As long as all slots are held, look again and again who can let go of one.
            now = time.monotonic_ns()
            piece = min(max((now - start) // 4, _MIN_PIECE_NS), _MAX_PIECE_NS)
            deadline = min(end, now + piece) if self._are_slots_kept() else end
            result = self._attempt(serial, deadline)
            if isinstance(result, _core.Lease):
                try:
                    return result
                finally:
                    # The traceback of an error that is kept can keep this frame, which must not
                    # keep the slot.
                    del result
            check()
            if result >= 0:
                assert isinstance(self._loading, WorkerPool)
                self._loading.replace(result, describe)
            elif result == _core.CLOSED:
                raise RuntimeError("the Dataloader was closed while next() was waiting")
            elif result == _core.TIMED_OUT and deadline == end:
                raise BatchTimeoutError(self._describe(describe))
            if not is_collected and time.monotonic_ns() - start > _COLLECT_AFTER_NS:
                is_collected = True
                gc.collect()  # batches may hang in reference cycles

    def _are_slots_kept(self) -> bool:
        """Whether all slots are held; JAX then gives back those that it no longer needs.

        What it took through the buffer protocol it lets go of only when it is called, or when
        garbage is collected, however little.
        """
        are_kept = all(state == _core.SLOT_LEASED for state in self._arena.slot_states())
        if are_kept:
            gc.collect(0)
        return are_kept

    def _attempt(self, serial: int | None, deadline: int) -> _core.Lease | int:
        """Wait once; the result is that of Arena.wait()."""
        if isinstance(self._loading, WorkerPool):
            return self._arena.wait(serial, deadline)
        run = self._arena.claim(0, -1, deadline)
        if run is None:
            now = time.monotonic_ns()
            result = self._arena.wait(serial, now)
            return _core.INTERRUPTED if result == _core.TIMED_OUT and now < deadline else result
        self._loading.random.install()
        try:
            self._loading.load(run)
        finally:
            self._loading.random.uninstall()
        return self._arena.take(serial) or _core.INTERRUPTED

    def _describe(self, describe: Describe) -> str:
        """What everybody is doing, for the time-out's message."""
        states = self._arena.slot_states()
        lines = [f"no batch came within timeout_sec={self._timeout_s:g} seconds"]
        if states.count(_core.SLOT_LEASED) == len(states):
            lines.append(
                f"all {len(states)} slots (depth) are held by arrays of earlier batches: delete "
                "batches and their arrays before asking for the next one (enumerate() and zip() "
                "hold the last one, too: use a larger depth), or keep batch.copy(); "
                "hydrax.debug_batch_references() shows what holds them"
            )
        if isinstance(self._loading, WorkerPool):
            for index, pid in enumerate(self._loading.pids):
                lines.append(self._describe_worker(index, pid, describe))
            lines.append("a loader function that uses JAX stops for ever; it must use NumPy")
        return "\n".join(lines)

    def _describe_worker(self, index: int, pid: int, describe: Describe) -> str:
        is_started, item, seconds, count, _ = self._arena.worker_state(index)
        if not is_started:
            doing = "is still in startup_func"
        elif item is None:
            doing = f"has nothing to do, after {count} items"
        else:
            doing = f"has been loading for {seconds:.1f} s, now at {describe(*item)}"
        return f"loader process {index} (pid {pid}) {doing}"
