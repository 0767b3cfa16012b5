"""Waiting for a batch: what ends it, and what is said when it has taken too long."""

from __future__ import annotations

import gc
import logging
import re
import time
from collections.abc import Callable

from hydrax import _core
from hydrax._holders import describe_holders
from hydrax._item_loader import ItemLoader
from hydrax._jax_watch import JaxWatch, is_in_jax, jax_call, source_of
from hydrax._stacks import Stack, format_stack
from hydrax._workers import WorkerPool
from hydrax.errors import BatchRetainedError, BatchTimeoutError, JaxInWorkerError

__all__ = ["BatchWaiter", "Describe"]

logger = logging.getLogger(__name__)

Describe = Callable[[int, int], str]

_FOREVER_NS = 2**63
# All slots held for so long: it may be garbage that holds them, or something worth a word.
_COLLECT_AFTER_NS = 100_000_000
_WARN_AFTER_NS = 2_000_000_000
# How long to wait between two looks, while all slots are held and otherwise.
_MIN_PIECE_NS, _MAX_PIECE_NS = 2_000_000, 100_000_000
_WATCH_NS = 250_000_000


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
        self._jax_watch: JaxWatch | None = None
        if isinstance(loading, WorkerPool) and loading.is_forked_from_jax:
            self._jax_watch = JaxWatch(arena, loading)
        self._warned: set[str] = set()
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
            BatchRetainedError: The time is over, and all slots are held; says by what.
            WorkerDiedError: A loader process has ended that is not to be replaced.
            JaxInWorkerError: A loader process waits inside JAX.
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
        kept_since: int | None = None
        is_collected = is_warned = False
        while True:
            # As long as all slots are held, look again and again who can let go of one.
            now = time.monotonic_ns()
            if self._are_slots_kept():
                kept_since = kept_since or now
                piece = min(max((now - start) // 4, _MIN_PIECE_NS), _MAX_PIECE_NS)
            else:
                kept_since = None
                piece = _FOREVER_NS if self._jax_watch is None else _WATCH_NS
            deadline = min(end, now + piece)
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
                raise self._time_out(describe)
            now = time.monotonic_ns()
            if not is_collected and now - start > _COLLECT_AFTER_NS:
                is_collected = True
                gc.collect()  # batches may hang in reference cycles
            if not is_warned and kept_since is not None and now - kept_since > _WARN_AFTER_NS:
                is_warned = True
                self._warn(now - start)
            if self._jax_watch is not None and (found := self._jax_watch.look()) is not None:
                raise self._jax_error(*found, describe)

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

    def _warn(self, waited_ns: int) -> None:
        """Say what holds all slots, unless that has been said before."""
        gc.collect()
        if not self._are_slots_kept():
            return
        headline, *lines = self._describe_holders()
        text = "\n".join(lines)
        kind = re.sub(r"\d+", "", text)  # the next batch is held in the same way
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("next() has waited for %.1f s: %s\n%s", waited_ns * 1e-9, headline, text)

    def _describe_holders(self) -> list[str]:
        """What holds all slots, and what to do about it."""
        holders = describe_holders([self._arena])
        count = len(self._arena.slot_states())
        if holders.is_pending:
            return [
                f"all {count} slots (depth) are held by JAX, which still reads them: with a larger "
                "depth loading goes on meanwhile",
                *holders.lines,
            ]
        return [
            f"all {count} slots (depth) are held by arrays of earlier batches: delete batches and "
            "their arrays before asking for the next one (enumerate() and zip() hold the last one, "
            "too: use a larger depth), or keep batch.copy(). They are held by",
            *holders.lines,
        ]

    def _time_out(self, describe: Describe) -> BatchTimeoutError:
        """The error for a wait that took too long: what everybody is doing."""
        lines = [f"no batch came within timeout_sec={self._timeout_s:g} seconds"]
        if self._are_slots_kept():
            lines += self._describe_holders()
            return BatchRetainedError("\n".join(lines))
        if isinstance(self._loading, WorkerPool):
            lines += self._describe_workers(self._loading, describe)
        return BatchTimeoutError("\n".join(lines))

    def _describe_workers(self, pool: WorkerPool, describe: Describe) -> list[str]:
        """What each loader process is doing; for those that are busy with their stacks."""
        doings = [self._doing(index, describe) for index in range(len(pool))]
        busy = [index for index, (_, is_busy) in enumerate(doings) if is_busy]
        stacks = pool.stacks(busy, of_all_threads=True)
        lines = []
        shown: dict[Stack, int] = {}
        is_jax = False
        for index, (doing, _) in enumerate(doings):
            lines.append(f"loader process {index} (pid {pool.pids[index]}) {doing}")
            stack = stacks.get(index)
            if stack is None:
                continue
            is_jax |= self._jax_watch is not None and is_in_jax(stack)
            first = shown.setdefault(stack, index)
            if first == index:
                lines += format_stack(stack, indent="  ")
            else:
                lines.append(f"  at the same place as loader process {first}")
        if is_jax:
            lines.append(
                "JAX cannot be used in a forked process and waits there for ever; use NumPy in the "
                "loader function"
            )
        return lines

    def _doing(self, index: int, describe: Describe) -> tuple[str, bool]:
        """What a loader process is doing, and whether that is work."""
        is_started, item, seconds, count, _ = self._arena.worker_state(index)
        if not is_started:
            return "is still in startup_func", True
        if item is None:
            return f"has nothing to do, after {count} items", False
        return f"has been loading for {seconds:.1f} s, now at {describe(*item)}", True

    def _jax_error(self, index: int, stack: Stack, describe: Describe) -> JaxInWorkerError:
        assert isinstance(self._loading, WorkerPool)
        pid = self._loading.pids[index]
        is_started, item, *_ = self._arena.worker_state(index)
        doing = f"at {describe(*item)}" if is_started and item is not None else "in startup_func"
        call = jax_call(stack.frames) or stack.frames[-1]
        source = source_of(call)
        lines = [
            f"loader process {index} (pid {pid}), {doing}, uses JAX, which cannot work in a forked "
            f"process and waits there for ever: {source or 'a call'} ({call.path}:{call.line}, in "
            f"{call.function})",
            "use NumPy there: what the loader function fills becomes jax.Arrays in the main "
            "process (see placement_func); or start_method='spawn', whose processes have a JAX of "
            "their own",
            *format_stack(stack),
        ]
        return JaxInWorkerError(
            "\n".join(lines),
            worker_index=index,
            pid=pid,
            filename=call.path,
            lineno=call.line,
        )
