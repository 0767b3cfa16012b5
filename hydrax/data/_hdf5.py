"""Rows of HDF5 data sets: found, checked and read. No JAX: loader processes use it.

A process reads with its own handles: those that were opened before a fork would share the place
in the file, and the library's state with it. What is read when is the business of the data loader.
"""

from __future__ import annotations

import copy
import errno
import itertools
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import h5py
import numpy as np
from numpy.typing import NDArray

__all__ = ["DataSetSpec", "RowReader", "find_data_sets"]

Array: TypeAlias = NDArray[Any]
NameTree: TypeAlias = "str | dict[str, NameTree]"

# Up to such a gap between two rows it costs less to read on than to read twice.
_JOINED_GAP_NBYTES = 16_384
_READ_NBYTES = 2**23  # what is read at once, so that little memory is needed besides the arrays
# What HDF5 keeps of decompressed chunks, per data set; its own default is the lower limit.
_CHUNK_CACHE_NBYTES = 2**20, 2**25


class DataSetSpec(NamedTuple):
    """A data set of observations.

    Attributes:
        name: Its path in the file.
        shape: Of one observation.
        dtype: As it is read, in the byte order of this machine.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def find_data_sets(path: str, subdir: str) -> NameTree:
    """Names of all data sets below a group, or of the one that ``subdir`` is.

    Returns:
        Nested dictionaries like the groups, in the sorted order of the names on each level; the
        leaves are the paths of the data sets.

    Raises:
        FileNotFoundError: There is no such file.
        KeyError: There is no such group or data set in it, or a link leads nowhere.
        ValueError: There is no data set below the group, or links lead from a group to itself.
    """

    def names_below(node: Any, name: str, above: Sequence[Any]) -> NameTree:
        if isinstance(node, h5py.Dataset):
            return name
        if node in above:
            raise ValueError(f"a link leads from {name!r} of {path} back to {node.name!r}")
        below: dict[str, NameTree] = {}
        for key in sorted(node.keys()):
            try:
                child = node[key]
            except KeyError:
                raise KeyError(f"the link {name}/{key} of {path} leads nowhere") from None
            if isinstance(child, h5py.Dataset | h5py.Group) and (
                names := names_below(child, f"{name}/{key}", [*above, node])
            ):
                below[key] = names
        return below

    root = "/" + subdir.strip("/")
    with _open(path) as file:
        if root not in file:
            raise KeyError(
                f"{path} has no {root!r}; at its top there are {sorted(file.keys())}; "
                "subdir names the group that is read, '/' all"
            )
        names = names_below(file[root], root.rstrip("/"), [])
    if not names:
        raise ValueError(f"{path} has no data set below {root!r}")
    return names


class RowReader:
    """Rows of several data sets that have the same number of rows.

    Only descriptions are read here, so that it costs the same for files of any size. Between
    :meth:`open` and :meth:`close` the calling process keeps the file open; :meth:`read` in another
    process or at another time opens it for this one call.

    Args:
        path: The file.
        names: Paths of the data sets in it.

    Raises:
        KeyError: There is no such data set.
        TypeError: A data set holds no numbers.
        ValueError: A data set has no rows, or the numbers of rows differ.
    """

    def __init__(self, path: str, names: Sequence[str]) -> None:
        self.path = path
        self._file: _OpenFile | None = None
        self.specs: list[DataSetSpec] = []
        rows: dict[str, int] = {}
        with _open(path) as file:
            for name in names:
                spec, rows[name] = _describe(path, file, name)
                self.specs.append(spec)
            least, most = _CHUNK_CACHE_NBYTES
            needed = max((_chunk_row_nbytes(file[name]) for name in names), default=0)
            self._chunk_cache_nbytes = min(max(least, needed), most)
        if len(set(rows.values())) != 1 or not min(rows.values()):
            text = ", ".join(f"{name} has {count}" for name, count in rows.items())
            raise ValueError(f"the data sets of {path} need the same number of rows, some: {text}")
        self.row_count = next(iter(rows.values()))

    def open(self) -> None:
        """Keep the file open in this process."""
        self.close()
        self._file = self._open_file()

    def close(self) -> None:
        """Close the file in this process, also where it was open before a fork."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def copy(self) -> RowReader:
        """A reader of the same rows that opens the file for itself."""
        other = copy.copy(self)
        other._file = None
        return other

    def read(self, rows: NDArray[np.int64], arrays: Sequence[Array]) -> None:
        """Read rows of all data sets, in the order of the file, each chunk of it once.

        Args:
            rows: Numbers of the rows, in any order, also repeatedly.
            arrays: For each data set where its rows are written to: shape
                ``(len(rows), *spec.shape)``, C-contiguous, ``spec.dtype``.

        Raises:
            FileNotFoundError: The file is not there any more.
            OSError: The file was replaced by another one, or cannot be read. All messages name
                the file and the rows.
        """
        if not len(rows):
            return
        order = np.argsort(rows, kind="stable")
        wanted = rows[order]
        text = f"row {wanted[0]}" if len(wanted) == 1 else f"rows {wanted[0]} to {wanted[-1]}"
        if self._file is not None and self._file.pid == os.getpid():
            self._file.read(wanted, order, arrays, text)
            return
        try:
            file = self._open_file()
        except FileNotFoundError:
            raise _gone(self.path, text) from None
        try:
            file.read(wanted, order, arrays, text)
        finally:
            file.close()

    def _open_file(self) -> _OpenFile:
        return _OpenFile(self.path, self.specs, self.row_count, self._chunk_cache_nbytes)


class _OpenFile:
    """The file as one process has it open."""

    def __init__(
        self, path: str, specs: Sequence[DataSetSpec], row_count: int, chunk_cache_nbytes: int
    ) -> None:
        self.pid = os.getpid()
        self._path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close_descriptor = weakref.finalize(self, os.close, descriptor)
        self._file: Any = None
        try:
            status = os.fstat(descriptor)
            self._identity = status.st_dev, status.st_ino
            self._file = _open(path, chunk_cache_nbytes)
            for spec in specs:
                if _describe(path, self._file, spec.name) != (spec, row_count):
                    raise OSError(f"{path} is not as it was: {spec.name} has changed")
            sets = [self._file[spec.name] for spec in specs]
            # A link can lead to another file, which the descriptor is not of.
            number = _file_number(self._file)
            self._sets = [
                _Rows(data_set, spec, descriptor if _file_number(data_set) == number else None)
                for data_set, spec in zip(sets, specs, strict=True)
            ]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._close_descriptor()

    def read(
        self, wanted: NDArray[np.int64], order: NDArray[np.intp], arrays: Sequence[Array], text: str
    ) -> None:
        # What is open stays readable when its name is gone, here, but not for those who open it
        # later: better all fail at once.
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            raise _gone(self._path, text) from None
        if (status.st_dev, status.st_ino) != self._identity:
            raise OSError(f"{self._path} was replaced by another file; {text} cannot be read")
        for rows, array in zip(self._sets, arrays, strict=True):
            rows.read(wanted, order, array)


class _Rows:
    """How the rows of one data set are read.

    Rows that lie in the file as they lie in memory are read from there: for single rows that takes
    a tenth of the time that the library needs.
    """

    def __init__(self, data_set: Any, spec: DataSetSpec, descriptor: int | None) -> None:
        self._data_set = data_set
        self._spec = spec
        self._descriptor = descriptor
        self._row_nbytes = max(1, int(np.prod(spec.shape)) * spec.dtype.itemsize)
        properties = data_set.id.get_create_plist()
        chunks = data_set.chunks
        is_plain = (
            descriptor is not None
            and properties.get_nfilters() == 0
            and properties.get_external_count() == 0
            and data_set.id.get_type() == h5py.h5t.py_create(spec.dtype, logical=True)
        )
        read_at_once = max(1, _READ_NBYTES // self._row_nbytes)
        self._joined_gap = max(1, _JOINED_GAP_NBYTES // self._row_nbytes)
        # Reads do not cross multiples of this many rows.
        self._band = chunks[0] if chunks else read_at_once
        self._offset: int | None = None
        self._chunk_offsets: Array | None = None
        if is_plain and properties.get_layout() == h5py.h5d.CONTIGUOUS:
            # What was never written has no place, which a user block makes look like one.
            if data_set.id.get_space_status() == h5py.h5d.SPACE_STATUS_ALLOCATED:
                self._offset = data_set.id.get_offset()
        elif is_plain and chunks and chunks[1:] == data_set.shape[1:]:
            self._chunk_offsets = np.full(-(-data_set.shape[0] // chunks[0]), -1, np.int64)
        elif properties.get_nfilters():
            self._joined_gap = self._band  # all of a chunk is decompressed anyway

    def read(self, wanted: NDArray[np.int64], order: NDArray[np.intp], array: Array) -> None:
        rows, places = wanted.tolist(), order.tolist()
        for first, last in self._runs(wanted):
            start, stop, place = rows[first], rows[last - 1] + 1, places[first]
            count = last - first
            try:
                if count == 1 or (
                    stop - start == count
                    and places[last - 1] - place == count - 1
                    and bool((np.diff(order[first:last]) == 1).all())
                ):
                    self._read_run(start, array[place : place + count])
                else:
                    run = np.empty((stop - start, *self._spec.shape), self._spec.dtype)
                    self._read_run(start, run)
                    array[order[first:last]] = run[wanted[first:last] - start]
            except Exception as error:
                raise OSError(
                    f"rows {start} to {stop - 1} of {self._spec.name} in "
                    f"{self._data_set.file.filename} cannot be read: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _runs(self, wanted: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Stretches of the sorted rows that are read at once."""
        band = wanted // self._band
        cuts = (np.diff(wanted) > self._joined_gap) | (band[1:] != band[:-1])
        bounds = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(wanted)]
        return itertools.pairwise(bounds)

    def _read_run(self, start: int, array: Array) -> None:
        offset = self._offset_of(start)
        if offset is None:
            array[...] = self._data_set[start : start + len(array)]
        elif array.nbytes:
            assert self._descriptor is not None
            _read_fully(self._descriptor, memoryview(array.reshape(-1).view(np.uint8)), offset)

    def _offset_of(self, row: int) -> int | None:
        """Where a row lies in the file as it lies in memory, or None."""
        if self._chunk_offsets is not None:
            chunk, within = divmod(row, self._band)
            offset = int(self._chunk_offsets[chunk])
            if offset < 0:
                corner = (row - within, *(0 for _ in self._spec.shape))
                found = self._data_set.id.get_chunk_info_by_coord(corner)
                if found.size == 0:  # never written: the library knows what is read from it
                    return None
                self._chunk_offsets[chunk] = offset = found.byte_offset
            return offset + within * self._row_nbytes
        return None if self._offset is None else self._offset + row * self._row_nbytes


def _open(path: str, chunk_cache_nbytes: int = _CHUNK_CACHE_NBYTES[0]) -> Any:
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return h5py.File(path, "r", rdcc_nbytes=chunk_cache_nbytes)


def _file_number(node: Any) -> Any:
    """What tells open files apart: that of the one that a group or data set lies in."""
    return h5py.h5o.get_info(node.id).fileno


def _describe(path: str, file: Any, name: str) -> tuple[DataSetSpec, int]:
    data_set = file.get(name)
    if not isinstance(data_set, h5py.Dataset):
        raise KeyError(f"{path} has no data set {name!r}")
    dtype: np.dtype[Any] = data_set.dtype
    if dtype.kind not in "biufc":
        raise TypeError(f"data set {name!r} of {path} has dtype {dtype}, expected numbers")
    if not data_set.shape:
        raise ValueError(f"data set {name!r} of {path} is a single value, expected rows")
    return DataSetSpec(name, data_set.shape[1:], dtype.newbyteorder("=")), data_set.shape[0]


def _chunk_row_nbytes(data_set: Any) -> int:
    """Bytes of the compressed chunks that hold one row; 0 where nothing is compressed."""
    if not data_set.id.get_create_plist().get_nfilters():
        return 0
    return int(data_set.chunks[0] * np.prod(data_set.shape[1:]) * data_set.dtype.itemsize)


def _gone(path: str, text: str) -> FileNotFoundError:
    reason = f"{os.strerror(errno.ENOENT)}; {text} cannot be read"
    return FileNotFoundError(errno.ENOENT, reason, path)


def _read_fully(descriptor: int, memory: memoryview, offset: int) -> None:
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        if count == 0:
            raise OSError(f"the file ends before byte {offset}")
        memory = memory[count:]
        offset += count
