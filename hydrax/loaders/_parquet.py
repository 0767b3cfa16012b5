"""Rows of Parquet files."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ImportError("ParquetLoader needs pyarrow; install hydrax[parquet]") from error

from hydrax._arguments import check_int, check_path, check_several
from hydrax._item_errors import about_item
from hydrax.loaders._arrays import gather
from hydrax.loaders._base import ReadyLoader, check_rows

__all__ = ["ParquetLoader"]


class ParquetLoader(ReadyLoader):
    """Rows of one or several Parquet files: numbers as arrays, text beside them.

    Columns of integers, floats and booleans, and lists of those with a fixed size, become arrays.
    Columns of strings and binary become ``batch.additional``. Others are refused by name: leave
    them out with ``columns``.

    A file is read by whole row groups, in the loader processes, each of which keeps the row groups
    that it used last. Rows in random order are quick to load if that holds all of them; otherwise
    write small row groups, and shuffle batches rather than items (``shuffle_later="batchwise"``).

    Args:
        paths: Path of a file, or several; their rows are counted through.
        columns: Names of the columns to load; None is all.
        keep_nbytes: How much of decoded row groups each loader process keeps, at the most; the one
            in use is always kept.

    Raises:
        TypeError: A column is of a kind that cannot be loaded; names it.
        KeyError: There is no such column.
        ValueError: Something is no Parquet file, the files have no rows, or they differ in their
            columns (not in their order). While loading: a null, where there is to be a number;
            names column and file.

    Example:
        >>> import tempfile
        >>> from hydrax import Dataloader
        >>> with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        ...     pq.write_table(pa.table({"x": [1.0, 2.0], "name": ["a", "b"]}), file.name)
        ...     loader = ParquetLoader(file.name)
        ...     with Dataloader(loader, loader.group(2)) as dataloader:
        ...         batch = next(dataloader).copy()
        >>> batch.arrays["x"].tolist(), batch.additional["name"]
        ([1.0, 2.0], ['a', 'b'])
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        keep_nbytes: int = 2**28,
    ) -> None:
        if isinstance(columns, str):
            raise TypeError(f"columns is {columns!r}; expected a list of names")
        if isinstance(paths, (str, os.PathLike)):
            paths = [paths]
        check_several("paths", paths, "the path of a file, or several")
        self._paths = [os.path.abspath(check_path("one of paths", path)) for path in paths]
        self._keep_nbytes = check_int("keep_nbytes", keep_nbytes, minimum=0)
        if not self._paths:
            raise ValueError("there are no paths")
        schema: Any = None
        counts: list[int] = []
        # Row group by row group: which file, and which of that file's.
        self._row_groups: list[tuple[int, int]] = []
        for number, path in enumerate(self._paths):
            with _opened(path) as file:
                found = file.schema_arrow
                if schema is None:
                    schema = _chosen(found, columns, path)
                elif columns is None and set(found.names) != set(schema.names):
                    raise ValueError(
                        f"{path} has the columns {found.names}, and {self._paths[0]} has "
                        f"{schema.names}; choose with columns=[...]"
                    )
                for field in _chosen(found, schema.names, path):
                    expected = schema.field(field.name).type
                    if field.type != expected and not (_is_text(field.type) and _is_text(expected)):
                        raise ValueError(
                            f"column {field.name!r} is {field.type} in {path}, and {expected} in "
                            f"{self._paths[0]}"
                        )
                for row_group in range(file.num_row_groups):
                    self._row_groups.append((number, row_group))
                    counts.append(file.metadata.row_group(row_group).num_rows)
        self._ends = np.cumsum(counts, dtype=np.int64)
        if sum(counts) == 0:
            raise ValueError("the files have no rows")
        self._columns = schema.names
        self._additional = [field.name for field in schema if _is_text(field.type)]
        self.loader_arrays = {
            field.name: _spec(field) for field in schema if not _is_text(field.type)
        }
        if not self.loader_arrays:
            raise ValueError(f"none of the columns {self._columns} can be an array")
        self._forget()

    def _forget(self) -> None:
        """Open files and decoded row groups belong to one process."""
        self._pid = os.getpid()
        self._files: dict[int, Any] = {}
        self._decoded: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._decoded_nbytes = 0

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_pid", "_files", "_decoded", "_decoded_nbytes"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __call__(self, rows: Any, arrays: Any, seeds: Any) -> dict[str, list[Any]] | None:
        """Load rows; see :class:`~hydrax.Dataloader`."""
        if self._pid != os.getpid():
            self._forget()
        rows = np.asarray(rows)
        check_rows(rows, len(self))
        row_groups = np.searchsorted(self._ends, rows, side="right")
        additional: dict[str, list[Any]] = {name: [None] * len(rows) for name in self._additional}
        for row_group in np.unique(row_groups).tolist():
            places = np.flatnonzero(row_groups == row_group)
            start = int(self._ends[row_group - 1]) if row_group else 0
            own_rows = rows[places] - start
            try:
                columns = self._row_group(row_group)
            except Exception as error:
                raise about_item(error, int(places[0]))  # noqa: B904  # it is the same one
            for name, target in arrays.items():
                if len(places) == len(rows):
                    gather(columns[name], own_rows, target)
                else:
                    target[places] = columns[name][own_rows]
            for name, values in additional.items():
                chosen = columns[name].take(pa.array(own_rows)).to_pylist()
                for place, value in zip(places.tolist(), chosen, strict=True):
                    values[place] = value
        return additional or None

    def _row_group(self, row_group: int) -> dict[str, Any]:
        """The decoded columns of a row group."""
        columns = self._decoded.get(row_group)
        if columns is not None:
            self._decoded.move_to_end(row_group)
            return columns
        number, own_number = self._row_groups[row_group]
        file = self._files.get(number)
        where = f"in row group {own_number} of {self._paths[number]}"
        if file is None:
            file = self._files[number] = _opened(self._paths[number], memory_map=True)
        try:
            # The threads of pyarrow would compete with the other loader processes.
            table = file.read_row_group(own_number, columns=self._columns, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise OSError(f"{where}: {error}") from error
        columns = {
            name: table[name].combine_chunks()
            if name in self._additional
            else _as_array(table[name], f"{name!r} {where}")
            for name in self._columns
        }
        self._decoded[row_group] = columns
        self._decoded_nbytes += _nbytes(columns)
        while self._decoded_nbytes > self._keep_nbytes and len(self._decoded) > 1:
            _, oldest = self._decoded.popitem(last=False)
            self._decoded_nbytes -= _nbytes(oldest)
        return columns


def _opened(path: str, **options: Any) -> Any:
    """A Parquet file, or an error that names it."""
    try:
        return pq.ParquetFile(path, **options)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error


def _chosen(schema: Any, columns: Sequence[str] | None, path: str) -> Any:
    """The schema of the columns that are to be loaded, without metadata."""
    names = schema.names if columns is None else list(dict.fromkeys(columns))
    for name in names:
        if name not in schema.names:
            raise KeyError(f"{path} has no column {name!r}; there are {schema.names}")
        if schema.names.count(name) > 1:
            raise ValueError(f"{path} has several columns {name!r}; choose others")
    return pa.schema([(name, schema.field(name).type) for name in names])


def _is_text(kind: Any) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _is_number(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _spec(field: Any) -> tuple[Any, Any, Any]:
    kind = field.type
    shape: tuple[int, ...] = ()
    if pa.types.is_fixed_size_list(kind):
        kind, shape = kind.value_type, (kind.list_size,)
    if not _is_number(kind):
        raise TypeError(
            f"column {field.name!r} is {field.type}, which cannot be an array of one shape; leave "
            "it out with columns=[...], or write a loader function for it"
        )
    dtype = np.dtype(kind.to_pandas_dtype())
    return shape, dtype, dtype


def _as_array(column: Any, where: str) -> npt.NDArray[Any]:
    values = column.combine_chunks()
    size = None
    has_nulls = values.null_count > 0
    if pa.types.is_fixed_size_list(values.type):
        size = values.type.list_size
        values = values.flatten()
        has_nulls = has_nulls or values.null_count > 0
    if has_nulls:
        raise ValueError(f"column {where} has nulls; fill them, or write a loader function")
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array if size is None else array.reshape(-1, size)


def _nbytes(columns: dict[str, Any]) -> int:
    return sum(int(column.nbytes) for column in columns.values())
