"""Columns of a Hugging Face data set as NumPy arrays and lists, as its JAX format arranges them.

What is one array, what is a list of arrays, and which dtype it has is decided here; what becomes a
``jax.Array`` is left to :mod:`hydrax._huggingface_placement`. Imports no JAX.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hydrax._arguments import check_number
from hydrax._huggingface_media import decoder_of
from hydrax._huggingface_memory import Column, Ints, IrregularError, Rows, numpy_dtype, storage_type
from hydrax.errors import ValueRangeError

__all__ = [
    "Chunks",
    "ColumnReader",
    "Conversion",
    "aligned_empty",
    "child_feature",
    "stored_values",
]

_ALIGNMENT = 64
"""XLA takes memory as it is only where it begins at a multiple of so many bytes."""


_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class UnfitValueError(Exception):
    """A value that the column's array cannot hold; the row is found by whoever catches it."""


@dataclass(frozen=True)
class Conversion:
    """How the numbers of a column are converted.

    Attributes:
        wide: Whether JAX has 64-bit types.
        fill: Stands in for nulls; None refuses them in integers and bools, and makes NaN of others.
    """

    wide: bool = False
    fill: Any = None

    def target(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype that numbers of a dtype are given."""
        if dtype.kind == "b":
            return dtype
        if dtype.kind in "iu":
            return np.dtype(np.int64 if self.wide else np.int32)
        return np.dtype(np.float64 if self.wide and dtype.itemsize == 8 else np.float32)

    def write(
        self,
        values: npt.NDArray[Any],
        valid: npt.NDArray[np.bool_] | None,
        out: npt.NDArray[Any],
    ) -> None:
        """Write numbers to an array of another dtype, with nulls filled.

        Raises:
            UnfitValueError: One does not fit, or is null.
        """
        if valid is not None:
            values = np.where(valid, values, self._filling(out.dtype, values.dtype))
        limits = _limits(values.dtype, out.dtype)
        if limits is not None and values.size:
            for value in (int(values.min()), int(values.max())):
                if not limits[0] <= value <= limits[1]:
                    raise UnfitValueError(f"{value} does not fit {out.dtype}")
        if out.dtype.itemsize < values.dtype.itemsize and out.dtype.kind == "f":
            with np.errstate(over="ignore"):
                np.copyto(out, values, casting="unsafe")
            infinite = np.isinf(out)
            if infinite.any() and (infinite != np.isinf(values)).any():
                value = values[infinite & ~np.isinf(values)][0]
                raise UnfitValueError(f"{value} does not fit {out.dtype}")
            return
        np.copyto(out, values, casting="unsafe")

    def scalar(self, value: Any) -> Any:
        """A number by itself, in a dict, checked."""
        if isinstance(value, float):
            if not self.wide and math.isfinite(value) and abs(value) > _LARGEST_FLOAT32:
                raise UnfitValueError(f"{value} does not fit float32")
        elif isinstance(value, int) and not isinstance(value, bool):
            info = np.iinfo(np.int64 if self.wide else np.int32)
            if not info.min <= value <= info.max:
                raise UnfitValueError(f"{value} does not fit {info.dtype}")
        return value

    def _filling(self, dtype: np.dtype[Any], source: np.dtype[Any]) -> Any:
        fill = self.fill
        if fill is None:
            if dtype.kind != "f":
                raise UnfitValueError(f"there is a null, which {dtype} cannot hold")
            return source.type(np.nan)
        return np.asarray(fill, source)


@functools.cache
def _limits(source: np.dtype[Any], target: np.dtype[Any]) -> tuple[int, int] | None:
    """The integers that the target can hold, if the source can hold others."""
    if target.kind not in "iu" or np.can_cast(source, target):
        return None
    info = np.iinfo(target)
    return int(info.min), int(info.max)


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Memory that XLA can take as it is."""
    memory = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return np.ndarray(shape, dtype, memory, start)


class Chunks:
    """The chunks of a column, and where a row of the whole column lies in them.

    Args:
        chunked: The column.
    """

    def __init__(self, chunked: pa.ChunkedArray) -> None:
        self.arrays = [chunk for chunk in chunked.chunks if len(chunk)]
        if not self.arrays:
            self.arrays = [pa.array([], chunked.type)]
        self._ends = np.cumsum([len(chunk) for chunk in self.arrays])
        self._starts = self._ends - [len(chunk) for chunk in self.arrays]

    def locate(self, rows: range | Ints) -> list[Rows]:
        """Where rows lie: in stretches for a range, else one by one."""
        if isinstance(rows, range):
            found = []
            first = rows.start
            while first < rows.stop:
                chunk = int(np.searchsorted(self._ends, first, "right"))
                stop = min(rows.stop, int(self._ends[chunk]))
                start = first - self._starts[chunk]
                found.append(Rows(np.array([chunk]), np.array([start]), stop - first))
                first = stop
            return found
        chunks = np.searchsorted(self._ends, rows, "right")
        return [Rows(chunks, rows - self._starts[chunks], 1)]

    def take(self, rows: range | Ints) -> pa.Array:
        """The rows as one Arrow array; without a copy if they lie side by side."""
        parts = [
            self.arrays[chunk].slice(start, where.length)
            for where in self.locate(rows)
            for chunk, start in zip(where.chunk.tolist(), where.start.tolist(), strict=True)
        ]
        return parts[0] if len(parts) == 1 else pa.concat_arrays(parts or [self.arrays[0][:0]])


class ColumnReader:
    """Reads rows of one column.

    Args:
        name: Of the column.
        chunked: The column.
        feature: What the data set says of it.
        conversion: How numbers are converted.

    Attributes:
        is_plain: Whether nothing of the column ever is an array.
    """

    def __init__(
        self, name: str, chunked: pa.ChunkedArray, feature: Any, conversion: Conversion
    ) -> None:
        self.name = name
        self._chunks = Chunks(chunked)
        self._feature = feature
        self._conversion = conversion
        decoder_of(feature, name)  # or it is refused here
        self.is_plain = _is_plain(storage_type(chunked.type))
        self._column: Column | None = None
        if not self.is_plain:
            with contextlib.suppress(IrregularError):
                self._column = Column(self._chunks.arrays)
        if conversion.fill is not None:
            if self._column is None:
                raise ValueError(
                    f"nulls has {name!r}, which is no column of numbers or lists of them"
                )
            check_number(f"nulls[{name!r}]", conversion.fill, self._column.dtype)

    def read(self, rows: range | Ints, first: int = 0) -> Any:
        """The rows as an array, or a list of one value for each.

        Args:
            rows: Rows of the table.
            first: Position of the first of them in the data set, for messages.

        Raises:
            ValueRangeError: A value does not fit; names the column and the row.
        """
        try:
            return self._read(rows)
        except UnfitValueError as error:
            text = str(error)
        for position, row in enumerate(rows):
            try:
                self._read(np.array([row]))
            except UnfitValueError as error:
                text = f"row {first + position}: {error}"
                break
        hint = "set jax_enable_x64"
        if "null" in text:
            hint = f"give nulls={{{self.name!r}: value}}"
        raise ValueRangeError(f"column {self.name!r}, {text}; {hint}, or leave the column out")

    def _read(self, rows: range | Ints) -> Any:
        if self._column is not None:
            try:
                return self._read_regular(self._column, rows)
            except IrregularError:
                pass
        return values_of(self._chunks.take(rows), self._feature, self._conversion)

    def _read_regular(self, column: Column, rows: range | Ints) -> npt.NDArray[Any]:
        found = [column.read(where) for where in self._chunks.locate(rows)]
        shape = found[0][0].shape[1:]
        if any(values.shape[1:] != shape for values, _ in found):
            raise IrregularError("stretches of different shapes")
        out = aligned_empty((len(rows), *shape), self._conversion.target(column.dtype))
        start = 0
        for values, valid in found:
            self._conversion.write(values, valid, out[start : start + len(values)])
            start += len(values)
        return out


def _is_plain(kind: pa.DataType) -> bool:
    kind = storage_type(kind)
    if pa.types.is_struct(kind):
        return False
    if hasattr(kind, "value_type"):
        return _is_plain(kind.value_type)
    return numpy_dtype(kind) is None


def values_of(array: pa.Array, feature: Any, conversion: Conversion) -> Any:
    """An array over the elements of an Arrow array, or a list of one value for each.

    A row of a list is an array if its elements are numbers, or are themselves arrays of one shape.
    """
    decode = decoder_of(feature, "")
    if decode is not None:
        decoded = [None if value is None else decode(value) for value in array.to_pylist()]
        return _joined(decoded)
    kind = array.type
    if _is_plain(kind):
        return array.to_pylist()
    if isinstance(array, pa.ExtensionArray):
        return _values_of_extension(array, feature, conversion)
    dtype = numpy_dtype(kind)
    if dtype is not None:
        return _numbers(array, dtype, conversion)
    if pa.types.is_struct(kind):
        return _dicts(array, feature, conversion)
    return _joined(_rows_of_lists(array, feature, conversion))


def stored_values(array: pa.Array) -> list[Any]:
    """The elements as Python objects, as they are stored."""
    values: list[Any] = (
        array.storage if isinstance(array, pa.ExtensionArray) else array
    ).to_pylist()
    return values


def child_feature(feature: Any, name: str | None = None) -> Any:
    """What the data set says of the elements of a list, or of a field of a dict."""
    if name is None:
        if isinstance(feature, (list, tuple)):
            return feature[0]
        return getattr(feature, "feature", None)
    if isinstance(feature, dict):
        return feature.get(name)
    # A Sequence of a dict is stored as a dict of sequences.
    inner = getattr(feature, "feature", None)
    return [inner[name]] if isinstance(inner, dict) and name in inner else None


def _numbers(array: pa.Array, dtype: np.dtype[Any], conversion: Conversion) -> npt.NDArray[Any]:
    values, valid = Column([array]).read(Rows(np.array([0]), np.array([0]), len(array)))
    out = aligned_empty(values.shape, conversion.target(dtype))
    conversion.write(values, valid, out)
    return out


def _joined(rows: list[Any]) -> Any:
    """One array, if all rows are arrays of one shape and dtype."""
    if not rows or not isinstance(rows[0], np.ndarray):
        return rows
    shape, dtype = rows[0].shape, rows[0].dtype
    for row in rows:
        if not isinstance(row, np.ndarray) or row.shape != shape or row.dtype != dtype:
            return rows
    return np.stack(rows, out=aligned_empty((len(rows), *shape), dtype))


def _rows_of_lists(array: pa.Array, feature: Any, conversion: Conversion) -> list[Any]:
    lists = array
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        bounds = (array.offset + np.arange(len(array) + 1)) * size
    else:
        bounds = lists.offsets.to_numpy()
    low, high = int(bounds[0]), int(bounds[-1])
    valid = lists.is_valid().to_numpy(zero_copy_only=False) if lists.null_count else None
    inner = lists.values.slice(low, high - low)
    if valid is not None and pa.types.is_fixed_size_list(array.type):
        # The elements of null rows are there, and are to be looked at no more than the rows are.
        kept = np.repeat(valid, array.type.list_size)
        inner = inner.filter(pa.array(kept))
        bounds = np.concatenate([[0], np.cumsum(valid * array.type.list_size)])
        low = 0
    elements = values_of(inner, child_feature(feature), conversion)
    is_number = numpy_dtype(storage_type(array.type.value_type)) is not None
    rows: list[Any] = []
    for row, start in enumerate(bounds[:-1].tolist()):
        stop = int(bounds[row + 1])
        if valid is not None and not valid[row]:
            rows.append(None)
        elif isinstance(elements, np.ndarray) and (is_number or stop > start):
            rows.append(elements[start - low : stop - low])
        else:
            rows.append(_joined(list(elements[start - low : stop - low])))
    return rows


def _values_of_extension(array: pa.Array, feature: Any, conversion: Conversion) -> Any:
    """Rows of an ArrayXD: arrays, also without elements; of a fixed shape, nulls in a null row."""
    kind = array.type
    shape = tuple(getattr(kind, "shape", ()))
    storage = array.storage
    leaf = storage.type
    while hasattr(leaf, "value_type"):
        leaf = leaf.value_type
    dtype = numpy_dtype(leaf)
    if dtype is None or not shape or not array.null_count or None in shape:
        rows = values_of(storage, None, conversion)
        if not isinstance(rows, list) or dtype is None or None in shape[1:]:
            return rows
        empty = np.empty((0, *shape[1:]), conversion.target(dtype))
        return _joined([empty if isinstance(row, list) and not row else row for row in rows])
    out = aligned_empty((len(array), *shape), conversion.target(dtype))
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    filled = np.zeros(out.shape, dtype)
    mask = np.zeros(out.shape, np.bool_)
    for row in np.flatnonzero(valid).tolist():
        values, elements_valid = Column([storage]).read(Rows(np.array([0]), np.array([row]), 1))
        filled[row] = values[0]
        mask[row] = True if elements_valid is None else elements_valid[0]
    conversion.write(filled, mask, out)
    return out


def _dicts(array: pa.Array, feature: Any, conversion: Conversion) -> list[Any]:
    fields = {}
    for field, values in zip(array.type, array.flatten(), strict=True):
        inner = child_feature(feature, field.name)
        if numpy_dtype(storage_type(field.type)) is not None:
            fields[field.name] = [conversion.scalar(value) for value in values.to_pylist()]
        else:
            fields[field.name] = values_of(values, inner, conversion)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [
        {name: values[row] for name, values in fields.items()} if is_valid else None
        for row, is_valid in enumerate(valid.tolist())
    ]
