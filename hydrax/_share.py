"""Dividing a data set among the processes of a distributed program."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from hydrax._arguments import check_int
from hydrax._sequences import Chosen, as_sequence

__all__ = ["process_share"]

logger = logging.getLogger(__name__)

D = TypeVar("D")


def process_share(
    data: Sequence[D], process_index: int | None = None, process_count: int | None = None
) -> Sequence[D]:
    """This process's share of a data set, as long as that of every other process.

    Processes that train together take a step together, so all must have the same number of
    batches: give each a share of the data, and let batch sizes and seeds be the same. Process
    ``i`` of ``n`` gets the items ``i``, ``i + n``, ``i + 2 * n``, and so on. Items that are left
    over are nobody's, which is logged; with ``DataGroup(remainder="pad")`` or ``"short"`` no more
    than these are left out. Shuffling then happens within each share.

    Args:
        data: A sequence with at least one item per process. It is not copied.
        process_index: Number of this process; by default ``jax.process_index()``.
        process_count: Number of processes; by default ``jax.process_count()``.

    Returns:
        A sequence of ``len(data) // process_count`` items.

    Raises:
        TypeError: An argument is no integer, or only one of the two is given.
        ValueError: There is no such process, or there are fewer items than processes.

    Example:
        >>> [list(process_share(range(7), index, 3)) for index in range(3)]
        [[0, 3], [1, 4], [2, 5]]
    """
    if (process_index is None) != (process_count is None):
        raise TypeError("give both process_index and process_count, or neither")
    if process_index is None or process_count is None:
        import jax

        process_index, process_count = jax.process_index(), jax.process_count()
    count = check_int("process_count", process_count, minimum=1)
    index = check_int("process_index", process_index, minimum=0)
    if index >= count:
        raise ValueError(f"process_index is {index}; expected one below process_count, {count}")
    data = as_sequence(data)
    length, rest = divmod(len(data), count)
    if length == 0:
        raise ValueError(
            f"data has {len(data)} items, which is not one for each of {count} processes"
        )
    if rest:
        logger.info("%d of %d items are no process's, so that all have as many", rest, len(data))
    chosen = range(index, index + length * count, count)
    if isinstance(data, (range, np.ndarray)):
        share: Any = data[chosen.start : chosen.stop : count]
        return share  # type: ignore[no-any-return]
    return Chosen(data, chosen)
