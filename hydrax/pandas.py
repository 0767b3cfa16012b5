"""Rows of a pandas DataFrame as the data of a :class:`hydrax.DataGroup`.

:class:`RowData` needs pandas (``pip install 'hydrax[pandas]'``). What it does beyond ``iloc`` is to
keep columns of Python objects in a form that loader processes can read without copying it.
"""

from __future__ import annotations

import logging
import operator
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
import pandas as pd

__all__ = ["RowData"]

_logger = logging.getLogger(__name__)

# Since pandas 3 a row that is changed gets its own memory first.
_COPY_ON_WRITE: Final = int(pd.__version__.split(".")[0]) >= 3


class RowData(Sequence["pd.Series[Any]"]):
    """The rows of a DataFrame, by position, whatever its index.

    ``rows[i]`` equals ``dataframe.iloc[i]``: same values, dtype, index and name. It is a new Series
    that may be changed. A slice gives a RowData that shares the data.

    Reading an object of Python writes its reference count, so a forked loader process that reads a
    column of strings ends up with its own copy of the column's memory. Therefore each column of
    strings or other objects, as well as such an index or such categories, is packed once, when the
    RowData is made: strings as UTF-8, bytes as they are, other objects pickled, all in one block of
    bytes that reading does not change. Numeric, datetime and Arrow columns are used as they are;
    a frame with nothing to pack is read by ``iloc`` itself. Hence:

    - The DataFrame must not be changed afterwards. Packed cells would keep their old values, and
      those that are pickled come out as new objects each time they are read.
    - Packing takes about 0.1 µs for a string, more for other objects, and memory for the block,
      for strings usually half of what the column takes. If nothing else refers to the DataFrame,
      as in ``RowData(pd.read_parquet(path))``, its object columns are given free in turn.
    - A column is left as it is where packing would gain nothing (cells of more than 32 KiB on
      average) or cannot work (a cell that cannot be pickled; the log says so).

    Args:
        dataframe: The frame; any index, also with duplicate labels.

    Raises:
        TypeError: ``dataframe`` is not a DataFrame.

    Example:
        >>> frame = pd.DataFrame({"name": ["a", "b", "c"], "size": [1, 2, 3]}, index=[7, 7, 9])
        >>> frame = frame.astype({"name": object})
        >>> rows = RowData(frame)
        >>> rows[1].to_dict()
        {'name': 'b', 'size': 2}
        >>> rows[-1]["name"], len(rows[:2])
        ('c', 2)
        >>> rows
        RowData(3 rows x 2 columns, packed: name)
    """

    __slots__ = ("_dataframe", "_rows", "_table")

    def __init__(self, dataframe: pd.DataFrame) -> None:
        if not isinstance(dataframe, pd.DataFrame):
            raise TypeError(f"dataframe must be a pandas.DataFrame, not {_type_name(dataframe)}")
        self._table = _Table(dataframe)
        self._rows = range(len(dataframe))
        self._dataframe: pd.DataFrame | None = None

    @property
    def dataframe(self) -> pd.DataFrame:
        """The frame of these rows.

        The one that was given, as long as somebody else refers to it; else, and for slices, an
        equal one, which is made at the first use and takes the memory that packing had saved.
        """
        if self._dataframe is None:
            frame, rows = self._table.dataframe(), self._rows
            if rows == range(len(frame)):
                if frame is self._table.original():
                    return frame
            else:
                stop = None if rows.stop < 0 else rows.stop
                frame = frame.iloc[rows.start : stop : rows.step] if rows else frame.iloc[:0]
            self._dataframe = frame
        return self._dataframe

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, key: SupportsIndex) -> pd.Series[Any]: ...

    @overload
    def __getitem__(self, key: slice) -> RowData: ...

    def __getitem__(self, key: SupportsIndex | slice) -> pd.Series[Any] | RowData:
        """Return the row at a position, or a RowData of a slice.

        Raises:
            IndexError: There is no such position.
            TypeError: ``key`` is neither an integer nor a slice of integers.
        """
        if isinstance(key, slice):
            return _row_data(self._table, self._rows[key])
        try:
            position = operator.index(key)
        except TypeError:
            raise TypeError(
                f"rows are taken by position, an integer or a slice, not {_type_name(key)}; "
                "for labels and columns use rows.dataframe"
            ) from None
        try:
            row = self._rows[position]
        except IndexError:
            raise IndexError(
                f"row {position} is out of range for RowData of {len(self._rows)} rows"
            ) from None
        return self._table.row(row)

    def __reduce__(self) -> tuple[Any, ...]:
        return _row_data, (self._table, self._rows)

    def __repr__(self) -> str:
        packed = ", ".join(self._table.packed_names)
        shape = f"{len(self._rows)} rows x {len(self._table.columns)} columns"
        return f"RowData({shape}, packed: {packed})" if packed else f"RowData({shape})"


def _row_data(table: _Table, rows: range) -> RowData:
    """Make a RowData of a table that exists already."""
    data = RowData.__new__(RowData)
    data._table, data._rows, data._dataframe = table, rows, None
    return data


def _type_name(value: object) -> str:
    return type(value).__name__


class _Table:
    """A frame whose cells can be read without touching a Python object for each of them.

    Shared by a RowData and its slices. If no column needed packing, the rows are left to pandas
    (``values``). Else each column is a *source*: anything whose ``source[i]`` is the cell that
    ``iloc`` would put into a row, such as a NumPy array, an array or index of pandas,
    :class:`_Packed` or :class:`_Coded`.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self.row_count = len(frame)
        self.columns = frame.columns
        self.attrs = dict(frame.attrs)
        self.index = _index_source(frame.index)
        self.index_template = frame.index.take([])  # a slice would keep the labels alive
        self.row_dtype: Any = None
        self.dtypes = list(frame.dtypes)
        self.sources: list[Any] = []
        self.values: pd.DataFrame | None = None
        self.packed_names: list[str] = []
        self._frame_ref: Callable[[], pd.DataFrame | None] = weakref.ref(frame)

        if _packs(self.index):
            self.packed_names.append("index")
        if any(map(_may_pack, self.dtypes)) and len(frame):
            # What pandas makes of differing dtypes is its own affair: ask it. Beside Python
            # objects the dtype has room for everything, so it is the same for all rows.
            self.row_dtype = frame.iloc[0].dtype
            self.sources = [_column_source(frame.iloc[:, j]) for j in range(frame.shape[1])]
        names = [str(c) for c, s in zip(self.columns, self.sources, strict=False) if _packs(s)]
        if not names:
            self.sources = []
            self.values = frame
            if self.packed_names:  # the same memory without the labels
                self.values = frame.copy(deep=False)
                self.values.index = pd.RangeIndex(len(frame))
        self.packed_names += names

    def original(self) -> pd.DataFrame | None:
        """Return the frame this was made of, if it still exists."""
        return self._frame_ref()

    def dataframe(self) -> pd.DataFrame:
        """Return the original frame or an equal one."""
        frame = self.original()
        if frame is not None:
            return frame
        if not self.packed_names and self.values is not None:
            return self.values
        if self.values is not None:
            frame = self.values.copy(deep=False)
        else:
            columns = {
                j: pd.Series(_array_of(source, self.row_count, dtype), dtype=dtype, copy=False)
                for j, (source, dtype) in enumerate(zip(self.sources, self.dtypes, strict=True))
            }
            frame = pd.DataFrame(columns, copy=False)
            frame.columns = self.columns
            frame.attrs = dict(self.attrs)
        frame.index = _index_of(self.index, self.row_count, self.index_template)
        return frame

    def row(self, position: int) -> pd.Series[Any]:
        """Return row ``position``, which is in range."""
        row: pd.Series[Any]
        if self.values is not None:
            row = self.values.iloc[position]
            if not _COPY_ON_WRITE:
                row = row.copy()
            if self.packed_names:
                row.name = self.index[position]
            return row
        dtype = self.row_dtype
        values: Any
        if isinstance(dtype, pd.CategoricalDtype):
            codes = [source.codes[position] for source in self.sources]
            values = pd.Categorical.from_codes(codes, dtype=dtype)
        else:
            values = np.empty(len(self.sources), object)
            for j, source in enumerate(self.sources):  # NumPy would look into lists and arrays
                values[j] = source[position]
            if not isinstance(dtype, np.dtype):
                values = pd.array(values, dtype=dtype)
        # A given dtype keeps pandas from inferring one; as an instance it is taken quickly.
        row = pd.Series(
            values, index=self.columns, dtype=dtype, name=self.index[position], copy=False
        )
        if self.attrs:
            row.attrs = self.attrs
        return row

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_frame_ref"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._frame_ref = lambda: None


def _may_pack(dtype: Any) -> bool:
    """Whether a column of this dtype holds Python objects, itself or as its categories."""
    if isinstance(dtype, pd.CategoricalDtype):
        dtype = dtype.categories.dtype
    return _holds_objects(dtype)


def _column_source(column: pd.Series[Any]) -> Any:
    dtype = column.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        categorical: Any = column.array
        categories = _index_source(categorical.categories)
        return _Coded(categorical.codes, categories, np.nan)
    if _holds_objects(dtype):
        cells = column.to_numpy(dtype=object)
        packed = _packed(cells, f"column {column.name!r}")
        if packed is not None:
            return packed
        return cells if isinstance(dtype, np.dtype) else column.array
    if isinstance(dtype, np.dtype) and dtype.kind not in "mM":
        return column.to_numpy()
    return column.array  # gives Timestamp, Timedelta and pd.NA, as iloc does


def _index_source(index: pd.Index[Any]) -> Any:
    if isinstance(index, pd.MultiIndex):
        levels = [
            _Coded(np.asarray(codes), _index_source(level), np.nan)
            for codes, level in zip(index.codes, index.levels, strict=True)
        ]
        return _Labels(levels)
    if isinstance(index, pd.CategoricalIndex):
        return _Coded(index.codes, _index_source(index.categories), np.nan)
    if _holds_objects(index.dtype):
        packed = _packed(index.to_numpy(dtype=object), f"index {index.name!r}")
        return index if packed is None else packed
    return index


def _holds_objects(dtype: Any) -> bool:
    if isinstance(dtype, np.dtype):
        return dtype.kind == "O"
    return isinstance(dtype, pd.StringDtype) and dtype.storage == "python"


def _packs(source: Any) -> bool:
    """Whether a source holds packed cells, itself or in its categories or levels."""
    if isinstance(source, _Labels):
        return any(map(_packs, source.levels))
    if isinstance(source, _Coded):
        return _packs(source.values)
    return isinstance(source, _Packed)


def _array_of(source: Any, count: int, dtype: Any) -> Any:
    """Return a whole column of a source, in its dtype."""
    if isinstance(source, _Coded):
        return pd.Categorical.from_codes(source.codes, dtype=dtype)
    if not isinstance(source, _Packed):
        return source
    cells = np.empty(count, object)
    for i in range(count):
        cells[i] = source[i]
    return cells if isinstance(dtype, np.dtype) else pd.array(cells, dtype=dtype)


def _index_of(source: Any, count: int, template: pd.Index[Any]) -> pd.Index[Any]:
    """Return a whole index of a source; ``template`` is an empty one with its names and dtype."""
    if isinstance(source, pd.Index):
        return source
    if isinstance(source, _Labels):
        levels: Any = template
        codes: list[Any] = [level.codes for level in source.levels]
        return pd.MultiIndex(levels=levels.levels, codes=codes, names=template.names)
    cells = _array_of(source, count, template.dtype)
    index: pd.Index[Any] = pd.Index(cells, dtype=template.dtype, name=template.name)
    return index


class _Coded:
    """Cells that are codes into values: a categorical column, or a level of a MultiIndex."""

    __slots__ = ("codes", "missing", "values")

    def __init__(self, codes: npt.NDArray[Any], values: Any, missing: Any) -> None:
        self.codes = codes
        self.values = values
        self.missing = missing

    def __getitem__(self, i: int) -> Any:
        code = self.codes[i]
        return self.missing if code < 0 else self.values[code]


class _Labels:
    """The tuples of a MultiIndex."""

    __slots__ = ("levels",)

    def __init__(self, levels: list[_Coded]) -> None:
        self.levels = levels

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return tuple([level[i] for level in self.levels])


# --- Packing -----------------------------------------------------------------------------------

_STR: Final = 0
_BYTES: Final = 1
_PICKLE: Final = 2
_FIRST_CONSTANT: Final = 3
_CONSTANTS: Final = (None, np.nan, pd.NA, pd.NaT, True, False)

_CHUNK_CELLS: Final = 65_536
_LARGE_CELL_NBYTES: Final = 32_768
"""From this mean size on, the one page copied for a cell's header weighs an eighth or less."""

_SHARED_CELL_NBYTES: Final = 64
"""From this size on, an object that several rows share is worth remembering."""


class _Packed:
    """Cells in one block of bytes, which no read of a cell changes.

    Args:
        data: The encoded cells.
        bounds: int64, where each cell begins and ends in ``data``: shape ``(count + 1,)`` if the
            cells lie side by side, else ``(2, count)``.
        kinds: uint8, how each cell is encoded; None if all are strings.
    """

    __slots__ = ("_bounds", "_data", "_ends", "_kinds", "_starts")

    def __init__(
        self,
        data: bytes,
        bounds: npt.NDArray[np.int64],
        kinds: npt.NDArray[np.uint8] | None,
    ) -> None:
        self._data = data
        self._bounds = bounds
        starts, ends = (bounds[:-1], bounds[1:]) if bounds.ndim == 1 else bounds
        # A memoryview gives plain integers, in a third of the time that an array gives its own.
        self._starts, self._ends = starts.data, ends.data
        self._kinds = None if kinds is None else kinds.tobytes()

    def __getitem__(self, i: int) -> Any:
        kind = _STR if self._kinds is None else self._kinds[i]
        if kind >= _FIRST_CONSTANT:
            return _CONSTANTS[kind - _FIRST_CONSTANT]
        content = self._data[self._starts[i] : self._ends[i]]
        if kind == _STR:
            return content.decode("utf-8", "surrogatepass")
        return content if kind == _BYTES else pickle.loads(content)

    def __reduce__(self) -> tuple[Any, ...]:
        kinds = None if self._kinds is None else np.frombuffer(self._kinds, np.uint8)
        return _Packed, (self._data, self._bounds, kinds)


def _packed(cells: npt.NDArray[Any], name: str) -> _Packed | None:
    """Pack the cells of an object array; None where they are better left as they are."""
    packer = _Packer()
    for start in range(0, len(cells), _CHUNK_CELLS):
        try:
            packer.add(cells[start : start + _CHUNK_CELLS].tolist())
        except Exception as error:  # a cell's own pickling may raise anything
            _logger.warning(
                "%s stays as Python objects, which each loader process copies as it reads them: "
                "%s: %s",
                name,
                _type_name(error),
                error,
            )
            return None
        if packer.nbytes > _LARGE_CELL_NBYTES * (start + _CHUNK_CELLS):
            return None
    if packer.nbytes > _LARGE_CELL_NBYTES * max(1, len(cells)):
        return None
    return packer.finish()


class _Packer:
    """Gathers encoded cells, a chunk at a time."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._blocks: list[bytes] = []
        self._starts: list[npt.NDArray[np.int64]] = []
        self._ends: list[npt.NDArray[np.int64]] = []
        self._kinds: list[npt.NDArray[np.uint8]] = []
        self._side_by_side = True
        # Where the pickle of an object lies, so that one that many rows share is kept once.
        self._known: dict[int, tuple[int, int]] = {}

    def add(self, cells: list[Any]) -> None:
        """Add cells, whose objects must live until :meth:`finish`."""
        if set(map(type, cells)) == {str}:
            self._add_strings(cells)
        else:
            self._add_mixed(cells)

    def _add_strings(self, cells: list[str]) -> None:
        joined = "".join(cells)
        if joined.isascii():
            block = joined.encode("ascii")
        else:
            cells = [cell.encode("utf-8", "surrogatepass") for cell in cells]  # type: ignore[misc]
            block = b"".join(cells)  # type: ignore[arg-type]
        ends = self.nbytes + np.cumsum(np.fromiter(map(len, cells), np.int64, len(cells)))
        starts = np.concatenate([[self.nbytes], ends[:-1]])
        self._append(block, starts, ends, np.full(len(cells), _STR, np.uint8))

    def _add_mixed(self, cells: list[Any]) -> None:
        constants = {id(constant): k for k, constant in enumerate(_CONSTANTS, _FIRST_CONSTANT)}
        blocks: list[bytes] = []
        starts, ends, kinds = [], [], bytearray()
        position = self.nbytes
        for cell in cells:
            content = b""
            constant = constants.get(id(cell))
            if constant is not None:
                kind = constant
            elif type(cell) is str:
                kind, content = _STR, cell.encode("utf-8", "surrogatepass")
            elif type(cell) is bytes:
                kind, content = _BYTES, cell
            else:
                kind = _PICKLE
                known = self._known.get(id(cell))
                if known is not None:
                    starts.append(known[0])
                    ends.append(known[1])
                    kinds.append(kind)
                    self._side_by_side = False
                    continue
                content = pickle.dumps(cell, pickle.HIGHEST_PROTOCOL)
                if len(content) >= _SHARED_CELL_NBYTES:
                    self._known[id(cell)] = (position, position + len(content))
            starts.append(position)
            position += len(content)
            ends.append(position)
            kinds.append(kind)
            blocks.append(content)
        self._append(
            b"".join(blocks),
            np.array(starts, np.int64),
            np.array(ends, np.int64),
            np.frombuffer(bytes(kinds), np.uint8),
        )

    def _append(
        self,
        block: bytes,
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        kinds: npt.NDArray[np.uint8],
    ) -> None:
        self._blocks.append(block)
        self._starts.append(starts)
        self._ends.append(ends)
        self._kinds.append(kinds)
        self.nbytes += len(block)

    def finish(self) -> _Packed:
        none = [np.empty(0, np.int64)]
        ends = np.concatenate(self._ends or none)
        if self._side_by_side:
            bounds = np.concatenate([np.zeros(1, np.int64), ends])
        else:
            bounds = np.stack([np.concatenate(self._starts), ends])
        kinds = np.concatenate(self._kinds or [np.empty(0, np.uint8)])
        return _Packed(b"".join(self._blocks), bounds, kinds if kinds.any() else None)
