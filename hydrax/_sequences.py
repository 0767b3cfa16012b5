"""Sequences of other libraries as data: which will do, how runs of items are had, what is refused.

Loader processes read the data each for themselves. What is in memory or mapped from a file they
share as it is; a file that is opened before they start has one position for all of them, so it is
opened anew in each process, or refused. Imports none of these libraries, and no JAX.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import sqlite3
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import numpy as np

from hydrax import _context

__all__ = [
    "Chosen",
    "H5Rows",
    "ZarrRows",
    "as_sequence",
    "dumps",
    "items_of",
    "refuse_fork",
    "take",
    "take_array",
    "whole_of",
]

D = TypeVar("D")

_CONTAINER_LOOK = 32
"""So many elements of a container are looked at for open files."""
_DEPTH = 4
_THREADED = frozenset(("array_record", "tensorflow_datasets"))
"""Libraries whose sources start threads in native code, and are pickled as what they read."""


def as_sequence(data: Any) -> Sequence[Any]:
    """The data as something with a length and items by position.

    Raises:
        TypeError: It is nothing of the kind, or holds an open file; says which.
    """
    if isinstance(data, Chosen):
        return Chosen(as_sequence(data.data), data.indices)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(data, jax.Array):
        data = np.asarray(data)  # loader processes cannot use JAX
    kind = type(data)
    library, name = kind.__module__.partition(".")[0], kind.__name__
    if library == "pandas" and name == "DataFrame":
        raise TypeError(
            "data is a pandas DataFrame, whose items are its columns; "
            "use hydrax.pandas.RowData(dataframe) for its rows"
        )
    if library == "h5py":
        if name != "Dataset":
            raise TypeError(f"data is an h5py.{name}; give one of the datasets in it")
        return H5Rows.of(data)
    if library == "zarr":
        if name != "Array":
            raise TypeError(f"data is a zarr.{name}; give one of the arrays in it")
        return ZarrRows(data)
    found = _open_file_in(data, "data", _DEPTH, set())
    if found is not None:
        raise TypeError(
            f"{found}, which all loader processes would share; let the data open it when an item "
            "is first asked for in a process, or give paths and open them in startup_func"
        )
    has_positions = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    if has_positions and not isinstance(data, Mapping):
        return data  # type: ignore[no-any-return]
    if isinstance(data, (set, frozenset)):
        warnings.warn(
            "data is a set, whose order can differ from run to run, and with it every batch; "
            "give a list, such as sorted(data)",
            stacklevel=3,
        )
    if isinstance(data, Iterable):
        return list(data)
    raise TypeError(f"data is {name}; expected a sequence or a finite iterable")


def refuse_fork(data: Any) -> None:
    """Refuse what may crash in a process that is forked after it has been read from.

    Raises:
        ValueError: It is a source of array_record, as Grain and TFDS have them.
    """
    for base in type(whole_of(data)).__mro__:
        if base.__module__.partition(".")[0] in _THREADED:
            raise ValueError(
                f"data is {base.__module__}.{base.__name__}, which reads with threads of native "
                "code that do not survive a fork; use start_method='forkserver' or 'spawn'"
            )


def take(data: Any, indices: Sequence[int]) -> Sequence[Any]:
    """The items at some positions, in one call where the data offers it.

    That is ``__getitems__``, as data sets of PyTorch and others have it.
    """
    while isinstance(data, Chosen):
        data, indices = data.data, data.positions(np.asarray(indices, np.int64)).tolist()
    many: Any = getattr(data, "__getitems__", None)
    if many is None:
        return [data[index] for index in indices]
    taken: Sequence[Any] = many(list(indices))
    if len(taken) != len(indices):
        raise ValueError(
            f"{type(data).__name__} gave {len(taken)} items where {len(indices)} were asked for"
        )
    return taken


def take_array(data: Any, indices: np.ndarray[Any, Any]) -> Sequence[Any]:
    """Like :func:`take`, but an array where the data is a range or an array.

    Args:
        data: The data.
        indices: Positions, int64 of shape ``(count,)``; of a range they become the items.
    """
    while isinstance(data, Chosen):
        data, indices = data.data, data.positions(indices)
    if isinstance(data, np.ndarray):
        return cast(Sequence[Any], data[indices])
    if not isinstance(data, range):
        return take(data, indices.tolist())
    if data.step != 1:
        indices *= data.step
    if data.start != 0:
        indices += data.start
    return cast(Sequence[Any], indices)


def items_of(data: Sequence[Any], indices: Sequence[int]) -> Sequence[Any]:
    """Like :func:`take`, but items that are had one by one are had when they are asked for."""
    is_many = hasattr(whole_of(data), "__getitems__")
    return take(data, indices) if is_many else Chosen(data, indices)


def whole_of(data: Any) -> Any:
    """The sequence that chosen items are of; other data as it is."""
    while isinstance(data, Chosen):
        data = data.data
    return data


class Chosen(Sequence[D]):
    """Some of the items of a sequence, looked up when asked for.

    Args:
        data: The sequence.
        indices: Their positions in it: a list, a range or an array.
    """

    __slots__ = ("data", "indices")

    def __init__(
        self, data: Sequence[D], indices: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]
    ) -> None:
        self.data = data
        self.indices = indices

    def positions(self, wanted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Where some of the items are in the sequence, int64."""
        if isinstance(self.indices, range):
            return self.indices.start + self.indices.step * wanted
        positions: np.ndarray[Any, Any] = np.asarray(self.indices, np.int64)[wanted]
        return positions

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, position: int) -> D: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[D]: ...
    def __getitem__(self, position: int | slice) -> D | Sequence[D]:
        chosen = self.indices[position]
        if isinstance(position, slice):
            return Chosen(self.data, chosen)  # type: ignore[arg-type]
        return self.data[int(chosen)]  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[D]:
        return (self.data[int(index)] for index in self.indices)

    def __repr__(self) -> str:
        return f"<{len(self)} items of a {type(self.data).__name__}>"


def _open_file_in(value: Any, path: str, depth: int, seen: set[int]) -> str | None:
    """Which open file an object holds, as the beginning of a sentence; None if none is found."""
    if id(value) in seen:
        return None
    seen.add(id(value))
    kind = type(value)
    if isinstance(value, io.IOBase):
        return _describe_stream(value, path)
    if isinstance(value, sqlite3.Connection):
        return f"{path} is an open database"
    if kind.__module__.partition(".")[0] == "h5py":
        if kind.__name__ in ("File", "Group", "Dataset") and value:
            return f"{path} is of the open file {value.file.filename!r}"
        return None
    if depth == 0 or (kind.__module__ == "builtins" and not isinstance(value, _CONTAINERS)):
        return None
    if isinstance(value, (np.ndarray, logging.Handler, logging.Logger, types.ModuleType, type)):
        return None
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{path}[{key!r:.40}]", value[key]) for key in list(value)[:_CONTAINER_LOOK]]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{i}]", value[i]) for i in range(min(len(value), _CONTAINER_LOOK))]
    attributes = dict(getattr(value, "__dict__", {}))
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                attributes[name] = getattr(value, name)
            except (AttributeError, TypeError):  # not set; or of a type made by another language
                continue
    parts += [(f"{path}.{name}", part) for name, part in attributes.items()]
    for where, part in parts:
        found = _open_file_in(part, where, depth - 1, seen)
        if found is not None:
            return found
    return None


_CONTAINERS = (dict, list, tuple)


def _describe_stream(stream: io.IOBase, path: str) -> str | None:
    try:
        if stream.closed or stream in (sys.stdin, sys.stdout, sys.stderr) or stream.fileno() <= 2:
            return None
    except (OSError, ValueError, AttributeError):  # in memory
        return None
    return f"{path} is the open file {getattr(stream, 'name', stream)!r}"


class H5Rows(Sequence[Any]):
    """The rows of a dataset of h5py, read through a handle that each process opens for itself.

    Args:
        filename: Path of the file.
        name: Of the dataset in it.
        length: Its rows.
    """

    def __init__(self, filename: str, name: str, length: int) -> None:
        self._place = (filename, name, length)
        self._opened: tuple[int, Any] | None = None

    @classmethod
    def of(cls, dataset: Any) -> H5Rows:
        """The rows of an open dataset.

        Raises:
            TypeError: It is closed, has no rows, or is of a file that cannot be opened twice.
        """
        if not dataset:
            raise TypeError("data is a closed h5py.Dataset")
        file = dataset.file
        filename = os.fsdecode(file.filename)
        if dataset.shape is None or len(dataset.shape) == 0:
            raise TypeError(f"data is the h5py.Dataset {dataset.name!r}, which has no rows")
        if dataset.name is None or not os.path.isfile(filename):
            raise TypeError(
                f"data is an h5py.Dataset of {filename!r}, which is no file that loader processes "
                "could open; give a NumPy array instead"
            )
        if file.mode != "r":
            raise TypeError(
                f"data is an h5py.Dataset of {filename!r}, which is open for writing; close it and "
                "open it with mode 'r'"
            )
        return cls(os.path.abspath(filename), dataset.name, len(dataset))

    def _dataset(self) -> Any:
        """The dataset, through this process's own handle."""
        if self._opened is None or self._opened[0] != os.getpid():
            import h5py

            filename, name, length = self._place
            # Another driver than in the main process: in one that was forked from there the library
            # would else find the file open already, and read through what it has inherited.
            driver = "stdio" if _context.is_worker() else None
            dataset = h5py.File(filename, "r", driver=driver)[name]
            if len(dataset) != length:
                raise ValueError(f"{filename!r} has changed: {name!r} had {length} rows")
            self._opened = (os.getpid(), dataset)
        return self._opened[1]

    def __len__(self) -> int:
        return self._place[2]

    def __getitem__(self, index: Any) -> Any:
        return self._dataset()[index]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Rows as one array; each that lies beside another is read together with it."""
        dataset = self._dataset()
        wanted = np.asarray(indices, np.int64)
        sorted_rows, places = np.unique(wanted, return_inverse=True)
        breaks = np.flatnonzero(np.diff(sorted_rows) != 1) + 1
        runs = np.split(sorted_rows, breaks)
        parts = [dataset[int(run[0]) : int(run[-1]) + 1] for run in runs if len(run)]
        if not parts:
            return dataset[:0]  # type: ignore[no-any-return]
        taken: Any = np.concatenate(parts)[places]
        return taken  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return H5Rows, self._place

    def __repr__(self) -> str:
        filename, name, length = self._place
        return f"<{length} rows of {name!r} in {filename!r}>"


class ZarrRows(Sequence[Any]):
    """The rows of an array of Zarr, which opens files for each read and so can be shared.

    Args:
        array: The array, of at least one dimension.

    Raises:
        TypeError: It has no rows.
    """

    def __init__(self, array: Any) -> None:
        if not array.shape:
            raise TypeError("data is a zarr.Array of one value, which has no rows")
        self._array = array

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            index = range(len(self))[index]  # IndexError, so that iteration ends
        return self._array[index]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Rows as one array; a chunk that holds several is read once."""
        taken: Sequence[Any] = self._array.oindex[np.asarray(indices, np.int64)]
        return taken

    def __repr__(self) -> str:
        return f"<rows of {self._array!r}>"


class _Pickler(pickle.Pickler):
    """Pickles arrays that are mapped from files as where they are, not as what they hold."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.memmap and value.filename is not None and value.mode != "c":
            place = _place_in_file(value)
            if place is not None:
                return _map_again, (
                    os.fspath(value.filename),
                    place,
                    value.shape,
                    value.dtype,
                    value.strides,
                )
        return NotImplemented


def dumps(value: Any) -> bytes:
    """Pickle for another process of this machine."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def _place_in_file(array: np.memmap[Any, Any]) -> int | None:
    """Where in the file an array or a part of one begins; None if that cannot be known."""
    whole: Any = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    if not isinstance(whole, np.memmap) or any(stride < 0 for stride in array.strides):
        return None
    return int(whole.offset) + int(array.ctypes.data) - int(whole.ctypes.data)


def _map_again(
    filename: str,
    place: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    strides: tuple[int, ...],
) -> Any:
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    span = 0 if 0 in shape else last + dtype.itemsize
    if span == 0:
        return np.empty(shape, dtype)
    memory = np.memmap(filename, np.uint8, "r", place, (span,))
    return np.ndarray(shape, dtype, memory, 0, strides)
