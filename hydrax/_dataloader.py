"""Dataloader: the with block, the flow of batches, and what ends it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

from hydrax import _context, _core, _spawned
from hydrax._arguments import check_end, check_int, check_start, check_timeout
from hydrax._batch import Batch, make_batch
from hydrax._caching import Caching, GroupCache, file_layouts
from hydrax._datagroup import DataGroup, check_groups, check_validation
from hydrax._debug import SlotWatch
from hydrax._interrupt import InterruptHandler
from hydrax._item_loader import ItemLoader, LoadGroup, LoadJob
from hydrax._memory import available_nbytes, format_nbytes
from hydrax._mixing import EpochEnd, check_epoch_end, check_weights
from hydrax._records import (
    BatchFailure,
    BatchRecords,
    describe_batch,
    describe_item,
    failure_of_all,
    failure_of_change,
    read_records,
)
from hydrax._schedule import GroupOrder, PlannedBatch, Schedule, Validation
from hydrax._shared_items import warn_of_copying
from hydrax._specs import ArrayLayout, lay_out, placed_specs
from hydrax._state import make_state, read_state, schedule_facts
from hydrax._stats import LoaderStats, WorkerStats
from hydrax._waiting import BatchWaiter
from hydrax._workers import StartMethod, WorkerPool
from hydrax.errors import (
    ArenaMemoryError,
    CacheError,
    CacheMissingError,
    HydraxError,
    JaxInWorkerError,
    LoaderError,
    WorkerDiedError,
    WorkerStartError,
)

if TYPE_CHECKING:
    import jax
    import numpy as np

__all__ = ["Dataloader"]

logger = logging.getLogger(__name__)

D = TypeVar("D")

# JAX keeps a capsule of about 100 bytes for each array until it is next called or garbage is
# collected, which a loop that only reads arrays may never do.
_COLLECT_EVERY = 1024
# How often next() looks for loader processes that have ended while it need not wait.
_LOOK_EVERY_NS = 20_000_000
_START_METHODS = ("fork", "forkserver", "spawn")
_POLICIES = ("raise", "drop_batch", "skip_item")

LoaderFunc = Callable[..., Mapping[str, Any] | None]
PlacementFunc = Callable[
    [
        "Mapping[str, np.ndarray[Any, Any]]",
        Mapping[str, ArrayLayout],
        Mapping[str, Sequence[Any]],
        "DataGroup[Any]",
    ],
    "dict[str, jax.Array]",
]


class Dataloader(Generic[D]):
    """Loads batches in processes of their own and hands them over without a copy.

    Use it in a ``with`` block and iterate over it; see the example. It can be entered once.

    Args:
        loader_func: Called as ``loader_func(descriptor, arrays, seed)`` for each item, in a loader
            process. ``arrays`` maps each name to a writable NumPy array, which is the item's place
            in the batch and may hold data of an earlier one: fill all of it, and keep no reference.
            ``seed`` is an int in [0, 2**31) for random augmentation, None for validation. What it
            returns, a dict or None, becomes the item's entries in ``batch.additional``. It must not
            use JAX. None where no group has loader_arrays, as all batches come from a disk cache.
        training: The DataGroup to train on, or several; one pass over all of them is an epoch.
        validation: ``("epoch" | "batch", interval, group or groups)``: a validation run follows
            each ``interval`` training epochs or batches.
        depth: Batches that can exist at a time: being loaded, waiting, or held by you.
        loader_count: Loader processes. 0 loads in the main process, the same batches with the same
            seeds, for debugging and breakpoints.
        loader_nice: Added to the niceness of the loader processes.
        cacher_count: Threads that read ahead in the disk cache. 0 reads each batch when it is asked
            for.
        start_at: ``(epoch, batches)`` to skip before the first batch. The batches may be more than
            an epoch has.
        end_at: ``("epoch" | "batch", n)``: end after n epochs or training batches, counted from the
            very beginning, not from start_at. None goes on until the block is left.
        interleave_groups: Mix the training groups within an epoch, taking next the one of which
            the smallest share has been used; otherwise one group comes after the other.
        weights: Shares of the batches that the training groups get, one number each, in whatever
            unit. At any moment each group has had its share of all batches, to less than one batch.
            A group that has been gone through starts over, in its next order and with its next
            seeds.
        epoch_end: With weights, when an epoch ends: ``"all_exhausted"`` (the default), once the
            last group has been gone through; ``"first_exhausted"``, once the first has; or after
            so many batches. All epochs are as long as the first; the groups go on where they
            were.
        deterministic: Whether batches come in the planned order. Otherwise a later batch that is
            ready may come before an earlier one that is not.
        timeout_sec: Seconds after which waiting for a batch ends in :class:`BatchTimeoutError`,
            or :class:`BatchRetainedError` if batches are kept; 0 or less waits for ever.
        startup_func: Called once in each loader process before it loads.
        placement_func: Called as ``placement_func(arrays, layouts, additional, group)`` with the
            loaded NumPy arrays, which lie in shared memory; returns the jax.Arrays of the batch
            under their names. The default places them on JAX's default device: on the CPU without
            a copy.
        start_method: ``"fork"`` starts in milliseconds and pickles nothing. ``"forkserver"`` and
            ``"spawn"`` never inherit the threads of the main process; loader_func, startup_func and
            the data must then be picklable.
        batched: Whether loader_func takes many items in one call: a sequence of descriptors (a
            NumPy array where the data is a ``range`` or a NumPy array), arrays with a leading
            dimension for the items, and a sequence of seeds (None for validation). It returns a
            dict with a sequence of one value per item under each key, or None. None, the default,
            asks the loader function, which may have an attribute ``is_batched``.
        debug: Whether to check that the loader function fills its arrays and keeps none of them,
            and that nobody writes to them afterwards, at the price of time. Also switched on by
            ``HYDRAX_DEBUG=1`` in the environment.
        on_error: What becomes of an item that could not be loaded. ``"raise"``: ``next`` raises the
            :class:`LoaderError` in the place of its batch. ``"drop_batch"``: its batch is left out.
            ``"skip_item"``: its place in every array is zeros and ``batch.mask`` is False there; a
            batch of which no item could be loaded is left out. What is left out is logged with its
            cause and counted in :meth:`stats`. A callable is called with the error; if it returns,
            the batch is left out. KeyboardInterrupt and SystemExit of a loader function are not
            about the item: they are raised always.
        max_restarts: How many loader processes that end on their own (killed, crashed, exited) are
            replaced by new ones, which load their items again: the batches are the same. Each is
            logged with its cause. The next one after that is a :class:`WorkerDiedError`.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: An argument has a value that cannot be.
        RuntimeError: Constructed in a loader process.
        ArenaMemoryError: ``depth`` batches do not fit the memory that is available.

    Example:
        >>> import numpy as np
        >>> def load(number, arrays, seed):
        ...     arrays["x"][:] = number
        >>> group = DataGroup(2, range(4), loader_arrays={"x": ((3,), np.float32, np.float32)})
        >>> with Dataloader(load, group, end_at=("epoch", 1)) as dataloader:
        ...     for batch in dataloader:
        ...         print(batch.epoch, batch.arrays["x"].sum())
        ...         del batch
        0 3.0
        0 15.0
    """

    def __init__(
        self,
        loader_func: LoaderFunc | None,
        training: DataGroup[D] | Iterable[DataGroup[D]],
        *,
        validation: tuple[str, int, DataGroup[D] | Iterable[DataGroup[D]]] | None = None,
        depth: int = 3,
        loader_count: int = 1,
        loader_nice: int = 0,
        cacher_count: int = 1,
        start_at: tuple[int, int] = (0, 0),
        end_at: tuple[str, int] | None = None,
        interleave_groups: bool = True,
        weights: Iterable[float] | None = None,
        epoch_end: EpochEnd | int | None = None,
        deterministic: bool = True,
        timeout_sec: float = 60,
        startup_func: Callable[[], None] | None = None,
        placement_func: PlacementFunc | None = None,
        start_method: StartMethod = "fork",
        batched: bool | None = None,
        debug: bool = False,
        on_error: (
            Literal["raise", "drop_batch", "skip_item"] | Callable[[LoaderError], object]
        ) = "raise",
        max_restarts: int = 0,
    ) -> None:
        if _context.is_worker():
            raise RuntimeError(
                "a Dataloader cannot be made in a loader process; if this is your script's top "
                "level, put it under if __name__ == '__main__':"
            )
        for name, func in (
            ("loader_func", loader_func),
            ("startup_func", startup_func),
            ("placement_func", placement_func),
        ):
            if not callable(func) and func is not None:
                raise TypeError(f"{name} is {func!r}; expected a callable")
        if start_method not in _START_METHODS:
            raise ValueError(
                f"start_method is {start_method!r}; expected one of {', '.join(_START_METHODS)}"
            )
        if not callable(on_error) and on_error not in _POLICIES:
            raise ValueError(
                f"on_error is {on_error!r}; expected one of {', '.join(_POLICIES)}, or a callable"
            )
        self._on_error = on_error
        self._depth = check_int("depth", depth, minimum=1, maximum=2**20)
        self._loader_count = check_int("loader_count", loader_count, minimum=0, maximum=2**12)
        self._cacher_count = check_int("cacher_count", cacher_count, minimum=0, maximum=2**8)
        self._max_restarts = check_int("max_restarts", max_restarts, minimum=0)
        self._timeout_s = check_timeout(timeout_sec)
        self._deterministic = bool(deterministic)
        self._placement_func = placement_func
        self._start_method: StartMethod = start_method
        self._training = check_groups("training", training)
        mode, interval, self._validation = check_validation(validation)
        if weights is None and epoch_end is not None:
            raise ValueError("epoch_end is for groups that are mixed by weight; give weights")
        if weights is not None and not interleave_groups:
            raise ValueError("weights mix the groups; leave out interleave_groups=False")
        self._schedule = Schedule(
            [_group_order(group, index) for index, group in enumerate(self._training)],
            Validation(
                mode,
                interval,
                tuple(_group_order(group, index) for index, group in enumerate(self._validation)),
            )
            if self._validation
            else None,
            start_at=check_start(start_at),
            end_at=check_end(end_at),
            interleave_groups=bool(interleave_groups),
            weights=None if weights is None else check_weights(weights, len(self._training)),
            epoch_end=check_epoch_end(epoch_end),
        )
        if (
            self._schedule.last_batch is not None
            and self._schedule.last_batch < self._schedule.first_batch
        ):
            raise ValueError(
                f"end_at {end_at} (batch {self._schedule.last_batch}) comes before start_at "
                f"{start_at} (batch {self._schedule.first_batch}); both count from the beginning"
            )
        if batched is None:
            batched = getattr(loader_func, "is_batched", False)
        self._groups = (*self._training, *self._validation)
        if not any(group.specs for group in self._groups):
            logger.info("all batches come from a disk cache; nothing is loaded")
            self._loader_count = 0
        elif loader_func is None:
            raise TypeError("loader_func is None; expected a callable, as there are loader_arrays")
        self._layouts, slot_nbytes = self._lay_out_slots()
        self._job = LoadJob(
            loader_func or _load_nothing,
            startup_func,
            self._load_groups(),
            len(self._training),
            bool(batched),
            bool(debug) or os.environ.get("HYDRAX_DEBUG", "0") not in ("", "0"),
            check_int("loader_nice", loader_nice, minimum=-40, maximum=40),
            on_error == "skip_item",
        )
        self._packed_job: bytes | None = None
        if start_method != "fork" and self._loader_count > 0:
            self._packed_job = _spawned.pack_job(self._job)
        self._check_memory(self._depth * slot_nbytes)
        self._arena_config: dict[str, Any] = {
            "slot_count": self._depth,
            "slot_nbytes": max(slot_nbytes, 1),
            "worker_count": max(self._loader_count, 1),
            "group_count": len(self._groups),
            "batch_capacity": max(group.batch_size for group in self._groups),
            "is_batched": self._job.is_batched,
        }
        self._check_memory(self.arena_nbytes)

        self._cache_layouts, self._caching = self._prepare_caching()
        self._state: Literal["new", "running", "ended", "closed"] = "new"
        self._arena: _core.Arena | None = None
        self._memory = range(0)
        self._pool: WorkerPool | None = None
        self._inline: ItemLoader | None = None
        self._watch: SlotWatch | None = None
        self._waiter: BatchWaiter | None = None
        self._place: Any = None
        self._position = self._first_position = self._schedule.start
        self._planner: Iterator[PlannedBatch] = iter(self._schedule)
        self._next_planned: PlannedBatch | None = next(self._planner, None)
        self._pending: deque[PlannedBatch] = deque()
        self._fatal_error: HydraxError | None = None
        self._next_lock = threading.Lock()
        self._last_training: PlannedBatch | None = None
        self._interrupted = False
        self._interrupt_handler = InterruptHandler(self.interrupt)
        self._idle_ns = 0
        self._look_at_ns = 0
        self._final_stats: LoaderStats | None = None
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._batches_delivered = self._items_delivered = 0
        self._batches_dropped = self._items_dropped = self._items_skipped = 0
        self._entered_ns = time.monotonic_ns()

    def _lay_out_slots(self) -> tuple[list[Mapping[str, ArrayLayout]], int]:
        """Layouts of each group's arrays in a slot, and the bytes of the largest."""
        if self._placement_func is not None:
            # It gets what the loader filled.
            layouts = [group.loader_layouts or {} for group in self._groups]
            return layouts, max(group.loader_size or 0 for group in self._groups)
        from hydrax._placement import canonical_dtypes

        canonical = canonical_dtypes()
        placed = [
            lay_out(placed_specs(group.specs, canonical), group.batch_size)
            for group in self._groups
        ]
        return [layouts for layouts, _ in placed], max(nbytes for _, nbytes in placed)

    def _prepare_caching(self) -> tuple[list[Mapping[str, ArrayLayout]], Caching | None]:
        """Layouts of each group's arrays in the disk cache, and the caches if there are any."""
        canonical = None
        if self._placement_func is None:
            from hydrax._placement import canonical_dtypes

            canonical = canonical_dtypes()
        layouts = [file_layouts(group, canonical) for group in self._groups]
        caches = [
            GroupCache(
                group,
                index if index < len(self._training) else index - len(self._training),
                layouts[index],
                is_validation=index >= len(self._training),
            )
            if group.cache_location is not None
            else None
            for index, group in enumerate(self._groups)
        ]
        if not any(caches):
            return layouts, None
        return layouts, Caching(caches, self._depth, self._cacher_count, self._timeout_s)

    def _load_groups(self) -> tuple[LoadGroup, ...]:
        return tuple(
            LoadGroup(
                group.data,
                layouts,
                {
                    spec.name: spec.dtype
                    for spec in group.specs
                    if spec.dtype != layouts[spec.name].dtype
                },
                {spec.name: spec.truncate for spec in group.specs if spec.ragged},
                is_validation=index >= len(self._training),
            )
            for index, (group, layouts) in enumerate(zip(self._groups, self._layouts, strict=True))
        )

    def _check_memory(self, wanted: int) -> None:
        available = available_nbytes()
        if wanted > available:
            raise ArenaMemoryError(
                f"{self._depth} batches (depth) need {format_nbytes(wanted)} ({wanted} bytes), but "
                f"{format_nbytes(available)} ({available} bytes) of memory are available; lower "
                "depth or batch_size"
            )

    @property
    def arena_nbytes(self) -> int:
        """Bytes of shared memory: depth times the largest batch, and some tables."""
        return _core.Arena.required_nbytes(**self._arena_config)

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one epoch."""
        return self._schedule.batches_per_epoch

    @property
    def batches_per_validation(self) -> int:
        """Batches of one validation run; 0 without validation."""
        return self._schedule.batches_per_validation

    @property
    def first_batch(self) -> int:
        """Number of the first training batch, as start_at or a state set before entering says."""
        return self._first_position.training

    @property
    def last_batch(self) -> int | None:
        """Number of the training batch before which it ends, as end_at says; None: it does not."""
        return self._schedule.last_batch

    @property
    def deterministic(self) -> bool:
        """Whether batches come in the planned order."""
        return self._deterministic

    @property
    def interrupted(self) -> bool:
        """Whether :meth:`interrupt` or Ctrl+C has stopped the flow of batches.

        :attr:`delivered_batch` says where, and so does the log.
        """
        return self._interrupted

    @property
    def delivered_batch(self) -> int | None:
        """Number (``batch_num``) of the training batch that came last; None before the first."""
        return None if self._last_training is None else self._last_training.batch_num

    def interrupt(self) -> None:
        """Stop the flow of batches: the next ``next()`` ends the iteration. From any thread."""
        self._interrupted = True
        arena = self._arena  # the block may be left at the same time
        if arena is not None:
            arena.kick()

    def idle_usec(self) -> int:
        """Microseconds that ``next`` has waited since the last call of this.

        That is for batches to be loaded, but also for slots, while all are held by batches that
        are kept or by computations that JAX has not finished.
        """
        idle_ns, self._idle_ns = self._idle_ns, 0
        return idle_ns // 1000

    def stats(self) -> LoaderStats:
        """Counts and times so far, and in plain words whether loading keeps up.

        After the block has been left they stay what they were then.

        Raises:
            RuntimeError: The block has not been entered.

        Example:
            >>> import hydrax
            >>> group = hydrax.DataGroup(2, range(8), loader_arrays={"x": ((), "i4", "i4")})
            >>> def load(number, arrays, seed):
            ...     arrays["x"][...] = 100 // (number - 5)
            >>> with hydrax.Dataloader(
            ...     load, group, end_at=("epoch", 1), on_error="drop_batch"
            ... ) as dataloader:
            ...     for batch in dataloader:
            ...         del batch
            ...     stats = dataloader.stats()
            >>> stats.batches_delivered, stats.batches_dropped, stats.items_dropped
            (3, 1, 2)
        """
        if self._final_stats is not None:
            return self._final_stats
        arena = self._arena
        if self._waiter is None or arena is None:
            raise RuntimeError("a Dataloader has statistics once its with block is entered")
        elapsed_sec = max(time.monotonic_ns() - self._entered_ns, 1) * 1e-9
        loaders = [
            self._worker_stats(index, elapsed_sec) for index in range(max(self._loader_count, 1))
        ]
        return LoaderStats(
            batches_delivered=self._batches_delivered,
            items_delivered=self._items_delivered,
            batches_dropped=self._batches_dropped,
            items_dropped=self._items_dropped,
            items_skipped=self._items_skipped,
            items_pending=sum(planned.valid_count for planned in list(self._pending)),
            items_retried=0 if self._pool is None else self._pool.retried_count,
            worker_restarts=0 if self._pool is None else self._pool.restart_count,
            batches_ready=arena.slot_states().count(_core.SLOT_READY),
            elapsed_sec=elapsed_sec,
            starved_sec=self._waiter.starved_ns * 1e-9,
            blocked_sec=self._waiter.blocked_ns * 1e-9,
            loading_sec=sum(loader.busy_sec for loader in loaders),
            slot_wait_sec=sum(loader.slot_wait_sec for loader in loaders),
            workers=() if self._pool is None else tuple(loaders),
            batches_cached=0 if self._caching is None else self._caching.read_count,
            batches_saved=0 if self._caching is None else self._caching.saved_count,
        )

    def _worker_stats(self, index: int, elapsed_sec: float) -> WorkerStats:
        """What one loader process has done; number 0 is the main process if there are none."""
        assert self._arena is not None
        _, _, run_sec, item_count, busy_ns = self._arena.worker_state(index)
        busy_sec = busy_ns * 1e-9 + (run_sec or 0.0)
        return WorkerStats(
            pid=os.getpid() if self._pool is None else self._pool.pids[index],
            item_count=item_count,
            busy_sec=busy_sec,
            slot_wait_sec=self._arena.worker_slot_wait_ns(index) * 1e-9,
            busy_share=busy_sec / elapsed_sec,
        )

    def get_state(self) -> dict[str, Any]:
        """Where the delivery of batches stands, to go on from there in this or another process.

        Call it at any point of the loop: the batch that was delivered last counts as done. The
        result is small, can be written as JSON, and fits any Dataloader over the same data with
        the same arguments, whatever its depth, loader_count or start_method.

        Raises:
            RuntimeError: The Dataloader is not deterministic: there is no one place to go on from.

        Example:
            >>> import hydrax
            >>> group = hydrax.DataGroup(2, range(8), loader_arrays={"x": ((), "i4", "i4")})
            >>> def load(number, arrays, seed):
            ...     arrays["x"][...] = number
            >>> with hydrax.Dataloader(load, group) as dataloader:
            ...     first = next(dataloader)
            ...     state = dataloader.get_state()
            >>> dataloader = hydrax.Dataloader(load, group)
            >>> dataloader.set_state(state)
            >>> with dataloader:
            ...     next(dataloader).arrays["x"].tolist()
            [2, 3]
        """
        if not self._deterministic:
            raise RuntimeError("only a deterministic Dataloader has a state to go on from")
        return make_state(self._position, self._schedule_facts())

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`get_state` was called: the batches that follow are bit-identical.

        Call it before the ``with`` block or inside of it; batches that were loaded ahead are given
        up. However far the state lies in the run, it takes as long as a fresh start. ``end_at``
        still counts from the very beginning.

        Raises:
            StateError: The state is of other data, or of other arguments; names which.
            RuntimeError: The block has been left, or the Dataloader is not deterministic.
        """
        if not self._deterministic:
            raise RuntimeError("only a deterministic Dataloader can go on from a state")
        if self._state == "closed":
            raise RuntimeError("the Dataloader's with block has been left; make a new Dataloader")
        position = read_state(state, self._schedule_facts())
        is_entered = self._state != "new"
        if is_entered:
            self._stop_loading()
        else:
            self._first_position = position
        self._position = position
        self._planner = self._schedule.batches(position)
        self._next_planned = next(self._planner, None)
        self._last_training = None
        self._forget_plans()
        self._fatal_error = None
        self._interrupted = False
        self._interrupt_handler.reset()
        if is_entered:
            self._reset_counts()
            try:
                self._start_loading()
            except BaseException:
                self._close()
                raise

    def _schedule_facts(self) -> dict[str, Any]:
        """What must be the same for a state to mean the same batches."""
        return schedule_facts(self._training, self._validation, self._schedule)

    def __enter__(self) -> Dataloader[D]:
        if self._state != "new":
            raise RuntimeError(
                "this Dataloader has been entered before; make a new one, with start_at to go on "
                "where this one ended"
            )
        for group in self._groups:
            rest = len(group) % group.batch_size
            if rest and group.remainder == "drop":
                logger.info(
                    "%d of %d items do not fill a last batch and are left out of each epoch; "
                    "DataGroup(remainder='pad') or 'short' keeps them",
                    rest,
                    len(group),
                )
            if self._loader_count > 0:
                warn_of_copying(group.data)
        self._place = self._choose_placement()
        try:
            _entered.add(self)  # first, so that a process forked meanwhile leaves it alone
            if self._caching is not None:
                self._caching.open()
            self._reset_counts()
            self._start_loading()
            self._interrupt_handler.install()
        except BaseException:
            self._close()
            raise
        return self

    def _start_loading(self) -> None:
        """Make the arena and the workers, and plan the first batches."""
        try:
            self._arena = _core.Arena(**self._arena_config)
        except MemoryError as error:
            raise ArenaMemoryError(
                f"the arena of {format_nbytes(self.arena_nbytes)} could not be made: {error}"
            ) from error
        address = self._arena.address
        self._memory = range(address, address + memoryview(self._arena).nbytes)
        self._state = "running"
        self._watch = SlotWatch(self._arena) if self._job.is_debug else None
        self._plan_ahead()
        if self._loader_count == 0:
            if self._inline is None and self._job.startup_func is not None:
                self._job.startup_func()
            self._inline = ItemLoader(self._arena, self._job)
            loading: WorkerPool | ItemLoader = self._inline
        else:
            self._pool = WorkerPool(
                self._arena,
                self._loader_count,
                self._start_method,
                self._job,
                self._packed_job,
                self._timeout_s,
                self._max_restarts,
                self._indices_of,
            )
            self._pool.start()
            loading = self._pool
        self._waiter = BatchWaiter(self._arena, loading, self._timeout_s)

    def _stop_loading(self) -> None:
        """End the workers. Arrays that are still held keep the arena alive."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
        elif self._arena is not None:
            self._arena.close()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        exc_traceback: TracebackType | None,
    ) -> None:
        watch = self._watch
        self._close()
        if watch is not None and exc_type is None:
            watch.check(is_end=True)

    def __del__(self) -> None:
        # Only for one that was entered and then forgotten; the with block closes otherwise.
        if getattr(self, "_pool", None) is not None:
            self._close()

    def _close(self) -> None:
        self._state = "closed"
        if self._waiter is not None and self._final_stats is None:
            self._final_stats = self.stats()
        try:
            self._stop_loading()
        finally:
            if self._caching is not None:
                self._close_caching(self._caching)
            self._arena = None  # arrays that still live keep its memory
            self._fatal_error = None
            self._interrupt_handler.restore()
            self._inline = None
            self._watch = None
            self._waiter = None
            self._pending.clear()

    def _close_caching(self, caching: Caching) -> None:
        caching.close()
        if self._final_stats is not None:
            self._final_stats = dataclasses.replace(
                self._final_stats, batches_saved=caching.saved_count
            )

    def _abandon(self) -> None:
        """In a process that the user forked: workers and arena are the parent's business."""
        self._state = "closed"
        self._pool = None
        self._arena = None
        self._inline = None
        self._watch = None
        self._waiter = None
        if self._caching is not None:
            self._caching.abandon()
        self._interrupt_handler.restore()

    def _choose_placement(self) -> Any:
        if self._placement_func is None:
            from hydrax._placement import Placement

            return Placement([*self._layouts, *self._cache_layouts]).place
        return None

    def __iter__(self) -> Iterator[Batch[D]]:
        return self

    def __next__(self) -> Batch[D]:
        while True:
            if not self._next_lock.acquire(blocking=False):
                raise RuntimeError(
                    "next() is running already, in another thread or around this loader function"
                )
            result: Batch[D] | BatchFailure | HydraxError
            try:
                result = self._next_result()
            except HydraxError as error:
                # A user may keep it; the frames between here and there would keep the arena.
                result = error.with_traceback(None)
            finally:
                self._next_lock.release()
            if isinstance(result, Batch):
                return result
            if isinstance(result, HydraxError):
                try:
                    raise result
                finally:
                    del result  # or the error and this frame would hold each other
            self._batches_dropped += 1
            self._items_dropped += result.item_count
            if not result.is_of_item or self._on_error == "raise":
                try:
                    raise result.error
                finally:
                    del result
            self._drop(result.error)

    def _next_result(self) -> Batch[D] | BatchFailure:
        """The next batch, or the error that stands in its place."""
        if self._state != "running":
            self._refuse_next()
        self._check_interrupted()
        pending = self._pending
        lease: _core.Lease | None = None
        if self._caching is not None:
            found = self._next_cached(self._caching)
            if isinstance(found, (Batch, BatchFailure)):
                return found
            lease = found
        if not pending:
            self._state = "ended"
            raise StopIteration
        arena = self._arena
        assert arena is not None
        serial = pending[0].plan.serial if self._deterministic else None
        if time.monotonic_ns() >= self._look_at_ns:
            self._look_after_workers()
        if lease is None:
            lease = arena.take(serial)
        if lease is None:
            lease = self._wait(serial)
        if self._deterministic:
            planned = pending.popleft()
        else:
            planned = next(entry for entry in pending if entry.plan.serial == lease.serial)
            pending.remove(planned)
        self._plan_ahead()
        self._position = planned.following
        read = self._read_records(planned, lease) if lease.has_records else None
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
        return self._deliver(planned, lease, read, is_uncached=not is_saved)

    def _save(
        self,
        caching: Caching,
        planned: PlannedBatch,
        lease: _core.Lease,
        read: BatchRecords | None,
    ) -> bool:
        """Have the disk cache keep a loaded batch, if it is to; returns whether it does."""
        if read is not None and read.skipped:
            caching.failed(planned)  # another run may be able to load all of it
            return False
        additional = None if read is None else read.additional
        return caching.save(planned, lease, additional, is_copied=self._place is None)

    def _next_cached(self, caching: Caching) -> Batch[D] | BatchFailure | _core.Lease | None:
        """The next batch, if it comes from the disk cache, or the error in its place.

        Otherwise a loaded batch that has turned out to be ready, or None.
        """
        pending = self._pending
        assert self._waiter is not None
        caching.begin()
        start = time.monotonic_ns()
        if not pending:
            self._plan_ahead()
        while not pending and self._next_planned is not None:
            caching.wait_for(self._next_planned, self._check_interrupted)
            self._plan_ahead()
        while pending:
            planned = pending[0]
            if not caching.is_read(planned):
                if self._deterministic:
                    return None
                assert self._arena is not None
                lease = self._arena.take(None)
                other = caching.first_read(pending)
                if lease is not None or other is None:
                    return lease
                planned = other
            content = caching.take(planned, pending, self._check_interrupted)
            if content is None:
                self._load_after_all(caching, planned)
                continue
            waited_ns = time.monotonic_ns() - start
            self._idle_ns += waited_ns
            self._waiter.starved_ns += waited_ns
            pending.remove(planned)
            self._plan_ahead()
            self._position = planned.following
            if isinstance(content, CacheMissingError):
                return BatchFailure(content, planned.valid_count, False)
            read = None if content.additional is None else BatchRecords(content.additional, {}, {})
            return self._deliver(planned, content.mapping, read, is_uncached=False)
        return None

    def _load_after_all(self, caching: Caching, planned: PlannedBatch) -> None:
        """Have a planned batch loaded that turned out not to be in the disk cache."""
        assert self._arena is not None
        if not caching.is_loading(entry for entry in self._pending if entry is not planned):
            self._arena.publish(planned.plan)
            caching.published(planned)
            return
        # Batches behind it have been handed out to the workers, and may fill all slots.
        again = [*self._pending, *([] if self._next_planned is None else [self._next_planned])]
        self._planner = itertools.chain(again, self._planner)
        self._next_planned = next(self._planner, None)
        self._forget_plans()
        self._stop_loading()
        try:
            self._start_loading()
        except BaseException:
            self._close()
            raise

    def _forget_plans(self) -> None:
        self._pending.clear()
        if self._caching is not None:
            self._caching.forget_plans()

    def _read_records(
        self, planned: PlannedBatch, lease: _core.Lease
    ) -> BatchRecords | BatchFailure:
        """What the workers left with a batch; items that were skipped are logged."""
        group = self._groups[planned.group_number]
        read = read_records(
            planned,
            group,
            lease.records(),
            is_batched=self._job.is_batched,
            inline=self._inline,
        )
        if isinstance(read, BatchRecords):
            if self._watch is not None:
                layouts = self._layouts[planned.group_number]
                arrays = self._watch.arrays(lease.slot, layouts, planned.item_count)
                changed = failure_of_change(planned, group, arrays, read)
                if changed is not None:
                    return changed
            for error in read.skipped.values():
                logger.warning("an item is skipped: %s", str(error))
            if len(read.skipped) == planned.valid_count:
                return failure_of_all(planned, read)
        return read

    def _drop(self, error: Exception) -> None:
        """Leave out a batch that has failed, as on_error says, and log it."""
        if callable(self._on_error):
            assert isinstance(error, LoaderError)
            self._on_error(error)  # it may raise
        logger.warning("a batch is dropped: %s", str(error))  # no record is to keep the error

    def _refuse_next(self) -> NoReturn:
        if self._state == "new":
            raise RuntimeError("iterate over a Dataloader inside its with block")
        if self._state == "closed":
            raise RuntimeError("the Dataloader's with block has been left; make a new Dataloader")
        if self._fatal_error is not None:
            raise self._fatal_error  # not an end like any other
        self._interrupt_handler.check()
        raise StopIteration

    def _plan_ahead(self) -> None:
        """Publish plans until the ring is full or the schedule ends."""
        arena = self._arena
        assert arena is not None
        caching = self._caching
        while self._next_planned is not None:
            way = "load" if caching is None else caching.plan(self._next_planned)
            if way == "wait" or (way == "load" and not arena.publish(self._next_planned.plan)):
                return
            if caching is not None and way == "load":
                caching.published(self._next_planned)
            self._pending.append(self._next_planned)
            self._next_planned = next(self._planner, None)

    def _wait(self, serial: int | None) -> _core.Lease:
        """Wait for a batch, counting the time as idle."""
        assert self._waiter is not None
        start = time.monotonic_ns()
        try:
            with self._fatal_errors():
                return self._waiter.wait(serial, self._check_interrupted, self._describe_item)
        finally:
            self._idle_ns += time.monotonic_ns() - start

    def _look_after_workers(self) -> None:
        """Replace a worker that has ended, or raise, although there is no need to wait for it."""
        self._look_at_ns = time.monotonic_ns() + _LOOK_EVERY_NS
        if self._pool is not None and (ended := self._pool.find_ended()) is not None:
            with self._fatal_errors():
                self._pool.replace(ended, self._describe_item)

    @contextlib.contextmanager
    def _fatal_errors(self) -> Iterator[None]:
        """Keep an error after which there are no more batches."""
        try:
            yield
        except (WorkerDiedError, WorkerStartError, JaxInWorkerError) as error:
            self._fatal_error = error
            self._state = "ended"
            raise

    def _check_interrupted(self) -> None:
        """End the iteration if that has been asked for; in debug mode, look at what came back."""
        if self._watch is not None:
            self._watch.check()
        if self._interrupted:
            self._interrupt_handler.check()
            self._state = "ended"
            logger.info(
                "stopped by %s %s%s",
                "Ctrl+C" if self._interrupt_handler.is_signalled else "interrupt()",
                "before the first training batch"
                if self._last_training is None
                else f"after {describe_batch(self._last_training)}",
                "; get_state() goes on from there" if self._deterministic else "",
            )
            raise StopIteration

    def _describe_item(self, serial: int, item: int) -> str:
        for planned in self._pending:
            if planned.plan.serial == serial:
                return describe_item(planned, self._groups[planned.group_number], item)
        return f"item {item} of a batch"

    def _indices_of(self, serial: int, first: int, count: int) -> list[int]:
        for planned in self._pending:
            if planned.plan.serial == serial:
                return planned.plan.indices()[first : first + count]
        return []

    def _deliver(
        self,
        planned: PlannedBatch,
        memory: _core.Lease | _core.Mapping,
        read: BatchRecords | None,
        *,
        is_uncached: bool,
    ) -> Batch[D]:
        """The batch in a leased slot, or in a mapped file."""
        additional = None if read is None else read.additional
        number = planned.group_number
        group = self._groups[number]
        if isinstance(memory, _core.Mapping):
            layouts = group.cache_layouts
            addresses = range(memory.address, memory.address + memory.nbytes)
        else:
            layouts = group.loader_layouts
            addresses = self._memory
        if self._place is None:
            arrays = self._place_by_user(planned, memory, layouts or {}, additional)
        elif isinstance(memory, _core.Mapping):
            arrays = self._place(memory, len(self._groups) + number, planned.item_count)
        else:
            arrays = self._place(memory, number, planned.item_count)
        batch = make_batch(
            group,
            planned,
            arrays,
            additional,
            addresses,
            None if read is None else read.skipped,
            layouts=layouts,
            is_uncached=is_uncached,
            keep=self._caching.save_made
            if is_uncached
            and self._caching is not None
            and group.cache_location is not None
            and not (read is not None and read.skipped)
            else None,
        )
        if isinstance(memory, _core.Lease) and self._watch is not None:
            watched = self._layouts[number]
            self._watch.hold(memory, watched, planned.item_count, describe_batch(planned))
        if planned.kind == _core.TRAINING:
            self._last_training = planned
        self._batches_delivered += 1
        if self._batches_delivered % _COLLECT_EVERY == 0:
            gc.collect(0)
        self._items_delivered += batch.valid_count
        self._items_skipped += len(batch.skipped)
        return batch

    def _place_by_user(
        self,
        planned: PlannedBatch,
        memory: _core.Lease | _core.Mapping,
        layouts: Mapping[str, ArrayLayout],
        additional: dict[str, list[Any]] | None,
    ) -> dict[str, jax.Array]:
        from hydrax._placement import slot_view

        assert self._placement_func is not None
        # With a placement_func a slot and a file hold what these layouts say, in NumPy's dtypes.
        views = {
            name: slot_view(memory, layout, planned.item_count) for name, layout in layouts.items()
        }
        placed = self._placement_func(
            MappingProxyType(views),
            layouts,
            MappingProxyType(additional or {}),
            self._groups[planned.group_number],
        )
        if not isinstance(placed, Mapping):
            raise TypeError(
                f"placement_func returned {type(placed).__name__}; expected a dict of jax.Arrays"
            )
        return dict(placed)

    def __repr__(self) -> str:
        training = ", ".join(repr(group) for group in self._training)
        workers = f"{self._loader_count} loader processes" if self._loader_count else "no processes"
        return (
            f"<Dataloader {self._state}, {workers}, depth {self._depth}, arena of "
            f"{format_nbytes(self.arena_nbytes)}, training on {training}>"
        )


_entered: weakref.WeakSet[Dataloader[Any]] = weakref.WeakSet()


def entered_arenas() -> list[_core.Arena]:
    """Arenas of all Dataloaders that were entered and still exist."""
    return [loader._arena for loader in _entered if loader._arena is not None]


def _abandon_all() -> None:
    for loader in list(_entered):
        loader._abandon()
    _entered.clear()


os.register_at_fork(after_in_child=_abandon_all)


def _load_nothing(descriptor: Any, arrays: Any, seed: Any) -> None:
    """Stands in for a loader function where all batches come from the disk cache."""


def _group_order(group: DataGroup[Any], index: int) -> GroupOrder:
    return GroupOrder(
        len(group),
        group.batch_size,
        _core.mix(group.seed, index),
        group.shuffle_first,
        group.shuffle_later,
        group.remainder,
    )
