"""Batches as the training loop gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from hydrax import _core
from hydrax._datagroup import DataGroup
from hydrax._schedule import PlannedBatch
from hydrax._sequences import Chosen
from hydrax._specs import ArrayLayout
from hydrax.errors import LoaderError

if TYPE_CHECKING:
    import jax

__all__ = ["Batch", "KeepFunc", "TrainingBatch", "ValidationBatch", "make_batch"]

D = TypeVar("D")

KeepFunc = Callable[
    [PlannedBatch, "Mapping[str, jax.Array]", "Mapping[str, Sequence[Any]]"], object
]

_NO_ADDITIONAL: Mapping[str, list[Any]] = MappingProxyType({})
_NONE_SKIPPED: Mapping[int, LoaderError] = MappingProxyType({})


class Batch(Generic[D]):
    """One batch of loaded items; a :class:`TrainingBatch` or a :class:`ValidationBatch`.

    Batches are made by a :class:`~hydrax.Dataloader` only. A batch takes one of the Dataloader's
    ``depth`` slots for as long as one of its arrays lives, in whatever variable, container or
    running computation. Let go of it (``del batch``) before the next one is asked for, or take a
    :meth:`copy` of what is to be kept.
    """

    __slots__ = (
        "__weakref__",
        "_additional",
        "_arrays",
        "_group",
        "_indices",
        "_is_uncached",
        "_keep",
        "_layouts",
        "_memory",
        "_planned",
        "_skipped",
    )

    _group: DataGroup[D]
    _planned: PlannedBatch
    _arrays: Mapping[str, jax.Array]
    _additional: Mapping[str, list[Any]]
    _indices: list[int] | None
    _is_uncached: bool
    _keep: KeepFunc | None
    _layouts: Mapping[str, ArrayLayout] | None
    _memory: range
    _skipped: Mapping[int, LoaderError]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("batches are made by a Dataloader only")

    @property
    def arrays(self) -> Mapping[str, jax.Array]:
        """Array name to jax.Array of shape ``(batch_size, *shape)``; read-only."""
        return self._arrays

    def get_array(self, name: str) -> jax.Array:
        """One of the arrays.

        Raises:
            KeyError: No array has this name; the message lists those there are.
        """
        try:
            return self._arrays[name]
        except KeyError:
            raise KeyError(f"no array {name!r}; there are {sorted(self._arrays)}") from None

    @property
    def additional(self) -> Mapping[str, list[Any]]:
        """What the loader function returned: key to one value per item; read-only.

        None stands where an item returned no such key; a key that no item returned is missing.
        """
        return self._additional

    def get_additional(self, key: str, index: int | None = None, *, default: Any = None) -> Any:
        """What the loader function returned under a key.

        Args:
            key: The key.
            index: Item within the batch, or None for the list of all.
            default: Stands in for each item that returned no such key, or None under it.

        Returns:
            One value per item, or the item's value.

        Raises:
            IndexError: The batch has no such item.
        """
        values = self._additional.get(key) or [None] * len(self)
        if index is not None:
            return default if values[index] is None else values[index]
        return [default if value is None else value for value in values]

    @property
    def data(self) -> Sequence[D]:
        """The items' descriptors, ``group[i]`` for each of ``indices``."""
        return Chosen(self._group.data, self.indices)

    def get_data(self, index: int) -> D:
        """Descriptor of one item, counted within the batch."""
        return self._group.data[self.indices[index]]

    @property
    def indices(self) -> Sequence[int]:
        """Position of each item in the DataGroup."""
        if self._indices is None:
            self._indices = self._planned.plan.indices()
        return self._indices

    @property
    def valid_count(self) -> int:
        """Items that count: without those that only pad a last batch, or that were skipped."""
        return self._planned.valid_count - len(self._skipped)

    @property
    def mask(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Bool array of shape ``(batch,)``: False for items that are not to count.

        Those are the items that only pad a last batch (``remainder="pad"``) and those that could
        not be loaded (``on_error="skip_item"``), whose place in each array is zeros. Every batch
        has a mask, so that a jitted function that takes it is compiled once.
        """
        mask = np.arange(len(self)) < self._planned.valid_count
        mask[list(self._skipped)] = False
        return mask

    @property
    def skipped(self) -> Mapping[int, LoaderError]:
        """Position in the batch to the error, for items that could not be loaded; read-only.

        It is empty unless the Dataloader has ``on_error="skip_item"``.
        """
        return self._skipped

    @property
    def group(self) -> DataGroup[D]:
        """The DataGroup that the items belong to."""
        return self._group

    @property
    def group_index(self) -> int:
        """Which of its group's batches this is, counted from 0.

        With ``"batchwise"`` shuffling the batches keep these numbers, in whatever order they come.
        """
        return self._planned.content[1]

    @property
    def group_number(self) -> int:
        """Which of the training, or of the validation groups that is, counted from 0."""
        return self._planned.group_of_kind

    @property
    def layouts(self) -> Mapping[str, ArrayLayout]:
        """Layouts of the arrays: the group's loader_layouts, or its cache_layouts once cached."""
        return self._layouts or {}

    @property
    def is_training(self) -> bool:
        """Whether this is a :class:`TrainingBatch`."""
        return self._planned.kind == _core.TRAINING

    @property
    def is_validation(self) -> bool:
        """Whether this is a :class:`ValidationBatch`."""
        return self._planned.kind == _core.VALIDATION

    @property
    def uncached(self) -> bool:
        """Whether the disk cache has no part in it, so far.

        False for what comes from the cache, for what the loader function has loaded and the cache
        keeps as it is, and after :meth:`cache`.
        """
        return self._is_uncached

    def cache(
        self,
        arrays: Mapping[str, jax.Array],
        additional: Mapping[str, Sequence[Any]] | None = None,
        *,
        persist: bool = True,
    ) -> None:
        """Turn this loaded batch into a cached one, and keep that in the disk cache.

        Afterwards the batch has these arrays and additional results in place of the loaded ones,
        whose memory it gives back. In later epochs, and in later runs, it comes like this from the
        cache. The arrays are written as soon as JAX has computed them, beside training; do not
        donate them before.

        Args:
            arrays: One for each of the group's cache_arrays, of the batch's items, in the dtype
                that JAX has there.
            additional: Key to one value per item: what JSON has, tuples, bytes, NumPy arrays and
                scalars. None keeps what the loader function returned.
            persist: Whether to keep it; otherwise only the batch changes, as it does without a
                cache_location and with cache_readonly.

        Raises:
            RuntimeError: The batch is cached already, the group has no cache_arrays, or the
                Dataloader's block has been left.
            TypeError: An array is no jax.Array, or an additional result cannot be kept.
            ValueError: An array is missing, unknown, or of another shape or dtype.

        Example:
            >>> import tempfile, hydrax
            >>> folder = tempfile.TemporaryDirectory()
            >>> group = hydrax.DataGroup(
            ...     2,
            ...     range(4),
            ...     loader_arrays={"x": ((8,), "f4", "f4")},
            ...     cache_arrays={"mean": ((), "f4", "f4")},
            ...     cache_location=folder.name,
            ... )
            >>> def load(number, arrays, seed):
            ...     print("load", number)
            ...     arrays["x"][:] = number
            >>> for run in range(2):
            ...     with hydrax.Dataloader(
            ...         load, group, end_at=("epoch", 1), loader_count=0
            ...     ) as dataloader:
            ...         for batch in dataloader:
            ...             if batch.uncached:
            ...                 batch.cache({"mean": batch.arrays["x"].mean(axis=1)})
            ...             print(batch.arrays["mean"])
            load 0
            load 1
            [0. 1.]
            load 2
            load 3
            [2. 3.]
            [0. 1.]
            [2. 3.]
            >>> folder.cleanup()
        """
        if not self._is_uncached:
            raise RuntimeError("the batch is cached already")
        layouts = self._group.cache_layouts
        if layouts is None:
            raise RuntimeError("the batch's DataGroup has no cache_arrays")
        _check_arrays(arrays, layouts, len(self))
        if additional is None:
            additional = self._additional
        for key, values in additional.items():
            if len(values) != len(self):
                raise ValueError(
                    f"there are {len(values)} values under {key!r}; expected {len(self)}, "
                    "one per item"
                )
        kept = {name: arrays[name] for name in layouts}
        lists = {key: list(values) for key, values in additional.items()}
        if persist and self._keep is not None:
            self._keep(self._planned, kept, lists)
        self._arrays = MappingProxyType(kept)
        self._additional = MappingProxyType(lists)
        self._layouts = layouts
        self._is_uncached = False

    @property
    def is_zero_copy(self) -> bool:
        """Whether all arrays are the shared memory that was filled, or the file of the disk cache.

        So it is on the CPU, except for dtypes of less than 8 bits, which XLA packs. On other
        devices, with a placement_func that copies, and after :meth:`copy` it is False.
        """
        try:
            pointers = [array.unsafe_buffer_pointer() for array in self._arrays.values()]
        except (RuntimeError, ValueError, NotImplementedError):  # sharded, or donated
            return False
        return all(pointer in self._memory for pointer in pointers)

    def copy(self) -> Batch[D]:
        """The same batch with arrays of their own, which outlive the slot.

        Example:
            >>> import hydrax
            >>> group = hydrax.DataGroup(1, range(4), loader_arrays={"x": ((), "i4", "i4")})
            >>> def load(number, arrays, seed):
            ...     arrays["x"][...] = number
            >>> with hydrax.Dataloader(load, group, depth=1, end_at=("epoch", 1)) as dataloader:
            ...     kept = list(map(hydrax.Batch.copy, dataloader))
            >>> [int(batch.arrays["x"][0]) for batch in kept]
            [0, 1, 2, 3]
        """
        import jax.numpy as jnp

        copied = {name: jnp.array(array, copy=True) for name, array in self._arrays.items()}
        # The slot may be filled anew as soon as the caller lets go of this batch.
        for array in copied.values():
            array.block_until_ready()
        batch: Batch[D] = object.__new__(type(self))
        batch._group = self._group
        batch._planned = self._planned
        batch._arrays = MappingProxyType(copied)
        batch._additional = self._additional
        batch._indices = self._indices
        batch._is_uncached = self._is_uncached
        batch._keep = self._keep
        batch._layouts = self._layouts
        batch._memory = self._memory
        batch._skipped = self._skipped
        return batch

    def block_until_ready(self) -> Batch[D]:
        """Wait until the arrays are where they belong; returns the batch.

        On the CPU they are there from the start; on another device their transfer may still go on.
        """
        for array in self._arrays.values():
            array.block_until_ready()
        return self

    def __len__(self) -> int:
        return self._planned.item_count

    def _describe(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        arrays = ", ".join(
            f"{name}: {array.dtype.name}{list(array.shape)}" for name, array in self._arrays.items()
        )
        return f"<{type(self).__name__} {self._describe()}, {arrays}>"


class TrainingBatch(Batch[D]):
    """A batch to train on."""

    __slots__ = ()

    @property
    def epoch(self) -> int:
        """Training epoch, counted from 0."""
        return self._planned.epoch

    @property
    def epoch_batch(self) -> int:
        """Position within the epoch, counted from 0."""
        return self._planned.epoch_batch

    @property
    def batch_num(self) -> int:
        """Position among all training batches, counted from 0."""
        return self._planned.batch_num

    @property
    def seed(self) -> int:
        """Seed of the batch as a whole, below 2**31."""
        return self._planned.seed

    @property
    def seeds(self) -> Sequence[int]:
        """The seed that the loader function was given with each item, below 2**31."""
        return self._planned.plan.seeds()

    def _describe(self) -> str:
        return f"{self.batch_num} (epoch {self.epoch}, batch {self.epoch_batch})"


class ValidationBatch(Batch[D]):
    """A batch to validate on."""

    __slots__ = ()

    @property
    def validation_epoch(self) -> int:
        """Number of the validation run, counted from 0."""
        return self._planned.epoch

    @property
    def validation_epoch_batch(self) -> int:
        """Position within the validation run, counted from 0."""
        return self._planned.epoch_batch

    @property
    def validation_batch_num(self) -> int:
        """Position among all validation batches, counted from 0."""
        return self._planned.batch_num

    def _describe(self) -> str:
        return (
            f"{self.validation_batch_num} "
            f"(run {self.validation_epoch}, batch {self.validation_epoch_batch})"
        )


def _check_arrays(
    arrays: Mapping[str, Any], layouts: Mapping[str, ArrayLayout], item_count: int
) -> None:
    """Check arrays that are to be cached."""
    import jax

    for name in arrays:
        if name not in layouts:
            raise ValueError(f"array {name!r} is not among the cache_arrays {list(layouts)}")
    for name, layout in layouts.items():
        if name not in arrays:
            raise ValueError(f"array {name!r} of cache_arrays is missing")
        array = arrays[name]
        if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
            raise TypeError(f"array {name!r} is {type(array).__name__}; expected a jax.Array")
        shape = (item_count, *layout.shape[1:])
        if array.shape != shape:
            raise ValueError(f"array {name!r} has shape {array.shape}, expected {shape}")
        dtype = jax.dtypes.canonicalize_dtype(layout.jax_dtype)
        if array.dtype != dtype:
            raise ValueError(f"array {name!r} has dtype {array.dtype}, expected {dtype}")


def make_batch(
    group: DataGroup[D],
    planned: PlannedBatch,
    arrays: dict[str, jax.Array],
    additional: dict[str, list[Any]] | None,
    memory: range,
    skipped: Mapping[int, LoaderError] | None,
    *,
    layouts: Mapping[str, ArrayLayout] | None,
    is_uncached: bool = True,
    keep: KeepFunc | None = None,
) -> Batch[D]:
    """A batch, for the Dataloader.

    Args:
        group: Its group.
        planned: What is known of it.
        arrays: Its arrays.
        additional: Its additional results.
        memory: Range of the addresses that are handed out without a copy.
        skipped: Position to the error of each item that was left out.
        layouts: Layouts of the arrays.
        is_uncached: Whether the disk cache has no part in it.
        keep: Saves what Batch.cache() makes of it; None does not.
    """
    cls: Any = TrainingBatch if planned.kind == _core.TRAINING else ValidationBatch
    batch: Batch[D] = object.__new__(cls)
    batch._group = group
    batch._planned = planned
    batch._arrays = MappingProxyType(arrays)
    batch._additional = _NO_ADDITIONAL if additional is None else MappingProxyType(additional)
    batch._indices = None
    batch._is_uncached = is_uncached
    batch._keep = keep
    batch._layouts = layouts
    batch._memory = memory
    batch._skipped = MappingProxyType(skipped) if skipped else _NONE_SKIPPED
    return batch
