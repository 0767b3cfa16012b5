"""Which observations a draw takes: a function of the options, the seed and the draw's number.

Pure NumPy, no JAX: loader processes use it. The random draws consume
:class:`numpy.random.Generator` just as the data loaders of ``jax_sgmc`` 0.1.5 do, so that equal
seeds and options select equal observations. Such a generator can only be run forwards; states
along its way are kept, so that any draw can be asked for at any time. Reading the observations is
the business of the data loaders.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["IN_EPOCHS", "ORDERED", "SHUFFLE", "Chain", "Selection", "Selections", "random_chain"]

SHUFFLE = 1
IN_EPOCHS = 2

_SEED_COUNT = 2**128
_BLOCK_LENGTH = 8192  # of independent indices; those are made at a few nanoseconds each
_UNITS_KEPT = (
    3  # the one in use, the one before for draws made anew, the one after for reading ahead
)
_CHECKPOINT_LIMIT = 512
_SELECTIONS_KEPT = 16


@dataclass(frozen=True)
class Chain:
    """What sets the draws of one chain apart from those of another on the same data.

    Attributes:
        is_ordered: Whether the observations come in the order of the data.
        seed: Of the random order, from 0 to ``2**128 - 1``.
        options: ``SHUFFLE``, with or without ``IN_EPOCHS``, or 0 for independent draws.
    """

    is_ordered: bool
    seed: int = 0
    options: int = 0


ORDERED = Chain(is_ordered=True)


def random_chain(
    *, seed: int | None = None, shuffle: bool = False, in_epochs: bool = False
) -> Chain:
    """A chain that draws at random.

    Args:
        seed: From 0 to ``2**128 - 1``; None takes one from the operating system.
        shuffle: Take the observations in a random order of all of them, and then in another one.
        in_epochs: Begin each order with a draw of its own.

    Raises:
        TypeError: The seed is not an integer.
        ValueError: The seed is out of range, or ``in_epochs`` is asked for without ``shuffle``.
    """
    if in_epochs and not shuffle:
        raise ValueError("in_epochs=True needs shuffle=True: independent draws have no epochs")
    if seed is None:
        entropy = np.random.SeedSequence().entropy
        assert isinstance(entropy, int)
        seed = entropy
    try:
        seed = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed is {seed!r}, expected an integer or None") from None
    if not 0 <= seed < _SEED_COUNT:
        raise ValueError(f"seed is {seed}, expected a number from 0 to 2**128 - 1")
    return Chain(False, seed, bool(shuffle) * SHUFFLE | bool(in_epochs) * IN_EPOCHS)


class Selection:
    """The observations of every draw of one chain.

    Draw ``k`` takes ``mb_size`` of ``observation_count`` observations:

    - ordered: the next ones. The last draw of an epoch begins again at the start of the data to
      fill up, where its mask is False.
    - independent: each one at random, whatever else is drawn.
    - shuffled: the next ones of a random order of all; where it ends, another order follows within
      the same draw.
    - shuffled in epochs: the same, but a new order begins with a new draw; the last draw of an
      epoch is filled up with observation 0, where its mask is False.

    Draws in sequence are cheap, and so is going back. Going on without the draws between costs
    what making them costs: about 10 ns an index. Random orders take memory for up to four times
    ``observation_count`` indices; kept states stay below 200 KB.

    A selection is not to be used by two threads at once.

    Args:
        chain: Order, options and seed.
        observation_count: Observations of the data set, at least 1.
        mb_size: Observations per draw, from 1 to ``observation_count``.

    Raises:
        ValueError: A size is out of range; the message names both.

    Example:
        >>> chain = random_chain(seed=1, shuffle=True, in_epochs=True)
        >>> selection = Selection(chain, observation_count=5, mb_size=2)
        >>> for draw in range(3):
        ...     indices, mask = selection.indices(draw)
        ...     print(indices[mask])
        [3 0]
        [1 2]
        [4]
    """

    def __init__(self, chain: Chain, observation_count: int, mb_size: int) -> None:
        if not 1 <= mb_size <= observation_count:
            raise ValueError(
                f"mb_size is {mb_size}, expected a number from 1 to {observation_count}, "
                "the observations of the data set"
            )
        self.chain = chain
        self.observation_count = observation_count
        self.mb_size = mb_size
        self._is_padded = chain.is_ordered or bool(chain.options & IN_EPOCHS)
        # The draws are a stream of indices that is made in units of this length: padded epochs,
        # orders of all observations, or blocks of independent draws.
        if self._is_padded:
            self._unit_length = -(-observation_count // mb_size) * mb_size
        else:
            self._unit_length = observation_count if chain.options & SHUFFLE else _BLOCK_LENGTH
        self._units = _Units(self._make_unit, chain.seed)

    def __reduce__(self) -> tuple[Any, ...]:
        return Selection, (self.chain, self.observation_count, self.mb_size)

    @property
    def draws_per_epoch(self) -> int | None:
        """Draws that take each observation once; None where epochs do not begin with a draw."""
        return self._unit_length // self.mb_size if self._is_padded else None

    def indices(self, draw: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Observations of one draw: :meth:`block` of one, without the first axis."""
        indices, mask = self.block(draw, 1)
        return indices[0], mask[0]

    def block(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Observations of consecutive draws.

        Args:
            first: The first draw, counted from 0.
            count: How many draws.

        Returns:
            Indices, int64 of shape ``(count, mb_size)``, each from 0 to
            ``observation_count - 1``, and a mask, bool of the same shape: False where an index
            only fills up its draw. Both are new arrays.

        Raises:
            ValueError: ``first`` or ``count`` is negative.
        """
        if first < 0 or count < 0:
            raise ValueError(f"{count} draws from {first} on: expected numbers from 0 on")
        shape = count, self.mb_size
        length = count * self.mb_size
        start = first * self.mb_size
        if self._is_padded:
            within = start % self._unit_length
            position = np.arange(within, within + length) % self._unit_length
            mask = (position < self.observation_count).reshape(shape)
            if self.chain.is_ordered:
                return (position % self.observation_count).reshape(shape), mask
        else:
            mask = np.ones(shape, bool)
        indices = np.empty(length, np.int64)
        done = 0
        while done < length:
            unit, offset = divmod(start + done, self._unit_length)
            part = self._units[unit][offset : offset + length - done]
            indices[done : done + len(part)] = part
            done += len(part)
        return indices.reshape(shape), mask

    def _make_unit(self, generator: np.random.Generator) -> NDArray[Any]:
        count = self.observation_count
        unit = np.zeros(self._unit_length, np.min_scalar_type(count))
        if self.chain.options & SHUFFLE:
            unit[:count] = generator.choice(count, count, replace=False)
        else:
            unit[:] = generator.integers(0, count, self._unit_length)
        return unit


class Selections:
    """The selections of the chains that were asked for last.

    Args:
        observation_count: Observations of the data set.
        mb_size: Observations per draw.

    Raises:
        ValueError: A size is out of range; the message names both.

    Example:
        >>> selections = Selections(observation_count=3, mb_size=2)
        >>> selections[ORDERED].indices(1)
        (array([2, 0]), array([ True, False]))
    """

    def __init__(self, observation_count: int, mb_size: int) -> None:
        self._sizes = observation_count, mb_size
        self._kept: OrderedDict[Chain, Selection] = OrderedDict()
        self[ORDERED]  # checks the sizes

    def __getitem__(self, chain: Chain) -> Selection:
        selection = self._kept.get(chain)
        if selection is None:
            selection = self._kept[chain] = Selection(chain, *self._sizes)
            if len(self._kept) > _SELECTIONS_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(chain)
        return selection


class _BitState(NamedTuple):
    """What changes in the state of a PCG64."""

    state: int
    has_uint32: int
    uinteger: int


class _Units:
    """What one generator makes, unit after unit, to be asked for by the unit's number.

    Args:
        make: Makes the next unit from the generator.
        seed: Of the generator.
    """

    def __init__(self, make: Callable[[np.random.Generator], NDArray[Any]], seed: int) -> None:
        self._make = make
        # Chains draw from the first child of the seed's sequence, not from the sequence itself.
        self._bits = np.random.PCG64(np.random.SeedSequence(seed).spawn(1)[0])
        self._generator = np.random.Generator(self._bits)
        self._next = 0  # the unit that the generator makes next
        self._made: OrderedDict[int, NDArray[Any]] = OrderedDict()
        # States before units: all multiples of the distance, up to the furthest that was reached.
        self._checkpoints: dict[int, _BitState] = {}
        self._distance = 1

    def __getitem__(self, number: int) -> NDArray[Any]:
        unit = self._made.get(number)
        if unit is not None:
            self._made.move_to_end(number)
            return unit
        if number != self._next and self._checkpoints:
            nearest = min(number - number % self._distance, next(reversed(self._checkpoints)))
            if not nearest <= self._next <= number:
                self._restore(nearest)
        while self._next <= number:
            self._keep_state()
            unit = self._make(self._generator)
            self._next += 1
        assert unit is not None
        self._made[number] = unit
        if len(self._made) > _UNITS_KEPT:
            self._made.popitem(last=False)
        return unit

    def _keep_state(self) -> None:
        """Remember the state before the next unit, at distances that grow with their number."""
        if self._next % self._distance or self._next in self._checkpoints:
            return
        if len(self._checkpoints) == _CHECKPOINT_LIMIT:
            self._distance *= 2
            kept = self._checkpoints.items()
            self._checkpoints = {n: state for n, state in kept if n % self._distance == 0}
        state: Any = self._bits.state
        self._checkpoints[self._next] = _BitState(
            state["state"]["state"], state["has_uint32"], state["uinteger"]
        )

    def _restore(self, number: int) -> None:
        kept = self._checkpoints[number]
        state: Any = self._bits.state
        state["state"]["state"] = kept.state
        state["has_uint32"], state["uinteger"] = kept.has_uint32, kept.uinteger
        self._bits.state = state
        self._next = number
