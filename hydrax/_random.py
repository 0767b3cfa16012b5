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

    # The other methods are written in Python and look at these two attributes, so they need not be
    # replaced, and are right where they were imported by name: getstate() asks for the version
    # first, gauss() for the value that was left over; seed() and setstate() set that, after which
    # the user's seed holds for the rest of the item.
    @property
    def VERSION(self) -> int:  # type: ignore[override]  # noqa: N802
        _seed_from_item()
        return random.Random.VERSION

    @property
    def gauss_next(self) -> float | None:
        _seed_from_item()
        return self.__dict__.get("gauss_next")

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        _core.random_take_seed()
        self.__dict__["gauss_next"] = value


_mt19937_state: Any = np.random.MT19937.__dict__["state"]


class _ItemSeededBits(np.random.MT19937):
    """Bit generator that draws from the item's source until the user seeds it."""

    def __init__(self) -> None:
        super().__init__()
        self._item_capsule = _core.random_capsule(super().capsule)

    @property
    def capsule(self) -> Any:
        return self._item_capsule

    def _legacy_seeding(self, seed: Any) -> None:
        super()._legacy_seeding(seed)
        _core.random_choose_inner()

    @property
    def state(self) -> Any:
        # Whoever reads the state may set it again, and expects the draws from here on once more.
        seed = _core.random_choose_inner()
        if seed is not None:
            super()._legacy_seeding(seed)
        return _mt19937_state.__get__(self)

    @state.setter
    def state(self, value: Any) -> None:
        _mt19937_state.__set__(self, value)
        _core.random_choose_inner()


# numpy.random asks for the name before it takes or gives a state in its common form.
_ItemSeededBits.__name__ = "MT19937"

# One for the process, for good: the source behind it is the process's, too.
_item_bits = _ItemSeededBits()
_numpy_random: Any = np.random  # the functions for its bit generator are missing in its stubs
_generator: Any = random._inst
# Methods that are looked up on the instance once, when random is imported.
_BOUND_NAMES = ("random", "getrandbits")


def _seed_from_item() -> None:
    seed = _core.random_take_seed()
    if seed is not None:
        random.Random.seed(_generator, seed)


class ItemRandom:
    """Switches both global generators to the item's seed, and back.

    One per process at a time. In a loader process it is installed for good; where the main
    process loads, it is installed around each run, so that the user's own sequences go on
    undisturbed.
    """

    def __init__(self) -> None:
        self._user_bits: Any = None
        self._user_class: type[random.Random] = random.Random
        self._user_states: tuple[Any, Any] | None = None

    def install(self) -> None:
        """Put the item's generators in the place of the user's."""
        self._user_states = _generator.getstate(), np.random.get_state(legacy=False)
        self._user_bits = _numpy_random.get_bit_generator()
        self._user_class = type(_generator)
        _generator.__class__ = _ItemSeededRandom
        for name in _BOUND_NAMES:
            setattr(random, name, getattr(_generator, name))
        _numpy_random.set_bit_generator(_item_bits)

    def uninstall(self) -> None:
        """Put the user's generators back as they were."""
        assert self._user_states is not None
        _generator.__class__ = self._user_class
        for name in _BOUND_NAMES:
            setattr(random, name, getattr(_generator, name))
        _numpy_random.set_bit_generator(self._user_bits)
        _generator.setstate(self._user_states[0])
        np.random.set_state(self._user_states[1])
        self._user_bits = self._user_states = None

    def forget(self) -> None:
        """Drop what NumPy keeps of an item's normal draws; call it after one that drew."""
        _numpy_random.set_bit_generator(_item_bits)
