"""Items of similar length together: a few groups of fixed shapes, or packs of one length. Pure."""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from hydrax._arguments import check_int, check_several
from hydrax._datagroup import DataGroup
from hydrax._sequences import Chosen, as_sequence

__all__ = ["PackPlan", "TooLong", "bucket_by_length", "pack_sequences"]

logger = logging.getLogger(__name__)

D = TypeVar("D")

TooLong = Literal["error", "drop", "truncate"]


def bucket_by_length(
    data: Sequence[D],
    lengths: Iterable[int] | npt.NDArray[Any],
    boundaries: Sequence[int],
    batch_sizes: int | Sequence[int],
    *,
    loader_arrays: Callable[[int], Mapping[str, Any]],
    too_long: TooLong = "error",
    **options: Any,
) -> list[DataGroup[D]]:
    """Divide items by length into groups, so that little is padded and few shapes are compiled.

    Each item is in the group of the first boundary that is not below its length. The groups go to
    a Dataloader together, which interleaves them.

    Args:
        data: The items' descriptors.
        lengths: Length of each item.
        boundaries: Longest length of each bucket, ascending.
        batch_sizes: Items per batch of each bucket, or one number for all.
        loader_arrays: Called with the boundary of a bucket; returns the ``loader_arrays`` of its
            group.
        too_long: What becomes of items above the last boundary. ``"error"``; ``"drop"``, which is
            logged; or ``"truncate"``: they are in the last bucket, where the loader function, or
            ``Ragged(truncate=True)``, cuts them off.
        **options: Further arguments of every :class:`DataGroup`.

    Returns:
        A group for each bucket that has items, in the order of the boundaries.

    Raises:
        ValueError: An item is longer than the last boundary; names it. Or the arguments do not fit
            each other.

    Example:
        >>> from hydrax import Ragged
        >>> words = ["a", "be", "to", "bucket", "boundary"]
        >>> groups = bucket_by_length(
        ...     words,
        ...     [len(word) for word in words],
        ...     boundaries=[2, 8],
        ...     batch_sizes=[3, 2],
        ...     loader_arrays=lambda length: {"letters": Ragged((length,), np.uint8)},
        ... )
        >>> [(list(group), group.loader_layouts["letters"].shape) for group in groups]
        [(['a', 'be', 'to'], (3, 2)), (['bucket', 'boundary'], (2, 8))]
    """
    data = as_sequence(data)
    check_several("boundaries", boundaries, "ascending lengths")
    edges = [check_int("a boundary", edge, minimum=0) for edge in boundaries]
    if not edges or any(low >= high for low, high in itertools.pairwise(edges)):
        raise ValueError(f"boundaries is {list(boundaries)}; expected ascending lengths")
    sizes = batch_sizes if isinstance(batch_sizes, Sequence) else [batch_sizes] * len(edges)
    if len(sizes) != len(edges):
        raise ValueError(f"batch_sizes has {len(sizes)} numbers for {len(edges)} boundaries")
    if not callable(loader_arrays):
        raise TypeError("loader_arrays is no function; expected one of a bucket's boundary")
    checked = _check_lengths(lengths, len(data))
    kept = _within(checked, edges[-1], too_long, lambda index: f" ({data[index]!r:.80})")
    bucket_of = np.searchsorted(edges[:-1], checked[kept])
    groups: list[DataGroup[D]] = []
    for bucket, (edge, size) in enumerate(zip(edges, sizes, strict=True)):
        indices = kept[bucket_of == bucket]
        if len(indices) == 0:
            continue
        groups.append(
            DataGroup(size, Chosen(data, indices), loader_arrays=loader_arrays(edge), **options)
        )
    if not groups:
        raise ValueError("no item is left to put into a bucket")
    return groups


def _check_lengths(lengths: Any, count: int | None) -> npt.NDArray[np.int64]:
    check_several("lengths", lengths, "one integer for each item")
    values = np.asarray(lengths if hasattr(lengths, "__len__") else list(lengths))
    if values.ndim != 1 or (values.dtype.kind not in "iu" and values.size):
        raise TypeError(
            f"lengths is an array of {values.dtype} of shape {values.shape}; expected one integer "
            "for each item"
        )
    if count is not None and len(values) != count:
        raise ValueError(f"lengths has {len(values)} numbers for {count} items")
    if values.size and values.min() < 0:
        index = int(np.argmax(values < 0))
        raise ValueError(f"lengths[{index}] is {values[index]}; a length cannot be negative")
    return values.astype(np.int64)


def _within(
    lengths: npt.NDArray[np.int64], limit: int, too_long: str, describe: Callable[[int], str]
) -> npt.NDArray[np.int64]:
    """Indices of the items to keep; refuses what is too long, if it is to be refused."""
    if too_long not in ("error", "drop", "truncate"):
        raise ValueError(f"too_long is {too_long!r}; expected 'error', 'drop' or 'truncate'")
    above = lengths > limit
    if too_long != "truncate" and above.any():
        if too_long == "error":
            index = int(np.argmax(above))
            raise ValueError(
                f"item {index}{describe(index)} has length {lengths[index]}; the longest that has "
                f"room is {limit}; too_long='drop' leaves such items out, 'truncate' cuts them off"
            )
        logger.warning(
            "%d of %d items are longer than %d and are left out", above.sum(), len(lengths), limit
        )
        return np.flatnonzero(~above)
    return np.arange(len(lengths))


class PackPlan(Sequence[npt.NDArray[np.int64]]):
    """Which sequences go into which pack; a sequence of packs, to be the data of a DataGroup.

    ``plan[i]`` are the positions of the sequences in pack i, in the order in which they lie in it.

    Attributes:
        lengths: The length with which each sequence is packed, int64.
        max_length: Length of a pack.
    """

    def __init__(
        self,
        members: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        max_length: int,
    ) -> None:
        self._members = members
        self._ends = ends
        self.lengths = lengths
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> npt.NDArray[np.int64]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[npt.NDArray[np.int64]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        end = int(self._ends[index])  # raises as a sequence should
        start = int(self._ends[index - 1]) if index not in (0, -len(self)) else 0
        return self._members[start:end]

    def __iter__(self) -> Iterator[npt.NDArray[np.int64]]:
        return map(self.__getitem__, range(len(self)))

    @property
    def fill(self) -> float:
        """Share of the packs' room that sequences take, at most 1."""
        return float(self.lengths[self._members].sum() / (len(self) * self.max_length))

    def __repr__(self) -> str:
        return (
            f"<PackPlan of {len(self._members)} sequences in {len(self)} packs of "
            f"{self.max_length}, {self.fill:.1%} filled>"
        )


def pack_sequences(
    lengths: Iterable[int] | npt.NDArray[Any],
    max_length: int,
    *,
    keep_order: bool = False,
    too_long: TooLong = "error",
) -> PackPlan:
    """Plan how to put short sequences into packs of one length, each sequence whole.

    The plan is a function of its arguments alone. By default it goes from the longest sequence to
    the shortest and puts each into the fullest pack that has room for it, which takes about 11/9 of
    the fewest packs possible at worst, and mostly next to no more. With ``keep_order`` a pack is
    closed by the first sequence that it has no room for.

    Args:
        lengths: Length of each sequence.
        max_length: Length of a pack, at least 1.
        keep_order: Whether the sequences stay in order.
        too_long: What becomes of sequences longer than a pack: ``"error"``; ``"drop"``, which is
            logged; or ``"truncate"``.

    Raises:
        ValueError: A sequence is longer than a pack; names it. Or there is none at all.

    Source:
        D. S. Johnson, A. Demers, J. D. Ullman, M. R. Garey, R. L. Graham, Worst-case performance
        bounds for simple one-dimensional packing algorithms, SIAM J. Comput. 3 (1974), 299-325.

    Example:
        >>> plan = pack_sequences([5, 3, 8, 2, 6], 8)
        >>> [pack.tolist() for pack in plan]
        [[2], [4, 3], [0, 1]]
        >>> [pack.tolist() for pack in pack_sequences([5, 3, 8, 2, 6], 8, keep_order=True)]
        [[0, 1], [2], [3, 4]]
    """
    limit = check_int("max_length", max_length, minimum=1)
    checked = _check_lengths(lengths, None)
    kept = _within(checked, limit, too_long, lambda index: "")
    if len(kept) == 0:
        raise ValueError("there is no sequence to pack")
    checked = np.minimum(checked, limit)
    pack = _packs_in_order if keep_order else _packs_by_fit
    packs = pack(kept, checked[kept].tolist(), limit)
    members = np.fromiter((each for pack in packs for each in pack), np.int64, len(kept))
    return PackPlan(members, np.cumsum([len(pack) for pack in packs]), checked, limit)


def _packs_in_order(
    kept: npt.NDArray[np.int64], lengths: Sequence[int], limit: int
) -> list[list[int]]:
    packs: list[list[int]] = []
    room = -1
    for index, length in zip(kept.tolist(), lengths, strict=True):
        if length > room:
            packs.append([])
            room = limit
        packs[-1].append(index)
        room -= length
    return packs


def _packs_by_fit(
    kept: npt.NDArray[np.int64], lengths: Sequence[int], limit: int
) -> list[list[int]]:
    packs: list[list[int]] = []
    # Packs by the room that is left in them, and the rooms of which there are some, ascending.
    packs_with: dict[int, list[int]] = {}
    rooms: list[int] = []
    values = np.asarray(lengths)
    order = np.argsort(-values, kind="stable")
    for index, length in zip(kept[order].tolist(), values[order].tolist(), strict=True):
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            packs.append([])
            number, room = len(packs) - 1, limit
        else:
            room = rooms[place]
            number = packs_with[room].pop()
            if not packs_with[room]:
                del packs_with[room], rooms[place]
        packs[number].append(index)
        room -= length
        if room not in packs_with:
            bisect.insort(rooms, room)
            packs_with[room] = []
        packs_with[room].append(number)
    return packs
