"""Hugging Face ``datasets`` as batches of jax.Arrays, and as the data of a Dataloader.

:func:`iter_batches` gives what ``dataset.with_format("jax").iter(batch_size)`` gives, several times
as fast. :func:`data_group` and :func:`load_rows` put a data set into a :class:`hydrax.Dataloader`,
with its shuffling, validation and resuming. Both read from the memory of the data set's Arrow
table, without an object of Python for each value.

This module needs ``datasets`` (``pip install 'hydrax[huggingface]'``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

try:
    import datasets
except ImportError as error:
    raise ImportError("hydrax.huggingface needs datasets; install hydrax[huggingface]") from error

from hydrax._arguments import check_int
from hydrax._datagroup import DataGroup
from hydrax._dataloader import Dataloader
from hydrax._huggingface_rows import data_group, load_rows
from hydrax._huggingface_table import (
    Positions,
    check_columns,
    check_features,
    conversions_of,
    readers_of,
    streamed_tables,
)
from hydrax._huggingface_values import ColumnReader

if TYPE_CHECKING:
    import jax

__all__ = ["data_group", "iter_batches", "load_rows"]

_MOST_LOADERS = 4


def iter_batches(
    dataset: datasets.Dataset | datasets.IterableDataset,
    batch_size: int,
    *,
    columns: Iterable[str] | None = None,
    device: jax.Device | jax.sharding.Sharding | str | None = None,
    remainder: Literal["short", "drop"] = "short",
    nulls: Mapping[str, Any] | None = None,
    loader_count: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Batches as ``dataset.with_format("jax").iter(batch_size)`` yields them.

    Values, dtypes, shapes and containers are the same for every feature that the JAX format can
    deal with. It never changes a value or a dtype without a word; the guide has a table of what is
    different for that reason. The arrays have memory of their own and can be kept.

    Args:
        dataset: A data set, or a streamed one. A format that was set on it makes no difference.
        batch_size: Rows per batch.
        columns: The columns that are wanted, in this order; None takes all.
        device: Where arrays are placed: a device, a sharding, or the string of a device. None
            places them on JAX's default device, without committing them to it.
        remainder: Whether a last batch of fewer rows comes (``"short"``) or not (``"drop"``).
        nulls: Column to what stands in for its nulls. Elsewhere a null is an error in integers and
            bools, and NaN in other numbers.
        loader_count: Processes that read ahead. 0 reads in this one, which is quickest unless
            images or sounds are to be decoded. None chooses.

    Returns:
        Iterator over dicts of column name to array or list.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: An unknown column or device, or a value that does not fit (at its batch).

    Example:
        >>> dataset = datasets.Dataset.from_dict({"x": [1, 2, 3], "text": ["a", "b", "c"]})
        >>> for batch in iter_batches(dataset, 2):
        ...     print(batch["x"], batch["text"])
        [1 2] ['a', 'b']
        [3] ['c']
    """
    import jax

    from hydrax._huggingface_placement import Placer, resolve_device

    size = check_int("batch_size", batch_size, minimum=1)
    if remainder not in ("short", "drop"):
        raise ValueError(f"remainder is {remainder!r}; expected 'short' or 'drop'")
    placer = Placer(resolve_device(device))
    config: Any = jax.config
    is_wide = bool(config.jax_enable_x64)
    if isinstance(dataset, datasets.IterableDataset):
        if loader_count:
            raise ValueError("a streamed data set is read in this process; leave out loader_count")
        if dataset.features is not None:
            check_features(dataset.features, columns, nulls)
        return _stream(dataset, size, columns, placer, remainder, nulls, is_wide)
    if not isinstance(dataset, datasets.Dataset):
        hint = "; choose one of its splits" if isinstance(dataset, Mapping) else ""
        raise TypeError(
            f"dataset is {type(dataset).__name__}; expected a Dataset or an IterableDataset{hint}"
        )
    names = check_columns(columns, dataset.column_names)
    positions = Positions(dataset)
    conversions = conversions_of(names, nulls, wide=is_wide)
    readers = readers_of(positions.table, dataset.features, conversions)
    if loader_count is None:
        loader_count = 0
        if any(_is_decoded(dataset.features[name]) for name in names):
            loader_count = min(len(os.sched_getaffinity(0)), _MOST_LOADERS)
    count = check_int("loader_count", loader_count, minimum=0)
    reader = _BatchReader(positions, readers, size)
    batch_count = len(dataset) // size if remainder == "drop" else -(-len(dataset) // size)
    if count == 0 or batch_count == 0:
        return _read_here(reader, batch_count, placer)
    return _read_ahead(reader, batch_count, placer, count)


class _BatchReader:
    """Reads batches by number; also the loader function of the processes that read ahead."""

    def __init__(
        self, positions: Positions, readers: dict[str, ColumnReader], batch_size: int
    ) -> None:
        self._positions = positions
        self.readers = readers
        self._batch_size = batch_size

    def read(self, number: int) -> dict[str, Any]:
        """The columns of a batch as NumPy arrays and lists."""
        first = number * self._batch_size
        stop = min(first + self._batch_size, len(self._positions))
        rows = self._positions.rows(range(first, stop))
        return {name: reader.read(rows, first) for name, reader in self.readers.items()}

    def __call__(self, number: int, arrays: Mapping[str, Any], seed: int) -> dict[str, Any]:
        arrays["number"][...] = number
        return {"columns": self.read(number)}


def _place(columns: dict[str, Any], readers: dict[str, ColumnReader], placer: Any) -> Any:
    return {
        name: value if readers[name].is_plain else placer.place_column(name, value)
        for name, value in columns.items()
    }


def _read_here(reader: _BatchReader, count: int, placer: Any) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield _place(reader.read(number), reader.readers, placer)


def _read_ahead(
    reader: _BatchReader, count: int, placer: Any, loader_count: int
) -> Iterator[dict[str, Any]]:
    # What a batch is made of is only known once it has been read, so it takes the way of
    # additional results.
    group = DataGroup(1, range(count), loader_arrays={"number": ((), np.int64, np.int32)})
    loader: Dataloader[int] = Dataloader(
        reader, group, loader_count=loader_count, depth=2 * loader_count, end_at=("epoch", 1)
    )
    with loader:
        for batch in loader:
            (columns,) = batch.additional["columns"]
            del batch
            yield _place(columns, reader.readers, placer)
        if loader.interrupted:
            raise KeyboardInterrupt


def _stream(
    dataset: datasets.IterableDataset,
    batch_size: int,
    columns: Iterable[str] | None,
    placer: Any,
    remainder: str,
    nulls: Mapping[str, Any] | None,
    is_wide: bool,
) -> Iterator[dict[str, Any]]:
    first = 0
    for table, features in streamed_tables(dataset, batch_size):
        if table.num_rows < batch_size and remainder == "drop":
            return
        names = check_columns(columns, table.column_names)
        readers = readers_of(table, features, conversions_of(names, nulls, wide=is_wide))
        rows = range(table.num_rows)
        read = {name: reader.read(rows, first) for name, reader in readers.items()}
        yield _place(read, readers, placer)
        first += table.num_rows


def _is_decoded(feature: Any) -> bool:
    """Whether decoding is the larger part of reading such a column."""
    if isinstance(feature, Mapping):
        return any(map(_is_decoded, feature.values()))
    if isinstance(feature, (list, tuple)):
        return any(map(_is_decoded, feature))
    if hasattr(feature, "feature"):
        return _is_decoded(feature.feature)
    return type(feature).__name__ in ("Image", "Audio") and bool(feature.decode)
