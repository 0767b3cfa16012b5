"""Debug mode: arrays that are not filled, are kept, or are written to when nobody may.

Unwritten: an array is filled with a pattern before the loader is called. Elements that still hold
it are suspects; since a loader may well write such a value, it is called once more over another
pattern, and only elements that kept both are unwritten.

Kept: each call gets arrays of its own, which nothing may refer to when it has returned.

Changed: the bytes of each item have a checksum when the loader has returned, which must be the
same when the batch is delivered, and those of a delivered batch when its slot is free. So a slot
of a delivered batch is held until it has been looked at.

Imports no JAX.
"""

from __future__ import annotations

import gc
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from hydrax import _context, _core
from hydrax._specs import ArrayLayout
from hydrax.errors import ArrayChangedError, ArrayKeptError, UnwrittenArrayError

__all__ = ["CheckedLoader", "Checksums", "SlotWatch", "checksums_of", "first_change"]

_PATTERNS = (0xFF, 0xA5)
"""Bytes to fill with; the first one is NaN in every floating-point dtype of NumPy."""

# Another thread of the loader may be about to let go of what it worked on.
_LET_GO_S = 0.1

Array = np.ndarray[Any, Any]
Checksums = dict[int, dict[str, int]]
"""Item to array name to checksum."""


def _bytes_of(array: Array) -> Array:
    """The array's elements as rows of bytes, in place; the array is C-contiguous."""
    return array.reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize)


def checksums_of(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Array name to the checksum of its bytes."""
    return {name: zlib.crc32(_bytes_of(array)) for name, array in arrays.items()}


def _poison(arrays: Mapping[str, Array], pattern: int) -> None:
    """Fill all arrays with a byte."""
    for array in arrays.values():
        _bytes_of(array)[:] = pattern


def _suspects(arrays: Mapping[str, Array], pattern: int) -> dict[str, Array]:
    """Array name to a mask of the elements that hold the pattern; only arrays that have some."""
    found = {}
    for name, array in arrays.items():
        nbytes = array.dtype.itemsize
        if nbytes in (1, 2, 4, 8):
            elements = array.reshape(-1).view(f"u{nbytes}")
            mask = elements == int.from_bytes([pattern] * nbytes, "little")
        else:
            mask = (_bytes_of(array) == pattern).all(axis=1)
        mask = mask.reshape(array.shape)
        if mask.any():
            found[name] = mask
    return found


def _check_written(arrays: Mapping[str, Array], suspected: Mapping[str, Array]) -> None:
    """Raise for suspects that also kept the second pattern."""
    for name, mask in _suspects(arrays, _PATTERNS[1]).items():
        unwritten = mask & suspected.get(name, np.False_)
        if unwritten.any():
            first = tuple(int(index) for index in np.argwhere(unwritten)[0])
            raise UnwrittenArrayError(
                f"array {name!r}: the loader function left {int(unwritten.sum())} of "
                f"{unwritten.size} elements unwritten, the first at {first}; "
                "fill every array completely, it may hold data of an earlier batch"
            )


class _Given(NamedTuple):
    """An array that a loader function is given, as long as it lives.

    Attributes:
        array: What it was given.
        root: What that, and everything made from it, refers to.
    """

    array: weakref.ref[Array]
    root: weakref.ref[Array]


def _separate(array: Array) -> tuple[Array, _Given]:
    """An array over the same memory that has nothing else in common with the given one."""
    if array.size == 0:
        own = root = np.empty(array.shape, array.dtype)
    else:
        # NumPy makes views refer to the array at the end of the chain; a buffer ends it here.
        root = np.frombuffer(memoryview(_bytes_of(array)), np.uint8)
        own = root.view(array.dtype).reshape(array.shape)
    return own, _Given(weakref.ref(own), weakref.ref(root))


def _detached(result: Any) -> Any:
    """A loader's result without the arrays that it may return as they are."""
    if not isinstance(result, Mapping):
        return result
    return {
        key: value.copy() if isinstance(value, np.ndarray) else value
        for key, value in result.items()
    }


def _check_let_go(given: Mapping[str, _Given]) -> None:
    """Raise if an array that the loader function was given is still referred to."""
    deadline = time.monotonic() + _LET_GO_S
    while any(entry.root() is not None for entry in given.values()):
        gc.collect()  # a reference cycle that nothing else refers to
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    for name, entry in given.items():
        if entry.root() is not None:
            raise ArrayKeptError(
                f"array {name!r}: the loader function has returned, and "
                f"{_holders(entry.array())} still refers to it; keep no reference to the arrays, "
                "and return copies of them"
            )


def _holders(array: Array | None) -> str:
    """What refers to an array, for a message; to a view of it, if it is gone."""
    if array is None:
        return "a view of it"
    if _context.is_worker():
        gc.unfreeze()  # what was there before the fork may be what refers to it
    names = []
    for referrer in gc.get_referrers(array):
        kind = type(referrer).__name__
        if kind != "frame":
            names.append(f"an object of type {kind}")
    if _context.is_worker():
        gc.freeze()
    return " and ".join(names[:3]) or "something"


class CheckedLoader:
    """The loader function, under the checks that belong to a call.

    Args:
        loader: The loader function.
        forget: Makes NumPy forget the normal draws that it has kept.
    """

    def __init__(self, loader: Callable[..., Any], forget: Callable[[], None]) -> None:
        self._loader = loader
        self._forget = forget

    def __call__(self, descriptor: Any, arrays: Mapping[str, Array], seed: Any) -> Any:
        """Call the loader function, twice where an array may be unwritten.

        Raises:
            UnwrittenArrayError: Names the array and the first element.
            ArrayKeptError: Names the array and what refers to it.
        """
        _poison(arrays, _PATTERNS[0])
        result = self._call(descriptor, arrays, seed)
        suspected = _suspects(arrays, _PATTERNS[0])
        if suspected:
            del result
            _poison(arrays, _PATTERNS[1])
            if _core.random_restart():
                self._forget()
            result = self._call(descriptor, arrays, seed)
            _check_written(arrays, suspected)
        return result

    def _call(self, descriptor: Any, arrays: Mapping[str, Array], seed: Any) -> Any:
        pairs = {name: _separate(array) for name, array in arrays.items()}
        own = {name: array for name, (array, _) in pairs.items()}
        given = {name: entry for name, (_, entry) in pairs.items()}
        del pairs
        result = _detached(self._loader(descriptor, MappingProxyType(own), seed))
        del own
        _check_let_go(given)
        return result


class _Held(NamedTuple):
    """A delivered batch.

    Attributes:
        tensor: Holds the slot.
        slot: Number of the slot.
        text: Which batch it is.
        arrays: Views of the slot, one dimension more than an item has.
        checksums: Of each item at delivery.
    """

    tensor: _core.Tensor
    slot: int
    text: str
    arrays: Mapping[str, Array]
    checksums: Checksums


class SlotWatch:
    """Looks at the slots of delivered batches, when they come and when they go.

    Args:
        arena: The arena.
    """

    def __init__(self, arena: _core.Arena) -> None:
        self._arena = arena
        self._held: list[_Held] = []

    def arrays(
        self, slot: int, layouts: Mapping[str, ArrayLayout], item_count: int
    ) -> Mapping[str, Array]:
        """The arrays of the first items in a slot."""
        memory = memoryview(self._arena)
        start = slot * self._arena.slot_nbytes
        return {
            name: np.ndarray(layout.shape, layout.dtype, memory, start + layout.offset)[:item_count]
            for name, layout in layouts.items()
        }

    def hold(
        self, lease: _core.Lease, layouts: Mapping[str, ArrayLayout], item_count: int, text: str
    ) -> None:
        """Remember a batch as it is delivered; its slot is held until check() finds it free."""
        arrays = self.arrays(lease.slot, layouts, item_count)
        checksums = {
            item: checksums_of({name: array[item, ...] for name, array in arrays.items()})
            for item in range(item_count)
        }
        tensor = lease.tensor(0, (0,), 1, 8)  # of nothing: it only counts as a holder
        self._held.append(_Held(tensor, lease.slot, text, arrays, checksums))

    def check(self, *, is_end: bool = False) -> None:
        """Let go of slots that nothing else holds; at the end, of all.

        Raises:
            ArrayChangedError: What a batch was delivered with is no longer there.
        """
        held, self._held = self._held, []
        changed = None
        for batch in held:
            if not is_end and self._arena.lease_count(batch.slot) > 1:
                self._held.append(batch)
                continue
            found = first_change(batch.arrays, batch.checksums)
            if found is not None and changed is None:
                item, name = found
                changed = ArrayChangedError(
                    f"array {name!r} of {batch.text} was written to after the batch had been "
                    f"delivered, first at its item {item}; jax.Arrays never change, so something "
                    "wrote to their memory, such as another library that shares it"
                )
        del held
        if changed is not None:
            raise changed


def first_change(arrays: Mapping[str, Array], checksums: Checksums) -> tuple[int, str] | None:
    """Item and array of which the checksum is another one now, or None."""
    for item, before in sorted(checksums.items()):
        now = checksums_of({name: arrays[name][item, ...] for name in before})
        for name in before:
            if now[name] != before[name]:
                return item, name
    return None
