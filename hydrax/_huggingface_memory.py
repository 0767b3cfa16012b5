"""Arrow arrays in many chunks, read as NumPy arrays by row, straight from their memory.

A column of fixed-size rows is read with a few operations on whole arrays, however many chunks it
has and in whatever order the rows are wanted: the addresses of the rows are worked out with NumPy,
and then copied from. What has no fixed size is said to be :class:`IrregularError`, and left to
:mod:`hydrax._huggingface_values`. Imports no JAX.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["Column", "IrregularError", "Rows", "buffer_addresses", "numpy_dtype", "storage_type"]

Ints = npt.NDArray[np.int64]

_MEMMOVE_NBYTES = 4096
"""From this size on, a call a row costs less than copying the rows twice."""


class IrregularError(Exception):
    """The rows are not of one shape, or some are null."""


class Rows(NamedTuple):
    """Rows of a chunked column.

    Attributes:
        chunk: For each stretch of rows the chunk that it lies in.
        start: The stretch's first row in that chunk.
        length: Rows in each stretch: 1, unless there is but one stretch.
    """

    chunk: Ints
    start: Ints
    length: int

    @property
    def total(self) -> int:
        """Rows in all."""
        return len(self.chunk) * self.length


def numpy_dtype(kind: pa.DataType) -> np.dtype[Any] | None:
    """NumPy dtype of a type of numbers or bools, else None."""
    if pa.types.is_boolean(kind):
        return np.dtype(np.bool_)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    return None


def storage_type(kind: pa.DataType) -> pa.DataType:
    """The type that an extension type is stored as; others as they are."""
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


class Column:
    """A chunked column of numbers or bools, or of lists of them to any depth.

    Args:
        chunks: Arrays of one type; at least one.

    Raises:
        IrregularError: The type is another one.
    """

    def __init__(self, chunks: list[pa.Array]) -> None:
        chunks = [c.storage if isinstance(c, pa.ExtensionArray) else c for c in chunks]
        kind = chunks[0].type
        self._chunks = chunks  # keeps the memory
        has_nulls = any(chunk.null_count for chunk in chunks)
        self._validity = _addresses(chunks, 0) if has_nulls else None
        self._offset = np.array([chunk.offset for chunk in chunks], np.int64)
        self._fixed_size = 0
        self._child: Column | None = None
        dtype = numpy_dtype(kind)
        if dtype is not None:
            self.dtype: np.dtype[Any] = dtype
            self._address = _addresses(chunks, 1)
        elif pa.types.is_fixed_size_list(kind):
            self._fixed_size = kind.list_size
            self._child = Column([chunk.values for chunk in chunks])
            self.dtype = self._child.dtype
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            self._index_dtype = np.dtype(np.int32 if pa.types.is_list(kind) else np.int64)
            self._address = _addresses(chunks, 1)
            self._child = Column([chunk.values for chunk in chunks])
            self.dtype = self._child.dtype
        else:
            raise IrregularError(f"{kind} has no NumPy dtype")

    def read(self, rows: Rows) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
        """Values of the rows, and which of them are valid, or None if all are.

        The values may be a view of the column's memory: read-only, and valid as long as the column.

        Raises:
            IrregularError: The rows are no array.
        """
        values, valid = self._read(rows.chunk, rows.start, rows.length)
        shape = (rows.total, *values.shape[2:])
        return values.reshape(shape), None if valid is None else valid.reshape(shape)

    def lengths(self, rows: Rows) -> tuple[Ints, Ints]:
        """Of rows that are lists: start in the chunk of elements, and length; 0 for null rows.

        Both have the shape ``(stretches, rows in a stretch)``.
        """
        if self._fixed_size:
            first = (self._offset[rows.chunk] + rows.start) * self._fixed_size
            starts = first[:, None] + np.arange(rows.length) * self._fixed_size
            lengths = np.full_like(starts, self._fixed_size)
        else:
            starts, lengths = self._bounds(rows.chunk, rows.start, rows.length)
        valid = self._valid(rows.chunk, rows.start, rows.length)
        return starts, lengths if valid is None else np.where(valid, lengths, 0)

    def valid(self, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Which rows are not null, of shape ``(rows,)``; None if all are."""
        valid = self._valid(rows.chunk, rows.start, rows.length)
        return None if valid is None else valid.reshape(-1)

    @property
    def child(self) -> Column:
        """The column of the elements of lists."""
        assert self._child is not None
        return self._child

    def _bounds(self, chunk: Ints, start: Ints, length: int) -> tuple[Ints, Ints]:
        size = self._index_dtype.itemsize
        first = self._address[chunk] + (self._offset[chunk] + start) * size
        bounds = _copy_of(first, (length + 1) * size).view(self._index_dtype)
        bounds = bounds.astype(np.int64, copy=False)
        return bounds[:, :-1], np.diff(bounds, axis=1)

    def _read(
        self, chunk: Ints, start: Ints, length: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
        """Arrays of shape ``(len(chunk), length, *shape of an element)``."""
        valid = self._valid(chunk, start, length)
        if self._child is None:
            return self._read_numbers(chunk, start, length), valid
        if valid is not None:
            raise IrregularError("a row is null")
        if self._fixed_size:
            size = self._fixed_size
            first = (self._offset[chunk] + start) * size
        else:
            starts, lengths = self._bounds(chunk, start, length)
            if lengths.size == 0:
                raise IrregularError("no rows")
            size = int(lengths[0, 0])
            if (lengths != size).any():
                raise IrregularError("rows of different lengths")
            first = starts[:, 0]
        if size == 0 and self._child._child is not None:
            raise IrregularError("the shape of no elements")
        values, valid = self._child._read(chunk, first, length * size)
        shape = (len(chunk), length, size, *values.shape[2:])
        return values.reshape(shape), None if valid is None else valid.reshape(shape)

    def _read_numbers(self, chunk: Ints, start: Ints, length: int) -> npt.NDArray[Any]:
        start = self._offset[chunk] + start
        if self.dtype == np.bool_:
            return _bits(self._address[chunk], start, length)
        size = self.dtype.itemsize
        address = self._address[chunk] + start * size
        return _copy_of(address, length * size).view(self.dtype)

    def _valid(self, chunk: Ints, start: Ints, length: int) -> npt.NDArray[np.bool_] | None:
        """Validity of shape ``(len(chunk), length)``; None if all are valid."""
        if self._validity is None or length == 0:
            return None
        address = self._validity[chunk]
        valid = np.ones((len(chunk), length), np.bool_)
        marked = np.flatnonzero(address)
        if len(marked) == 0:
            return None
        position = self._offset[chunk] + start
        valid[marked] = _bits(address[marked], position[marked], length)
        return None if valid.all() else valid


def buffer_addresses(arrays: list[pa.Array]) -> list[int]:
    """Where the buffers of arrays, and of the arrays in them, begin."""
    buffers = [buffer for array in arrays for buffer in array.buffers()]
    return [buffer.address for buffer in buffers if buffer is not None and buffer.size > 0]


def _addresses(chunks: list[pa.Array], number: int) -> Ints:
    """Where a buffer of each chunk begins; 0 for one that is not there."""
    buffers = [chunk.buffers()[number] for chunk in chunks]
    return np.array([0 if b is None else b.address for b in buffers], np.int64)


def _copy_of(address: Ints, nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes at each of the addresses, of shape ``(len(address), nbytes)``.

    A single stretch is no copy, but a read-only view. Who calls keeps the memory.
    """
    count = len(address)
    if count == 0 or nbytes == 0:
        return np.empty((count, nbytes), np.uint8)
    if count == 1:
        memory = pa.foreign_buffer(int(address[0]), nbytes)
        return np.frombuffer(memory, np.uint8).reshape(1, nbytes)
    if nbytes >= _MEMMOVE_NBYTES:
        copied = np.empty((count, nbytes), np.uint8)
        for row, start in zip(copied, address.tolist(), strict=True):
            row[:] = np.frombuffer(pa.foreign_buffer(start, nbytes), np.uint8)
        return copied
    # All memory from the first address to the last one is seen as one array with an element at
    # each byte; only the elements at the addresses are ever looked at.
    lowest = int(address.min())
    span = int(address.max()) - lowest + 1
    memory = pa.foreign_buffer(lowest, span - 1 + nbytes)
    element = np.dtype((np.void, nbytes))
    everything: npt.NDArray[Any] = np.ndarray((span,), element, memory, strides=(1,))
    return everything[address - lowest].view(np.uint8).reshape(count, nbytes)


def _bits(address: Ints, position: Ints, length: int) -> npt.NDArray[np.bool_]:
    """Bits from the positions on, of shape ``(len(address), length)``."""
    if length == 0 or len(address) == 0:
        return np.empty((len(address), length), np.bool_)
    shift = position & 7
    nbytes = (int(shift.max()) + length + 7) >> 3
    # The last byte that is read for a short shift could be one too far.
    if len(address) > 1 and nbytes > 1:
        index = position[:, None] + np.arange(length)
        flat = (address[:, None] + (index >> 3)).reshape(-1)
        found = _copy_of(flat, 1).reshape(index.shape) >> (index & 7).astype(np.uint8)
        return (found & 1).view(np.bool_)
    packed = _copy_of(address + (position >> 3), nbytes)
    bits = np.unpackbits(packed, axis=1, bitorder="little").view(np.bool_)
    if len(address) == 1:
        return bits[:, int(shift[0]) : int(shift[0]) + length]
    return np.take_along_axis(bits, shift[:, None] + np.arange(length), axis=1)
