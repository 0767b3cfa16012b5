"""DataGroup: a data set, its batch size and the arrays that an item is loaded into."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import NoneType
from typing import Any, Generic, Literal, TypeAlias, TypeVar, overload

from hydrax._arguments import check_bool, check_choice, check_int, check_path
from hydrax._sequences import as_sequence
from hydrax._specs import ArrayLayout, ArraySpec, Ragged, lay_out, parse_specs

__all__ = ["DataGroup", "DataGroups", "check_groups", "check_validation"]

logger = logging.getLogger(__name__)

D = TypeVar("D")

ShuffleMode = Literal["repeat", "reseed", "itemwise", "batchwise", "default"]
RemainderMode = Literal["drop", "pad", "short"]
_REMAINDER_MODES = ("drop", "pad", "short")
_SHUFFLE_MODES = ("repeat", "reseed", "itemwise", "batchwise", "default")


class DataGroup(Sequence[D], Generic[D]):
    """Data of one kind: descriptors, a batch size, and the arrays that an item is loaded into.

    A DataGroup is a sequence of the descriptors in ``data``. It holds no memory of its own and can
    serve several Dataloaders.

    Args:
        batch_size: Items per batch, at least 1. Capped at ``len(data)``, so that a small data set
            still gives one batch.
        data: The items' descriptors: whatever the loader function needs to load an item. Anything
            with a length and items by position, also one that computes them, such as a ``range``,
            a data set of another library, or an array in memory or in a file; another finite
            iterable is turned into a list. ``__getitems__`` is called for a run of items where
            there is one. Do not change it afterwards. What holds open files is refused, except
            datasets of h5py, which each loader process opens anew.
        loader_arrays: ``{"name": (shape, numpy_dtype, jax_dtype)}``, with the shape of one item,
            without the batch dimension; ``()`` is a scalar per item. The loader function fills
            arrays of ``numpy_dtype``; JAX gets them as ``jax_dtype``. Where the two differ the
            values are converted in the loader process, and one that does not fit is an error.
            A :class:`~hydrax.Ragged` in the place of the three is for items of unequal length.
            Without loader_arrays all batches come from the disk cache.
        cache_arrays: Arrays that you make of a loaded batch with :meth:`Batch.cache`, and that the
            disk cache keeps in place of the loaded ones; spelled like loader_arrays. None keeps
            what was loaded.
        cache_location: Folder of the disk cache, which is made as needed. A cache holds the batches
            of one group. Batches that are in it are read by mmap and not loaded.
        cache_readonly: Never write to the disk cache.
        cache_bytes: Size that the batches in the disk cache may reach together. Once another one
            does not fit, what is there stays, and what is not is loaded each time. None is no
            limit.
        cache_fingerprint: A string or int that says which data and which loader function the disk
            cache is made from; change it with them. A cache with another one is refused. None
            compares a sample of the descriptors instead, which knows nothing of what the loader
            function reads and does.
        seed: Of shuffling and of the items' seeds: an int in [-2**63, 2**256).
        shuffle_first: Whether the first epoch is shuffled; otherwise it is in the data's order.
        shuffle_later: What changes in later epochs. ``"repeat"``: nothing. ``"reseed"``: new
            seeds, same order. ``"itemwise"``: a new order of the items, and new seeds.
            ``"batchwise"``: a new order of the batches, which keep their items and seeds.
            ``"default"``: ``"batchwise"`` with a cache_location, else ``"itemwise"``.
        remainder: What becomes of the items that do not fill a last batch. ``"drop"``: they are
            left out of the epoch; with ``"itemwise"`` shuffling other ones each time. ``"pad"``:
            they are repeated until the batch is full, so that shapes stay the same and nothing is
            compiled anew; ``batch.mask`` tells them apart. ``"short"``: the batch is smaller.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: No data, no arrays, a batch_size below 1, an unknown mode, a negative dimension.

    Example:
        >>> import numpy as np
        >>> group = DataGroup(4, range(10), loader_arrays={"x": ((2,), np.float32, np.float32)})
        >>> group.batch_count, group.loader_layouts["x"].shape, group[3]
        (2, (4, 2), 3)
    """

    def __init__(
        self,
        batch_size: int,
        data: Iterable[D],
        *,
        loader_arrays: Mapping[str, tuple[Any, Any, Any] | Ragged] | None = None,
        cache_arrays: Mapping[str, tuple[Any, Any, Any]] | None = None,
        cache_location: str | os.PathLike[str] | None = None,
        cache_readonly: bool = False,
        cache_bytes: int | None = None,
        cache_fingerprint: str | int | None = None,
        seed: int = 0,
        shuffle_first: bool = False,
        shuffle_later: ShuffleMode = "default",
        remainder: RemainderMode = "drop",
    ) -> None:
        wanted = check_int("batch_size", batch_size, minimum=1)
        check_choice("shuffle_later", shuffle_later, _SHUFFLE_MODES)
        check_choice("remainder", remainder, _REMAINDER_MODES)
        if loader_arrays is None and cache_arrays is None:
            raise ValueError(
                "loader_arrays is missing; name the arrays that an item is loaded to, or "
                "cache_arrays to take every batch from a disk cache"
            )
        if loader_arrays is None and cache_location is None:
            raise ValueError("cache_location is missing; without loader_arrays all comes from it")
        self._specs = () if loader_arrays is None else parse_specs("loader_arrays", loader_arrays)
        self._cache_location = (
            None if cache_location is None else check_path("cache_location", cache_location)
        )
        self._cache_specs: tuple[ArraySpec, ...] | None = None
        if cache_arrays is not None:
            self._cache_specs = parse_specs("cache_arrays", cache_arrays)
        elif cache_location is not None:
            self._cache_specs = self._specs
        self._is_cache_user_made = cache_arrays is not None
        self._cache_readonly = check_bool("cache_readonly", cache_readonly)
        self._cache_bytes = (
            None if cache_bytes is None else check_int("cache_bytes", cache_bytes, minimum=0)
        )
        if isinstance(cache_fingerprint, bool) or not isinstance(
            cache_fingerprint, (str, int, NoneType)
        ):
            raise TypeError(f"cache_fingerprint is {cache_fingerprint!r:.80}; expected str or int")
        self._cache_fingerprint = cache_fingerprint
        self._seed = check_int("seed", seed, minimum=-(2**63), maximum=2**256 - 1)
        self._data = as_sequence(data)
        try:
            count = len(self._data)
        except OverflowError:
            raise ValueError("data has more items than the 2**63 - 1 that can be counted") from None
        except TypeError as error:
            raise TypeError(f"data has no length: {error}") from error
        if count == 0:
            raise ValueError("data is empty; a DataGroup needs at least one item")
        self._batch_size = check_int("batch_size", min(wanted, count), minimum=1, maximum=2**31 - 1)
        if self._batch_size < wanted:
            logger.info("batch_size %d is capped at the %d items of data", wanted, count)
        self._shuffle_first = check_bool("shuffle_first", shuffle_first)
        if shuffle_later == "default":
            shuffle_later = "itemwise" if cache_location is None else "batchwise"
        self._shuffle_later: ShuffleMode = shuffle_later
        self._remainder: RemainderMode = remainder
        self._layouts, self._nbytes = lay_out(self._specs, self._batch_size)
        self._cache_layouts, self._cache_nbytes = lay_out(self._cache_specs or (), self._batch_size)

    @property
    def batch_size(self) -> int:
        """Items per batch: what was asked for, at most ``len(data)``."""
        return self._batch_size

    @property
    def batch_count(self) -> int:
        """Batches per epoch, at least 1; a partial one counts unless ``remainder="drop"``."""
        whole, rest = divmod(len(self._data), self._batch_size)
        return whole + (rest > 0 and self._remainder != "drop")

    @property
    def loader_layouts(self) -> Mapping[str, ArrayLayout] | None:
        """Array name to ``(shape with batch, NumPy dtype, JAX dtype, byte offset, elements)``.

        None where all batches come from the disk cache.
        """
        return self._layouts or None

    @property
    def loader_size(self) -> int | None:
        """Bytes of one batch as the loader fills it; None like loader_layouts."""
        return self._nbytes if self._layouts else None

    @property
    def cache_layouts(self) -> Mapping[str, ArrayLayout] | None:
        """Layouts of the cached arrays; None without cache_arrays and cache_location."""
        return self._cache_layouts or None

    @property
    def cache_size(self) -> int | None:
        """Bytes of the arrays of one cached batch; None like cache_layouts."""
        return self._cache_nbytes if self._cache_layouts else None

    @property
    def cache_location(self) -> str | None:
        """Folder of the disk cache, or None."""
        return self._cache_location

    @property
    def cache_readonly(self) -> bool:
        """Whether the disk cache is never written to."""
        return self._cache_readonly

    @property
    def cache_bytes(self) -> int | None:
        """Size that the batches in the disk cache may reach together, or None."""
        return self._cache_bytes

    @property
    def cache_fingerprint(self) -> str | int | None:
        """What the disk cache is made from, as given."""
        return self._cache_fingerprint

    @property
    def is_cache_user_made(self) -> bool:
        """Whether :meth:`Batch.cache` makes what is cached, rather than the loader function."""
        return self._is_cache_user_made

    @property
    def data(self) -> Sequence[D]:
        """The descriptors, as the sequence that was given or made."""
        return self._data

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        """Specs of the loaded arrays, checked, in the given order; none without loader_arrays."""
        return self._specs

    @property
    def cache_specs(self) -> tuple[ArraySpec, ...] | None:
        """Specs of the cached arrays; None like cache_layouts."""
        return self._cache_specs

    @property
    def seed(self) -> int:
        """Seed of shuffling and of the items' seeds."""
        return self._seed

    @property
    def shuffle_first(self) -> bool:
        """Whether the first epoch is shuffled."""
        return self._shuffle_first

    @property
    def shuffle_later(self) -> ShuffleMode:
        """What changes in later epochs, with ``"default"`` resolved."""
        return self._shuffle_later

    @property
    def remainder(self) -> RemainderMode:
        """What becomes of the items that do not fill a last batch."""
        return self._remainder

    def __len__(self) -> int:
        return len(self._data)

    @overload
    def __getitem__(self, index: int) -> D: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[D]: ...
    def __getitem__(self, index: int | slice) -> D | Sequence[D]:
        return self._data[index]

    def __iter__(self) -> Iterator[D]:
        return (self._data[index] for index in range(len(self._data)))

    def __repr__(self) -> str:
        arrays = ", ".join(
            f"{spec.name}: {spec.jax_dtype.name}{list(spec.shape)}"
            for spec in self._specs or self._cache_specs or ()
        )
        return (
            f"<DataGroup of {len(self)} items, batch_size {self.batch_size}, "
            f"{self.batch_count} batches per epoch, {arrays}>"
        )


DataGroups: TypeAlias = DataGroup[D] | Iterable[DataGroup[D]] | Mapping[str, DataGroup[D]]
"""What a Dataloader is given groups as."""


def check_groups(name: str, groups: Any) -> tuple[DataGroup[Any], ...]:
    """One DataGroup or several, by name or not, as a tuple; name is the argument's."""
    if isinstance(groups, DataGroup):
        return (groups,)
    if isinstance(groups, Set):
        raise TypeError(f"{name} is a {type(groups).__name__}, which has no order; give a list")
    if not isinstance(groups, Iterable):
        raise TypeError(f"{name} is {type(groups).__name__}; expected a DataGroup, or several")
    found = tuple(groups.values() if isinstance(groups, Mapping) else groups)
    for group in found:
        if not isinstance(group, DataGroup):
            raise TypeError(f"{name} contains {type(group).__name__}; expected DataGroups")
    if not found:
        raise ValueError(f"{name} is empty; expected at least one DataGroup")
    return found


def check_validation(validation: Any) -> tuple[str, int, tuple[DataGroup[Any], ...]]:
    """The validation argument as (mode, interval, groups), without groups for None."""
    if validation is None:
        return "epoch", 1, ()
    if not isinstance(validation, (tuple, list)) or len(validation) != 3:
        raise TypeError(
            f"validation is {validation!r:.80}; expected ('epoch' or 'batch', interval, groups)"
        )
    mode, interval, groups = validation
    if not isinstance(mode, str) or mode not in ("epoch", "batch"):
        raise ValueError(f"the validation mode is {mode!r}; expected 'epoch' or 'batch'")
    checked = check_int("the validation interval", interval, minimum=1)
    return mode, checked, check_groups("validation", groups)
