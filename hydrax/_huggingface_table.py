"""The table behind a Hugging Face data set, read by position in the data set. Imports no JAX."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from hydrax._huggingface_memory import Column, Ints
from hydrax._huggingface_values import Chunks, ColumnReader, Conversion

__all__ = [
    "Positions",
    "check_columns",
    "check_features",
    "conversions_of",
    "readers_of",
    "streamed_tables",
]


def check_columns(columns: Iterable[str] | None, known: Sequence[str]) -> list[str]:
    """The wanted columns, or all.

    Raises:
        TypeError: ``columns`` is a string.
        ValueError: There is no such column, or none is wanted; lists those there are.
    """
    if columns is None:
        return list(known)
    if isinstance(columns, str):
        raise TypeError(f"columns is {columns!r}; expected a list of names")
    wanted = list(columns)
    for name in wanted:
        if name not in known:
            raise ValueError(f"columns has {name!r}; the data set has {', '.join(known)}")
    if not wanted:
        raise ValueError("columns is empty; name at least one")
    return wanted


def conversions_of(
    columns: Sequence[str], nulls: Mapping[str, Any] | None, *, wide: bool
) -> dict[str, Conversion]:
    """How each column's numbers are converted.

    Raises:
        ValueError: ``nulls`` names a column that there is not.
    """
    filling = dict(nulls or {})
    for name in filling:
        if name not in columns:
            raise ValueError(f"nulls has {name!r}; the columns are {', '.join(columns)}")
    return {name: Conversion(wide, filling.get(name)) for name in columns}


def readers_of(
    table: pa.Table, features: Mapping[str, Any], conversions: Mapping[str, Conversion]
) -> dict[str, ColumnReader]:
    """A reader for each column that a conversion is given for."""
    return {
        name: ColumnReader(name, table.column(name), features.get(name), conversion)
        for name, conversion in conversions.items()
    }


def check_features(
    features: datasets.Features, columns: Iterable[str] | None, nulls: Mapping[str, Any] | None
) -> None:
    """Refuse at once what reading a stream of these features would be refused for.

    Raises:
        TypeError: A feature cannot be brought to JAX.
        ValueError: There is no such column, or ``nulls`` does not fit.
    """
    names = check_columns(columns, list(features))
    empty = features.arrow_schema.empty_table()
    readers_of(empty, features, conversions_of(names, nulls, wide=False))


class Positions:
    """Where the rows of a data set lie in its table.

    Args:
        dataset: The data set; one that was shuffled, filtered or selected from has a list of
            positions in the table.

    Attributes:
        table: The table, in memory or mapped from files.
    """

    def __init__(self, dataset: datasets.Dataset) -> None:
        self.table: pa.Table = dataset.data.table
        self._count = len(dataset)
        # There is no public way to the list; without it rows would be read one by one.
        listed = dataset._indices
        self._chunks = self._column = None
        if listed is not None:
            self._chunks = Chunks(listed.table.column(0))
            self._column = Column(self._chunks.arrays)
        elif self._count != self.table.num_rows:
            raise RuntimeError(
                f"the data set has {self._count} rows and its table {self.table.num_rows}; this "
                f"release of datasets ({datasets.__version__}) is not supported"
            )

    def __len__(self) -> int:
        return self._count

    def rows(self, wanted: range | Ints) -> range | Ints:
        """The rows of the table at positions in the data set: a range if they lie side by side."""
        if self._column is None or self._chunks is None:
            rows: Any = wanted
        else:
            parts = [self._column.read(where)[0] for where in self._chunks.locate(wanted)]
            rows = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
        if isinstance(rows, np.ndarray) and len(rows):
            first, last = int(rows[0]), int(rows[-1])
            if last - first == len(rows) - 1 and (np.diff(rows) == 1).all():
                return range(first, last + 1)
        return rows  # type: ignore[no-any-return]


def streamed_tables(
    dataset: datasets.IterableDataset, batch_size: int
) -> Iterator[tuple[pa.Table, Mapping[str, Any]]]:
    """Batches of a streamed data set as tables, with what is known of their columns.

    Where the data set itself does not know its columns' types, they are found in each batch.
    """
    features = dataset.features
    if features is None:
        for batch in dataset.with_format(None).iter(batch_size):
            made = datasets.Dataset.from_dict(batch)
            yield made.data.table, made.features
        return
    schema = features.arrow_schema
    # Only asked of streams that come as tables: others would be made to tables part by part, whose
    # types can differ.
    if getattr(getattr(dataset, "_ex_iterable", None), "iter_arrow", None) is not None:
        for table in dataset.with_format("arrow").iter(batch_size):
            yield table.select(schema.names).cast(schema), features
        return
    if hasattr(dataset, "decode"):  # what need not be decoded by a function, to be encoded again
        dataset = dataset.decode(False)
    for batch in dataset.with_format(None).iter(batch_size):
        values = {name: _stored_losslessly(batch[name]) for name in schema.names}
        encoded = features.encode_batch(values)
        yield pa.Table.from_pydict(encoded, schema), features


def _stored_losslessly(value: Any) -> Any:
    """Values with decoded images stored so that no pixel changes; JPEG again would change them."""
    if isinstance(value, list):
        return [_stored_losslessly(element) for element in value]
    if isinstance(value, dict):
        return {key: _stored_losslessly(element) for key, element in value.items()}
    if hasattr(value, "tobitmap"):  # of images of Pillow only
        file = io.BytesIO()
        value.save(file, "TIFF")
        return {"bytes": file.getvalue(), "path": None}
    return value
