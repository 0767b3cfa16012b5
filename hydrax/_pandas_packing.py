"""Python objects packed into one block of bytes, which reading them does not change.

Strings become UTF-8, bytes stay as they are, other objects are pickled. Which cells are worth
packing, and what a cell is part of, is left to :mod:`hydrax.pandas`.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

__all__ = ["Packed", "Packer"]

_STR: Final = 0
_BYTES: Final = 1
_PICKLE: Final = 2
_FIRST_CONSTANT: Final = 3
_CONSTANTS: Final = (None, np.nan, pd.NA, pd.NaT, True, False)

_SHARED_CELL_NBYTES: Final = 64
"""From this size on, an object that several rows share is worth remembering."""


class Packed:
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
        return Packed, (self._data, self._bounds, kinds)


class Packer:
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

    def finish(self) -> Packed:
        """Return all cells that were added."""
        none = [np.empty(0, np.int64)]
        ends = np.concatenate(self._ends or none)
        if self._side_by_side:
            bounds = np.concatenate([np.zeros(1, np.int64), ends])
        else:
            bounds = np.stack([np.concatenate(self._starts), ends])
        kinds = np.concatenate(self._kinds or [np.empty(0, np.uint8)])
        return Packed(b"".join(self._blocks), bounds, kinds if kinds.any() else None)
