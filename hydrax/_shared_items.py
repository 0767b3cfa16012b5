"""Large lists of descriptors, as forked loader processes read them.

A forked process shares the memory of what it inherits, page by page, until it writes there. Taking
an object out of a list is such a write, to its reference count, so that a list of millions of
small objects would in the end be copied by every loader process. Such lists are read without
taking references instead: nothing is packed beforehand and no memory is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hydrax import _context, _core
from hydrax._sequences import Chosen, whole_of

__all__ = ["readable", "warn_of_copying"]

logger = logging.getLogger(__name__)

# Smaller lists are not worth the time of copying each item that is read.
_MANY_ITEMS = 100_000
# From so many on, it is worth a word if every loader process will copy them.
_WARNED_ITEMS = 1_000_000
_SAMPLE_COUNT = 8


def readable(data: Sequence[Any]) -> Sequence[Any]:
    """The descriptors of a group as this process is to read them.

    In a loader process the items of a large list or tuple come as copies, made without a write to
    the originals; objects of which there can be no plain copy come themselves.
    """
    if isinstance(data, Chosen):
        return Chosen(readable(data.data), data.indices)
    if _context.is_worker() and _is_list(data) and len(data) >= _MANY_ITEMS:
        return _core.Items(data)  # type: ignore[arg-type,return-value]
    return data


def warn_of_copying(data: Sequence[Any]) -> None:
    """Log a warning if loader processes will copy a large list as they read it."""
    data = whole_of(data)
    count = len(data)
    if count < _WARNED_ITEMS or not _is_list(data):
        return
    items = _core.Items(data)  # type: ignore[arg-type]
    sample = range(0, count, count // _SAMPLE_COUNT)
    kinds = {type(data[index]).__name__ for index in sample if not items.is_apart(index)}
    if kinds:
        logger.warning(
            "data holds %d items, among them objects of type %s, of which each loader process "
            "comes to hold a copy; str, bytes, numbers, and tuples, lists and dicts of them stay "
            "shared",
            count,
            ", ".join(sorted(kinds)),
        )


def _is_list(data: Sequence[Any]) -> bool:
    return type(data) in (list, tuple)
