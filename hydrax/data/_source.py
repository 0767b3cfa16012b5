"""What a loader process loads for the draws of a data loader. Imports no JAX.

A draw source is made in the main process and inherited by the loader processes, which fill blocks
of consecutive draws from it. What a draw holds is a function of its chain and its number alone.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hydrax.data._draws import Chain

__all__ = ["KEY_WORDS", "DrawSource", "chain_from_numbers", "chain_words"]

# Words of 32 bits that say which chain: an options word and the seed. The C core knows the number.
KEY_WORDS = 5
_ORDERED_BIT = 1 << 31
_WORD = 0xFFFFFFFF


def chain_words(chain: Chain) -> list[int]:
    """A chain as the words that a state carries."""
    options = chain.options | (_ORDERED_BIT if chain.is_ordered else 0)
    return [options, *((chain.seed >> shift) & _WORD for shift in (0, 32, 64, 96))]


def chain_from_numbers(options: int, seed_low: int, seed_high: int) -> Chain:
    """The chain of a plan, which carries an options word and the seed in two halves."""
    return Chain(
        bool(options & _ORDERED_BIT), seed_low | seed_high << 64, options & (_ORDERED_BIT - 1)
    )


class DrawSource(abc.ABC):
    """Loads the draws of one data loader, in loader processes.

    Attributes:
        worker_count: Loader processes that it is worth having.
        is_itemwise: Whether observations take long enough to load that several processes should
            share a draw; then :meth:`load_items` is called instead of :meth:`load`.
        runs_in_main: Whether a thread of the main process has to do the loading.
    """

    worker_count: int = 2
    is_itemwise: bool = False
    runs_in_main: bool = False

    @property
    @abc.abstractmethod
    def specs(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of one observation of each leaf, in the order of the pytree.

        The dtypes are those that :meth:`load` fills. Where JAX's own differ, the values are
        converted in the loader process, and one that does not fit is an error.
        """

    def start(self) -> None:  # noqa: B027 - there may be nothing to do
        """Called once in each loader process before it loads: open files there."""

    def load(
        self,
        chain: Chain,
        first: int,
        count: int,
        arrays: Sequence[NDArray[Any]],
        mask: NDArray[np.bool_],
    ) -> None:
        """Fill the draws ``[first, first + count)`` of a chain.

        Args:
            chain: Which chain.
            first: Number of the first draw.
            count: How many draws.
            arrays: One per leaf, ``(count, mb_size, *shape)``, of the dtype of :attr:`specs`; they
                may hold data of earlier draws.
            mask: ``(count, mb_size)``; True where an observation counts.
        """
        raise NotImplementedError

    def load_items(
        self,
        chain: Chain,
        first: int,
        count: int,
        arrays: Sequence[NDArray[Any]],
        mask: NDArray[np.bool_],
        begin: Callable[[int, int], None],
    ) -> None:
        """Fill the rows ``[first, first + count)`` of a chain, its draws taken as one sequence.

        Args:
            chain: Which chain.
            first: Number of the first row: ``draw * mb_size + row``.
            count: How many rows.
            arrays: One per leaf, ``(count, *shape)``.
            mask: ``(count,)``; True where an observation counts.
            begin: To be called as ``begin(number, seed)`` before each row ``first + number`` is
                loaded: it says where the process is, and seeds the global generators.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - there may be nothing to do
        """Called in the main process when nothing is to be loaded any more."""
