"""The process-wide generators of ``random`` and ``numpy.random``, made a function of the item.

A loader function that ignores its seed and draws from the global generators would draw the same
numbers in every forked worker, or others in every run. While loader functions run, both
generators start anew with each item, from the item's seed. An item that draws nothing pays next
to nothing: NumPy's generator is replaced by one in C that starts in nanoseconds, and the one of
``random`` is seeded at the first draw.

``from random import random`` and ``from random import getrandbits`` bind the original C methods
and so bypass this; every other function of both modules is covered.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from hydrax import _core

__all__ = ["ItemRandom"]


class _ItemSeededRandom(random.Random):
    """``random.Random`` that seeds itself from the item at the first draw."""

    def random(self) -> float:
        _seed_from_item()
        return super().random()

    def getrandbits(self, k: int, /) -> int:
        _seed_from_item()
        return super().getrandbits(k)

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        _seed_from_item()  # before a value that an earlier item left over is used
        return super().gauss(mu, sigma)

    def seed(self, a: Any = None, version: int = 2) -> None:
        _core.random_take_seed()  # the user's seed holds for the rest of the item
        super().seed(a, version)

    def setstate(self, state: Any) -> None:
        _core.random_take_seed()
        super().setstate(state)


class _ItemSeededBits(np.random.MT19937):
    """Bit generator that draws from the item's source until the user seeds it."""

    def __init__(self) -> None:
        super().__init__()
        self._item_capsule = _core.random_capsule(super().capsule)

    @property
    def capsule(self) -> Any:  # type: ignore[override]
        return self._item_capsule

    def _legacy_seeding(self, seed: Any) -> None:
        super()._legacy_seeding(seed)
        _core.random_choose_inner()

    @property
    def state(self) -> Any:
        return np.random.MT19937.state.__get__(self)  # type: ignore[attr-defined]

    @state.setter
    def state(self, value: Any) -> None:
        np.random.MT19937.state.__set__(self, value)  # type: ignore[attr-defined]
        _core.random_choose_inner()


_generator: Any = random._inst  # type: ignore[attr-defined]
# Bound to the instance in C; the other functions of the module look these up through its class.
_BOUND_NAMES = ("random", "getrandbits", "gauss", "seed", "setstate")


def _seed_from_item() -> None:
    seed = _core.random_take_seed()
    if seed is not None:
        random.Random.seed(_generator, seed)


class ItemRandom:
    """Switches both global generators to the item's seed, and back.

    One per process at a time. In a loader process it is installed for good; where the main
    process loads, it is installed around each run, so that the user's own sequence goes on
    undisturbed.
    """

    def __init__(self) -> None:
        self._bits = _ItemSeededBits()
        self._user_bits: Any = None
        self._user_state: Any = None

    def install(self) -> None:
        """Put the item's generators in the place of the user's."""
        self._user_state = _generator.getstate()
        self._user_bits = np.random.get_bit_generator()
        _generator.__class__ = _ItemSeededRandom
        for name in _BOUND_NAMES:
            setattr(random, name, getattr(_generator, name))
        np.random.set_bit_generator(self._bits)

    def uninstall(self) -> None:
        """Put the user's generators back as they were."""
        _generator.__class__ = random.Random
        for name in _BOUND_NAMES:
            setattr(random, name, getattr(_generator, name))
        _generator.setstate(self._user_state)
        np.random.set_bit_generator(self._user_bits)

    def forget(self) -> None:
        """Drop what NumPy keeps of an item's normal draws; call it after one that drew."""
        np.random.set_bit_generator(self._bits)
