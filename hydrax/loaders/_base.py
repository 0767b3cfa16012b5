"""What the ready-made loaders have in common: their groups, and memory maps that can be sent."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hydrax._datagroup import DataGroup
from hydrax._specs import Ragged

__all__ = ["ReadyLoader", "Source", "check_rows"]


class ReadyLoader:
    """Base of the ready-made loaders: a loader function that knows its arrays and its items.

    Attributes:
        is_batched: Whether it loads a run of items in one call; the Dataloader asks for it.
        loader_arrays: The arrays that it fills, as a DataGroup takes them.
    """

    is_batched: ClassVar[bool] = True
    loader_arrays: dict[str, tuple[Any, Any, Any] | Ragged]

    def __len__(self) -> int:
        raise NotImplementedError

    def _data(self) -> Sequence[Any]:
        """The descriptors of all items."""
        return range(len(self))

    def group(
        self,
        batch_size: int,
        *,
        items: Iterable[int] | None = None,
        jax_dtypes: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> DataGroup[Any]:
        """A group of this loader's items.

        Args:
            batch_size: Items per batch.
            items: Positions of the items, for instance of those to validate on; None is all.
            jax_dtypes: Array name to the dtype in which JAX gets it, where it is to be another.
            **options: Further arguments of :class:`~hydrax.DataGroup`.

        Raises:
            IndexError: There is no such item.
            TypeError: ``items`` are no integers.
            KeyError: There is no such array.
        """
        arrays = dict(self.loader_arrays)
        for name, jax_dtype in (jax_dtypes or {}).items():
            if name not in arrays:
                raise KeyError(f"no array {name!r}; there are {sorted(arrays)}")
            spec = arrays[name]
            if isinstance(spec, Ragged):
                arrays[name] = Ragged(spec.max_shape, spec.dtype, jax_dtype, spec.truncate)
            else:
                arrays[name] = (spec[0], spec[1], jax_dtype)
        data: Any = self._data()
        if items is not None:
            positions = items if isinstance(items, range) else _positions(items)
            check_rows(np.asarray(positions), len(self))
            is_computed = isinstance(data, range)
            data = positions if is_computed else [data[position] for position in positions]
        return DataGroup(batch_size, data, loader_arrays=arrays, **options)


def _positions(items: Iterable[int]) -> npt.NDArray[np.int64]:
    found = np.asarray(items if hasattr(items, "__array__") else list(items))
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        hint = "; np.flatnonzero(mask) gives those of a mask" if found.dtype.kind == "b" else ""
        raise TypeError(
            f"items is an array of {found.dtype} of shape {found.shape}; expected integers{hint}"
        )
    return found.astype(np.int64)


def check_rows(rows: npt.NDArray[Any], count: int) -> None:
    """Refuse positions of which there is nothing, which NumPy would clip or count from behind."""
    # Negative ones are huge without their sign, so that one look at all of them will do.
    if len(rows) and int(rows.astype(np.uint64).max()) >= count:
        wrong = rows[(rows < 0) | (rows >= count)]
        raise IndexError(f"item {wrong[0]} of {count} items")


class Source:
    """An array that is sent to another process as the name of its file, if it is a memory map."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        # Slices of memory maps themselves are made by code in Python.
        self.array = np.asarray(array)

    def __getstate__(self) -> dict[str, Any]:
        array = self.array
        root: Any = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        is_map = isinstance(root, np.memmap) and isinstance(root.base, mmap.mmap)
        if is_map and root.filename is not None and array.flags.c_contiguous:
            offset = root.offset + array.ctypes.data - root.ctypes.data
            return {"map": (os.path.abspath(root.filename), array.dtype, offset, array.shape)}
        return {"array": array}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "map" in state:
            path, dtype, offset, shape = state["map"]
            self.array = np.asarray(np.memmap(path, dtype, "r", offset, shape))
        else:
            self.array = state["array"]
