"""Debug mode: find what a loader function left unwritten.

An array is filled with a pattern before the loader is called. Elements that still hold it are
suspects; since a loader may well write such a value, it is called once more over another pattern,
and only elements that kept both are unwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hydrax.errors import UnwrittenArrayError

__all__ = ["PATTERNS", "check_written", "poison", "suspects"]

PATTERNS = (0xFF, 0xA5)
"""Bytes to fill with; the first one is NaN in every floating-point dtype of NumPy."""


def _bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array's elements as rows of bytes, in place; the array is C-contiguous."""
    return array.reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize)


def poison(arrays: Mapping[str, np.ndarray[Any, Any]], pattern: int) -> None:
    """Fill all arrays with a byte."""
    for array in arrays.values():
        _bytes_of(array)[:] = pattern


def suspects(
    arrays: Mapping[str, np.ndarray[Any, Any]], pattern: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Array name to a mask of the elements that hold the pattern; only arrays that have some."""
    found = {}
    for name, array in arrays.items():
        mask = (_bytes_of(array) == pattern).all(axis=1).reshape(array.shape)
        if mask.any():
            found[name] = mask
    return found


def check_written(
    arrays: Mapping[str, np.ndarray[Any, Any]], suspected: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Raise for suspects that also kept the second pattern.

    Raises:
        UnwrittenArrayError: Names the array and the first element.
    """
    for name, mask in suspects(arrays, PATTERNS[1]).items():
        unwritten = mask & suspected.get(name, np.False_)
        if unwritten.any():
            first = tuple(int(index) for index in np.argwhere(unwritten)[0])
            raise UnwrittenArrayError(
                f"array {name!r}: the loader function left {int(unwritten.sum())} of "
                f"{unwritten.size} elements unwritten, the first at {first}; "
                "fill every array completely, it may hold data of an earlier batch"
            )
