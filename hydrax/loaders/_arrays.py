"""Rows of arrays in memory or in memory-mapped files."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from hydrax.loaders._base import ReadyLoader, Source, check_rows

__all__ = ["ArrayLoader"]


class ArrayLoader(ReadyLoader):
    """Rows of NumPy arrays or memory maps, which have their first dimension in common.

    Forked workers share the arrays with the training process; other workers open memory maps anew.
    Rows are gathered in runs, without a Python object per row.

    Args:
        arrays: Array name to array; as keyword arguments, too. Lists and jax.Arrays become NumPy
            arrays.

    Raises:
        TypeError: Something is no array, or has no rows.
        ValueError: There is no array, or their numbers of rows differ.

    Example:
        >>> from hydrax import Dataloader
        >>> loader = ArrayLoader(x=np.arange(12.0).reshape(6, 2), y=np.arange(6))
        >>> training, validation = loader.group(2, items=range(4)), loader.group(2, items=[4, 5])
        >>> with Dataloader(loader, training, validation=("epoch", 1, validation)) as dataloader:
        ...     for batch, _ in zip(dataloader, range(3)):
        ...         print(batch.is_validation, batch.arrays["y"].tolist())
        ...         del batch
        False [0, 1]
        False [2, 3]
        True [4, 5]
    """

    def __init__(
        self, arrays: Mapping[str, npt.ArrayLike] | None = None, /, **named: npt.ArrayLike
    ) -> None:
        if not isinstance(arrays, (Mapping, NoneType)):
            raise TypeError("arrays have names; give a dict, or ArrayLoader(x=..., y=...)")
        named = {**(arrays or {}), **named}
        if not named:
            raise ValueError("there are no arrays; give them by name, ArrayLoader(x=..., y=...)")
        self._sources = {name: Source(_as_array(name, array)) for name, array in named.items()}
        counts = {name: len(source.array) for name, source in self._sources.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"the arrays have different numbers of rows: {counts}")
        self._count = min(counts.values())
        self.loader_arrays = {}
        for name, source in self._sources.items():
            dtype = source.array.dtype.newbyteorder("=")
            self.loader_arrays[name] = (source.array.shape[1:], dtype, dtype)

    def __len__(self) -> int:
        return self._count

    def __call__(self, rows: Any, arrays: Any, seeds: Any) -> None:
        """Load rows; see :class:`~hydrax.Dataloader`."""
        rows = np.asarray(rows)
        check_rows(rows, self._count)
        for name, source in self._sources.items():
            gather(source.array, rows, arrays[name])


def gather(source: npt.NDArray[Any], rows: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Copy rows of source, which exist, into target."""
    if source.dtype == target.dtype and source.flags.c_contiguous:
        # "clip" writes straight to out; the default goes through a buffer.
        np.take(source, rows, axis=0, out=target, mode="clip")
    else:  # of a source that is not contiguous, take() would first copy all
        target[...] = source[rows]


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    is_plain = isinstance(value, (list, tuple)) or type(value).__module__.startswith("jax")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; give filled() ones")
    array = np.asarray(value) if is_plain else value
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is {type(value).__name__}; expected a NumPy array, a memory map or a jax.Array"
        )
    if array.ndim == 0:
        raise TypeError(f"{name} is a single number; expected an array with a row for each item")
    return array
