"""Dataloader: what the user gets; it checks calls, guards next(), and answers for errors.

What it is made from is in hydrax._setup, and the flow of batches in hydrax._flow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from hydrax import _context
from hydrax._batch import Batch
from hydrax._datagroup import DataGroups
from hydrax._flow import Flow
from hydrax._memory import format_nbytes
from hydrax._mixing import EpochEnd
from hydrax._records import BatchFailure
from hydrax._setup import LoaderFunc, PlacementFunc, make_setup
from hydrax._shared_items import warn_of_copying
from hydrax._state import make_state, read_state, schedule_facts
from hydrax._stats import LoaderStats
from hydrax._workers import StartMethod
from hydrax.errors import HydraxError, LoaderError

__all__ = ["Dataloader"]

logger = logging.getLogger(__name__)

D = TypeVar("D")


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
        training: The DataGroup to train on, or several; one pass over all of them is an epoch. They
            may have names, ``{"name": group}``; ``batch.group_number`` counts them in this order.
        validation: ``("epoch" | "batch", interval, group or groups)``: a validation run follows
            each ``interval`` training epochs or batches.
        depth: Batches that can exist at a time: being loaded, waiting, or held by you.
        loader_count: Loader processes. 0 loads in the main process, the same batches with the same
            seeds, for debugging and breakpoints.
        loader_nice: Added to the niceness of the loader processes.
        cacher_count: Threads that read ahead in the disk cache what is not in memory, or not yet
            verified. 0 reads each batch when it is asked for.
        start_at: ``(epoch, batches)`` to skip before the first batch. The batches may be more than
            an epoch has.
        end_at: ``("epoch" | "batch", n)``: end after n epochs or training batches, counted from the
            very beginning, not from start_at. None goes on until the block is left.
        interleave_groups: Mix the training groups within an epoch, taking next the one of which
            the smallest share has been used; otherwise one group comes after the other.
        weights: Shares of the batches that the training groups get, one number each, in whatever
            unit; by name where the groups have names. At any moment each group has had its share of
            all batches, to less than one batch. A group that has been gone through starts over, in
            its next order and with its next seeds.
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
        >>> from hydrax import DataGroup, Dataloader
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
        training: DataGroups[D],
        *,
        validation: tuple[str, int, DataGroups[D]] | None = None,
        depth: int = 3,
        loader_count: int = 1,
        loader_nice: int = 0,
        cacher_count: int = 1,
        start_at: tuple[int, int] = (0, 0),
        end_at: tuple[str, int] | None = None,
        interleave_groups: bool = True,
        weights: Iterable[float] | Mapping[str, float] | None = None,
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
        self._setup = make_setup(
            loader_func,
            training,
            validation=validation,
            depth=depth,
            loader_count=loader_count,
            loader_nice=loader_nice,
            cacher_count=cacher_count,
            start_at=start_at,
            end_at=end_at,
            interleave_groups=interleave_groups,
            weights=weights,
            epoch_end=epoch_end,
            deterministic=deterministic,
            timeout_sec=timeout_sec,
            startup_func=startup_func,
            placement_func=placement_func,
            start_method=start_method,
            batched=batched,
            debug=debug,
            on_error=on_error,
            max_restarts=max_restarts,
        )
        self._flow = Flow(self._setup)
        self._next_lock = threading.Lock()

    @property
    def arena_nbytes(self) -> int:
        """Bytes of shared memory: depth times the largest batch, and some tables."""
        return self._setup.arena_nbytes

    @property
    def batches_per_epoch(self) -> int:
        """Training batches of one epoch."""
        return self._setup.schedule.batches_per_epoch

    @property
    def batches_per_validation(self) -> int:
        """Batches of one validation run; 0 without validation."""
        return self._setup.schedule.batches_per_validation

    @property
    def first_batch(self) -> int:
        """Number of the first training batch, as start_at or a state set before entering says."""
        return self._flow.first_position.training

    @property
    def last_batch(self) -> int | None:
        """Number of the training batch before which it ends, as end_at says; None: it does not."""
        return self._setup.schedule.last_batch

    @property
    def deterministic(self) -> bool:
        """Whether batches come in the planned order."""
        return self._setup.deterministic

    @property
    def interrupted(self) -> bool:
        """Whether :meth:`interrupt` or Ctrl+C has stopped the flow of batches.

        :attr:`delivered_batch` says where, and so does the log.
        """
        return self._flow.is_interrupted

    @property
    def delivered_batch(self) -> int | None:
        """Number (``batch_num``) of the training batch that came last; None before the first."""
        last = self._flow.last_training
        return None if last is None else last.batch_num

    def interrupt(self) -> None:
        """Stop the flow of batches: the next ``next()`` ends the iteration. From any thread."""
        self._flow.interrupt()

    def idle_usec(self) -> int:
        """Microseconds that ``next`` has waited since the last call of this.

        That is for batches to be loaded, but also for slots, while all are held by batches that
        are kept or by computations that JAX has not finished.
        """
        return self._flow.take_idle_ns() // 1000

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
        return self._flow.stats()

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
        if not self._setup.deterministic:
            raise RuntimeError("only a deterministic Dataloader has a state to go on from")
        return make_state(self._flow.position, self._schedule_facts())

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`get_state` was called: the batches that follow are bit-identical.

        Call it before the ``with`` block or inside of it; batches that were loaded ahead are given
        up. However far the state lies in the run, it takes as long as a fresh start. ``end_at``
        still counts from the very beginning.

        Raises:
            StateError: The state is of other data, or of other arguments; names which.
            RuntimeError: The block has been left, or the Dataloader is not deterministic.
        """
        if not self._setup.deterministic:
            raise RuntimeError("only a deterministic Dataloader can go on from a state")
        if self._flow.state == "closed":
            raise RuntimeError("the Dataloader's with block has been left; make a new Dataloader")
        self._flow.go_to(read_state(state, self._schedule_facts()))

    def _schedule_facts(self) -> dict[str, Any]:
        """What must be the same for a state to mean the same batches."""
        setup = self._setup
        return schedule_facts(setup.training, setup.validation, setup.schedule)

    def __enter__(self) -> Dataloader[D]:
        if self._flow.state != "new":
            raise RuntimeError(
                "this Dataloader has been entered before; make a new one, with start_at to go on "
                "where this one ended"
            )
        for group in self._setup.groups:
            rest = len(group) % group.batch_size
            if rest and group.remainder == "drop":
                logger.info(
                    "%d of %d items do not fill a last batch and are left out of each epoch; "
                    "DataGroup(remainder='pad') or 'short' keeps them",
                    rest,
                    len(group),
                )
            if self._setup.loader_count > 0:
                warn_of_copying(group.data)
        self._flow.open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        exc_traceback: TracebackType | None,
    ) -> None:
        self._flow.close(is_checked=exc_type is None)

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
                result = self._flow.next()
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
            self._flow.count_dropped(result)
            if not result.is_of_item or self._setup.on_error == "raise":
                try:
                    raise result.error
                finally:
                    del result
            self._drop(result.error)

    def _drop(self, error: Exception) -> None:
        """Leave out a batch that has failed, as on_error says, and log it."""
        on_error = self._setup.on_error
        if callable(on_error):
            assert isinstance(error, LoaderError)
            on_error(error)  # it may raise
        logger.warning("a batch is dropped: %s", str(error))  # no record is to keep the error

    def __repr__(self) -> str:
        setup = self._setup
        training = ", ".join(repr(group) for group in setup.training)
        count = setup.loader_count
        workers = f"{count} loader processes" if count else "no processes"
        return (
            f"<Dataloader {self._flow.state}, {workers}, depth {setup.depth}, arena of "
            f"{format_nbytes(self.arena_nbytes)}, training on {training}>"
        )
