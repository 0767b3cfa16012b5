"""The arena and the loader processes behind the draws of one data loader, and their errors.

The C core serves draws from the arena without Python. What is here makes the arena, starts the
loader processes, says what went wrong, and starts anew after a failure.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hydrax import _context, _core
from hydrax._failures import LoadFailure
from hydrax._memory import available_nbytes, format_nbytes
from hydrax._specs import ArraySpec, lay_out
from hydrax._workers import WorkerPool
from hydrax.data._draw_loader import MASK, DrawJob
from hydrax.data._draws import Chain
from hydrax.data._feeder import Feeder
from hydrax.data._pending import pending_results, still_pending
from hydrax.data._source import KEY_WORDS, DrawSource, chain_from_numbers, chain_words
from hydrax.errors import ArenaMemoryError, BatchTimeoutError, LoaderError, WorkerDiedError

__all__ = ["DrawEngine", "ErrorBox"]

logger = logging.getLogger(__name__)

# Slots of an arena: they take memory only once they are used.
_SLOT_COUNT = 64
# Bytes that are loaded at a time, so that they are still in a processor's cache when a program
# copies them; and rows, where each takes a call.
_BLOCK_NBYTES, _BLOCK_ROWS = 2**20, 64
# How far programs are loaded for ahead: so many blocks, but no more than so many bytes, so that
# loader processes that do not get a processor for a moment do not hold programs up.
_AHEAD_COUNT, _AHEAD_NBYTES = 8, 2**23
# How often a forgotten engine looks whether the programs have ended that draw from it.
_POLL_S = 0.02


class ErrorBox:
    """Keeps the error of the draw that failed last.

    Attributes:
        error: The error, or None.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None


class DrawEngine:
    """Serves the draws of chains over one source. Close it; a forgotten one ends at exit.

    Args:
        source: What loads; closed with the engine.
        mb_size: Observations of a draw.
        cache_size: Draws that are loaded together, at most.
        observation_count: Observations of the data set.
        dtypes: Dtype of each leaf in which JAX gets it.
        labels: What to call the leaves in messages.
        boxes: Get each error.
        worker_count: Loader processes; None leaves it to the source.
        timeout_s: Seconds that a draw may wait; None waits for ever.

    Attributes:
        observation_count: Observations of the data set.
        mb_size: Observations of a draw.
        block_draws: Draws that are loaded together: as many as fit into the processors' caches.
        ordered_draws: Draws of one pass over the data set in its own order.
        fingerprint: Of what is drawn from.
    """

    def __init__(
        self,
        source: DrawSource,
        *,
        mb_size: int,
        cache_size: int,
        observation_count: int,
        dtypes: Sequence[np.dtype[Any]],
        labels: Sequence[str],
        boxes: Sequence[ErrorBox],
        worker_count: int | None = None,
        timeout_s: float | None = 60,
    ) -> None:
        if _context.is_worker():
            raise RuntimeError("draws cannot be made in a loader process")
        self.observation_count = observation_count
        self.mb_size = mb_size
        self.ordered_draws = -(-observation_count // mb_size)
        self._source = source
        self._boxes = boxes
        self._timeout_s = timeout_s
        if source.runs_in_main:
            worker_count = 1
        self._worker_count = worker_count or source.worker_count
        flag = np.dtype(np.bool_)
        specs = [
            *(
                ArraySpec(str(number), shape, dtype, dtype)
                for number, ((shape, _), dtype) in enumerate(zip(source.specs, dtypes, strict=True))
            ),
            ArraySpec(MASK, (), flag, flag),
        ]
        _, draw_nbytes = lay_out(specs, mb_size)
        fitting = _BLOCK_ROWS // mb_size if source.is_itemwise else _BLOCK_NBYTES // draw_nbytes
        block_draws = max(1, min(cache_size, fitting))
        self.block_draws = block_draws
        self._layouts, slot_nbytes = lay_out(specs, block_draws * mb_size)
        ahead = max(self._worker_count, min(_AHEAD_COUNT, _AHEAD_NBYTES // slot_nbytes))
        self.fingerprint = zlib.crc32(
            repr(
                (observation_count, mb_size, [(spec.shape, spec.dtype.name) for spec in specs])
            ).encode()
        )
        least = self._worker_count + 2  # one is drawn from, and one was before
        slot_count = max(least, min(_SLOT_COUNT, available_nbytes() // 2 // slot_nbytes))
        self._arena_config: dict[str, Any] = {
            "slot_count": slot_count,
            "slot_nbytes": slot_nbytes,
            "worker_count": self._worker_count,
            "group_count": 1,
            # Records are kept for errors only: one per process at most.
            "batch_capacity": self._worker_count + 1,
            "is_batched": not source.is_itemwise,
        }
        if least * slot_nbytes > available_nbytes():
            raise ArenaMemoryError(
                f"{least} blocks of {block_draws} draws of {mb_size} observations (mb_size) need "
                f"{format_nbytes(least * slot_nbytes)}, but {format_nbytes(available_nbytes())} of "
                "memory are available; lower mb_size"
            )
        self._job = DrawJob(source, mb_size, labels, self._layouts)
        reference = weakref.ref(self)

        def describe(
            trouble: int,
            worker: int,
            has_no_memory: int,
            generation: int,
            key: bytes,
            draw: int,
            payload: bytes | None,
        ) -> str:
            engine = reference()
            if engine is None:
                return _RELEASED
            return engine._describe(
                trouble, worker, bool(has_no_memory), generation, key, draw, payload
            )

        arrays = [
            (layout.offset, layout.nbytes // block_draws) for layout in self._layouts.values()
        ]
        self._draws = _core.Draws(
            describe,
            arrays,
            self.fingerprint,
            block_draws,
            mb_size,
            ahead,
            self.ordered_draws,
            None if timeout_s is None else int(timeout_s * 1e9),
        )
        self._lock = threading.RLock()  # guards the arena and the processes
        self._arena: _core.Arena | None = None
        self._pools: list[WorkerPool | Feeder] = []  # at most one
        self._generation = 0
        self._death: tuple[int, WorkerDiedError] | None = None  # the last one, and its generation
        self._is_closed = False
        _live.add(self)
        self._finalizer = weakref.finalize(
            self, DrawEngine._forgotten, self._draws, self._pools, source
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _forgotten(
        draws: _core.Draws, pools: list[WorkerPool | Feeder], source: DrawSource
    ) -> None:
        """End what an engine that was not closed has left behind."""

        def end() -> None:
            draws.close()
            while pools:
                pools.pop().stop()
            source.close()

        def end_later() -> None:
            # Not by waiting in JAX, where a thread cannot be when the interpreter ends.
            results = pending
            while results := still_pending(results):
                time.sleep(_POLL_S)
            _orphans.discard(draws)
            end()

        pending = pending_results()
        if pending:
            thread = threading.Thread(target=end_later, name="hydrax-release", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is ending
                _orphans.add(draws)
                thread.start()
                return
        end()

    @property
    def id(self) -> int:
        """Number by which programs find the engine."""
        return self._draws.id

    @property
    def blocks_requested(self) -> int:
        """Blocks asked for so far."""
        return self._draws.blocks_requested

    @property
    def pids(self) -> list[int]:
        """The loader processes."""
        return [pid for pool in self._pools for pid in pool.pids]

    @property
    def nbytes(self) -> int:
        """Bytes of the arena if all of its slots are in use; 0 once closed."""
        return self._arena.nbytes if self._arena is not None else 0

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._is_closed

    def state_words(self, chain: Chain) -> NDArray[np.uint32]:
        """What the state of draw 0 of a chain carries."""
        return np.array([self.fingerprint, *chain_words(chain), 0], np.uint32)

    def prepare(self, chain: Chain, draw: int) -> None:
        """Have a draw loaded, without waiting for it."""
        self._draws.prepare(struct.pack(f"{KEY_WORDS}I", *chain_words(chain)), draw)

    def copy(self, words: Sequence[int], draw: int) -> list[NDArray[Any]]:
        """One draw: the leaves and the mask, as new arrays.

        Args:
            words: As :meth:`state_words` gives them; the draw's number is not taken from there.
            draw: Number of the draw.

        Raises:
            RuntimeError: With the text of what went wrong.
        """
        if int(words[0]) != self.fingerprint:
            raise RuntimeError(self._keep(ValueError(self._misfit())))
        key = struct.pack(f"{KEY_WORDS}I", *(int(word) for word in words[1 : 1 + KEY_WORDS]))
        targets = [
            np.empty((self.mb_size, *layout.shape[1:]), layout.dtype)
            for layout in self._layouts.values()
        ]
        self._draws.copy(key, draw, [target.view(np.uint8).reshape(-1).data for target in targets])
        return targets

    def _start(self) -> None:
        """Make an arena and loader processes for it."""
        try:
            arena = _core.Arena(**self._arena_config)
        except MemoryError as error:
            raise ArenaMemoryError(f"the arena could not be made: {error}") from error
        pool: WorkerPool | Feeder
        if self._source.runs_in_main:
            pool = Feeder(arena, self._job)
        else:
            pool = WorkerPool(arena, self._worker_count, "fork", self._job, None, None)
        pool.start()
        self._pools.append(pool)
        self._arena = arena
        self._draws.attach(arena)
        self._generation = self._draws.generation

    def _stop(self) -> None:
        self._arena = None
        while self._pools:
            self._pools.pop().stop()

    def close(self) -> None:
        """End all draws and the loader processes, and give back the arena. May be called again."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._draws.close()
            try:
                self._stop()
            finally:
                self._finalizer.detach()
                _live.discard(self)
                self._source.close()

    def abandon(self) -> None:
        """In a process that the user forked: all of it is the parent's business."""
        self._is_closed = True
        self._draws.abandon()
        self._finalizer.detach()
        self._pools.clear()

    def _restart(self, generation: int) -> None:
        """Replace the arena and the processes, unless it has been done since."""

        def restart() -> None:
            with self._lock:
                if self._is_closed or generation != self._generation:
                    return
                # From here on draws wait for the new arena.
                self._draws.attach(None)
                try:
                    self._stop()
                    self._start()
                except BaseException:
                    logger.exception("loader processes could not be started again")
                    self.close()

        # Processes are not forked from a thread of XLA, which this may run on.
        try:
            thread = threading.Thread(target=restart, name="hydrax-restart")
            thread.start()
        except RuntimeError:  # the interpreter is ending
            return
        thread.join()

    def _describe(
        self,
        trouble: int,
        worker: int,
        has_no_memory: bool,
        generation: int,
        key: bytes,
        draw: int,
        payload: bytes | None,
    ) -> str:
        """The text of the error for a draw that failed; the error itself is kept."""
        what = self._describe_draw(key, draw)
        if trouble == _core.DRAW_FAILED:
            return self._keep(self._load_error(what, has_no_memory, payload))
        if trouble == _core.DRAW_TIMED_OUT:
            text = self._keep(self._timeout_error(what))
            self._restart(generation)
            return text
        if trouble == _core.DRAW_WORKER_ENDED:
            text = self._keep(self._death_in(generation, worker, what))
            self._restart(generation)
            return text
        if trouble == _core.DRAW_MISFIT:
            return self._keep(ValueError(self._misfit()))
        if trouble == _core.DRAW_RELEASED:
            return self._keep(RuntimeError(_RELEASED))
        return self._keep(RuntimeError(f"{what} failed"))

    def _death_in(self, generation: int, worker: int, what: str) -> BaseException:
        """Why a loader process ended; all draws that waited for its arena fail by the first."""
        with self._lock:
            is_first = self._death is None or self._death[0] != generation
            if is_first and self._pools and generation == self._generation:
                error = self._pools[0].bury(worker, self._describe_position)
                self._death = generation, error
            if self._death is not None and self._death[0] == generation:
                return self._death[1]
        return RuntimeError(f"{what} failed: a loader process ended")

    def _keep(self, error: BaseException) -> str:
        """Keep an error for last_error(); returns its text."""
        kept = error
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, LoaderError):
            kept = error.__cause__ or error
            text = str(error)
        for box in self._boxes:
            box.error = kept
        return text

    def _misfit(self) -> str:
        return (
            f"the CacheState does not fit: this data loader has {self.observation_count} "
            f"observations and draws {self.mb_size} at a time (mb_size); the state comes from "
            "other data, another mb_size or other dtypes"
        )

    def _describe_draw(self, key: bytes, draw: int) -> str:
        words = struct.unpack(f"{KEY_WORDS}I", key)
        chain = chain_from_numbers(words[0], words[1] | words[2] << 32, words[3] | words[4] << 32)
        if chain.is_ordered:
            return f"draw {draw % self.ordered_draws} of {self.ordered_draws}, in order,"
        return f"random draw {draw} (seed {chain.seed})"

    def _load_error(self, what: str, has_no_memory: bool, payload: bytes | None) -> BaseException:
        if has_no_memory:
            return ArenaMemoryError(
                f"{what} failed: the memory of a block ({format_nbytes(self._slot_nbytes)}) could "
                f"not be reserved; {format_nbytes(available_nbytes())} are available; lower "
                "cached_batches_count or mb_size"
            )
        if not payload:
            return RuntimeError(f"{what} failed in a loader process, without a reason")
        failure = LoadFailure(*pickle.loads(payload))
        message = f"{what} failed: {failure.kind}: {failure.message}"
        if failure.traceback_text:
            message += f"\nIn loader process {failure.pid}:\n{failure.traceback_text.rstrip()}"
        error = LoaderError(message, traceback_text=failure.traceback_text)
        if failure.exception is not None:
            with contextlib.suppress(Exception):
                original = pickle.loads(failure.exception)
                original.add_note(
                    f"In loader process {failure.pid}:\n{failure.traceback_text.rstrip()}"
                )
                error.__cause__ = original
        return error

    @property
    def _slot_nbytes(self) -> int:
        return int(self._arena_config["slot_nbytes"])

    def _describe_position(self, serial: int, item: int) -> str:
        return f"row {item % self.mb_size} of draw {item // self.mb_size} of a block"

    def _timeout_error(self, what: str) -> BatchTimeoutError:
        lines = [f"{what} did not come within timeout_sec={self._timeout_s:g} seconds"]
        with self._lock:
            if self._arena is not None:
                for index, pid in enumerate(self.pids):
                    is_started, item, seconds, count, _ = self._arena.worker_state(index)
                    if not is_started:
                        doing = "is still starting"
                    elif item is None:
                        doing = f"has nothing to do, after {count} rows"
                    else:
                        doing = (
                            f"has been loading for {seconds:.1f} s, now at "
                            f"{self._describe_position(*item)}"
                        )
                    lines.append(f"loader process {index} (pid {pid}) {doing}")
        lines.append("the loader processes are started anew; raise timeout_sec if loading is slow")
        return BatchTimeoutError("\n".join(lines))


_RELEASED = (
    "the data loader that this program draws from has been released; make a new one and trace "
    "the program again"
)
_live: weakref.WeakSet[DrawEngine] = weakref.WeakSet()
# Of engines that were forgotten while programs were drawing from them.
_orphans: set[_core.Draws] = set()


def _abandon_all() -> None:
    for engine in list(_live):
        engine.abandon()
    _live.clear()


os.register_at_fork(after_in_child=_abandon_all)


@atexit.register  # before JAX ends its own, which was imported earlier
def _end_all() -> None:
    """At exit: programs that still run end at their next draw, and without Python."""
    _core.end_descriptions()
    for draws in list(_orphans):
        draws.close()
    for engine in list(_live):
        engine.close()
