"""Draws from data that can only be read from the beginning, one element after the other.

Pure NumPy. A pass over the elements is a fresh iterator of chunks; where draws are asked for out of
order, a new pass starts. What the elements are, and where they come from, is left to others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hydrax.data._draws import Chain

__all__ = ["PassDraws"]

Array: TypeAlias = NDArray[Any]
Chunk: TypeAlias = Sequence[Array]  # one array per leaf, elements in the first dimension

_CHAINS_KEPT = 16


class PassDraws:
    """Draws of the chains over one sequence of elements.

    Ordered chains take the elements as they come and fill up the last draw of a pass with the
    first ones. Random chains shuffle each pass by a buffer: an element of the buffer is taken at
    random, and the next element takes its place. A draw may hold elements of two passes.

    Args:
        start_pass: Returns a new iterator over all elements, in chunks.
        element_count: Elements of a pass.
        mb_size: Elements of a draw.
        buffer_size: Elements of the shuffle buffer.
    """

    def __init__(
        self,
        start_pass: Callable[[], Iterator[Chunk]],
        element_count: int,
        mb_size: int,
        buffer_size: int,
    ) -> None:
        self._start_pass = start_pass
        self._count = element_count
        self._mb_size = mb_size
        self._buffer_size = min(buffer_size, element_count)
        self._passes: OrderedDict[Chain, tuple[int, _Pass]] = OrderedDict()

    def load(
        self, chain: Chain, first: int, arrays: Sequence[Array], mask: NDArray[np.bool_]
    ) -> None:
        """Fill consecutive draws.

        Args:
            chain: Which chain.
            first: The first draw.
            arrays: For each leaf ``(rows, ...)``, rows of all draws one after the other.
            mask: ``(rows,)``; gets False where an element only fills up.

        Raises:
            RuntimeError: A pass ended early.
        """
        count = len(mask)
        length = self._count
        if chain.is_ordered:
            length = -(-self._count // self._mb_size) * self._mb_size
        start = first * self._mb_size
        done = 0
        while done < count:
            epoch, position = divmod(start + done, length)
            part = min(count - done, length - position)
            self._load_part(chain, epoch, position, [array[done : done + part] for array in arrays])
            mask[done : done + part] = np.arange(position, position + part) < self._count
            done += part

    def clear(self) -> None:
        """Forget all passes."""
        self._passes.clear()

    def _load_part(self, chain: Chain, epoch: int, position: int, arrays: Sequence[Array]) -> None:
        """Elements of one pass, and for an ordered chain the first ones behind it once more."""
        # Passes in order are all alike.
        number, current = self._passes.pop(chain, (-1, None))
        if (
            current is None
            or current.position > position
            or (number != epoch and current.is_shuffled)
        ):
            current = self._begin(chain, epoch)
        current.skip(position - current.position)
        current.read(arrays)
        self._passes[chain] = epoch, current
        if len(self._passes) > _CHAINS_KEPT:
            self._passes.popitem(last=False)

    def _begin(self, chain: Chain, epoch: int) -> _Pass:
        rows = _Rows(self._start_pass(), self._count)
        if chain.is_ordered:
            return _OrderedPass(rows, self._count, -self._count % self._mb_size)
        generator = np.random.default_rng(np.random.SeedSequence(chain.seed, spawn_key=(epoch,)))
        return _ShuffledPass(rows, self._count, self._buffer_size, generator)


class _Rows:
    """The elements of a pass in stretches of any length."""

    def __init__(self, chunks: Iterator[Chunk], count: int) -> None:
        self._chunks = chunks
        self._count = count
        self._chunk: Chunk = ()
        self._used = 0
        self._given = 0

    def stretches(self, count: int) -> Iterator[Chunk]:
        """The next elements, in arrays that are valid until the one after is asked for."""
        while count:
            left = len(self._chunk[0]) - self._used if self._chunk else 0
            if not left:
                chunk = next(self._chunks, None)
                if chunk is None:
                    raise RuntimeError(
                        f"the pipeline ended after {self._given} of {self._count} elements; it has "
                        "to give as many in each pass"
                    )
                self._chunk, self._used = chunk, 0
                continue
            part = min(left, count)
            yield [leaf[self._used : self._used + part] for leaf in self._chunk]
            self._used += part
            self._given += part
            count -= part


class _Pass:
    """One pass over the elements, as far as it was read."""

    is_shuffled = False

    def __init__(self) -> None:
        self.position = 0

    def skip(self, count: int) -> None:
        """Go on without reading."""
        raise NotImplementedError

    def read(self, arrays: Sequence[Array]) -> None:
        """Read as many elements as the arrays have rows."""
        raise NotImplementedError


class _OrderedPass(_Pass):
    """Elements in their order, and behind the last one the first ones again."""

    def __init__(self, rows: _Rows, count: int, repeated_count: int) -> None:
        super().__init__()
        self._rows = rows
        self._count = count
        self._repeated_count = repeated_count
        self._first: list[Chunk] = []

    def skip(self, count: int) -> None:
        for stretch in self._next(count):
            del stretch

    def read(self, arrays: Sequence[Array]) -> None:
        done = 0
        for stretch in self._next(len(arrays[0])):
            for leaf, array in zip(stretch, arrays, strict=True):
                array[done : done + len(leaf)] = leaf
            done += len(stretch[0])

    def _next(self, count: int) -> Iterator[Chunk]:
        new = max(min(count, self._count - self.position), 0)
        for stretch in self._rows.stretches(new):
            if (missing := self._repeated_count - self.position) > 0:
                self._first.append([leaf[:missing].copy() for leaf in stretch])
            self.position += len(stretch[0])
            yield stretch
        if count > new:
            kept = [np.concatenate(parts) for parts in zip(*self._first, strict=True)]
            at = self.position - self._count
            self.position += count - new
            yield [leaf[at : at + count - new] for leaf in kept]


class _ShuffledPass(_Pass):
    """Elements in an order that a buffer and a generator make."""

    is_shuffled = True

    def __init__(
        self, rows: _Rows, count: int, buffer_size: int, generator: np.random.Generator
    ) -> None:
        super().__init__()
        self._rows = rows
        self._refilled_count = count - buffer_size  # elements that another one takes the place of
        self._buffer_size = buffer_size
        self._generator = generator
        self._buffer: list[Array] = []
        self._last: NDArray[np.int64] | None = None  # order of those that stay to the end

    def skip(self, count: int) -> None:
        self._take(count, None)

    def read(self, arrays: Sequence[Array]) -> None:
        self._take(len(arrays[0]), arrays)

    def _take(self, count: int, arrays: Sequence[Array] | None) -> None:
        if not self._buffer:
            stretches = zip(*self._rows.stretches(self._buffer_size), strict=True)
            self._buffer = [np.concatenate(parts) for parts in stretches]
        refilled = max(min(count, self._refilled_count - self.position), 0)
        done = 0
        for stretch in self._rows.stretches(refilled):
            slots = self._generator.integers(0, self._buffer_size, len(stretch[0])).tolist()
            for number, (leaf, kept) in enumerate(zip(stretch, self._buffer, strict=True)):
                for row, slot in enumerate(slots):
                    if arrays is not None:
                        arrays[number][done + row] = kept[slot]
                    kept[slot] = leaf[row]
            done += len(slots)
        self.position += refilled
        if count > refilled:
            if self._last is None:
                self._last = self._generator.permutation(self._buffer_size)
            at = self.position - self._refilled_count
            slots_left = self._last[at : at + count - refilled]
            for array, kept in zip(arrays or (), self._buffer, strict=arrays is not None):
                array[refilled:] = kept[slots_left]
            self.position += count - refilled
