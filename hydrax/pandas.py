"""Rows of a pandas DataFrame as the data of a :class:`hydrax.DataGroup`.

:class:`RowData` needs pandas (``pip install 'hydrax[pandas]'``). What it does beyond ``iloc`` is to
keep columns of Python objects in a form that loader processes can read without copying it.
"""
# How such cells are encoded is left to _packing.

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

try:
    import pandas as pd
except ImportError as error:
    raise ImportError("hydrax.pandas needs pandas; install hydrax[pandas]") from error

from hydrax._pandas_packing import Packed, Packer

__all__ = ["RowData"]

_logger = logging.getLogger(__name__)

# Since pandas 3 a row that is changed gets its own memory first.
_COPY_ON_WRITE: Final = int(pd.__version__.split(".")[0]) >= 3

_CHUNK_CELLS: Final = 65_536
_LARGE_CELL_NBYTES: Final = 32_768
"""From this mean size on, the one page copied for a cell's header weighs an eighth or less."""


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
    :class:`Packed` or :class:`_Coded`.
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
        return _Coded(categorical.codes, categories)
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
            _Coded(np.asarray(codes), _index_source(level))
            for codes, level in zip(index.codes, index.levels, strict=True)
        ]
        return _Labels(levels)
    if isinstance(index, pd.CategoricalIndex):
        return _Coded(index.codes, _index_source(index.categories))
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
    return isinstance(source, Packed)


def _array_of(source: Any, count: int, dtype: Any) -> Any:
    """Return a whole column of a source, in its dtype."""
    if isinstance(source, _Coded):
        return pd.Categorical.from_codes(source.codes, dtype=dtype)
    if not isinstance(source, Packed):
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

    __slots__ = ("codes", "values")

    def __init__(self, codes: npt.NDArray[Any], values: Any) -> None:
        self.codes = codes
        self.values = values

    def __getitem__(self, i: int) -> Any:
        code = self.codes[i]
        return np.nan if code < 0 else self.values[code]


class _Labels:
    """The tuples of a MultiIndex."""

    __slots__ = ("levels",)

    def __init__(self, levels: list[_Coded]) -> None:
        self.levels = levels

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return tuple([level[i] for level in self.levels])


def _packed(cells: npt.NDArray[Any], name: str) -> Packed | None:
    """Pack the cells of an object array; None where they are better left as they are."""
    packer = Packer()
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
