"""Draws that Python serves: data loaders of the user's, and devices without a handler in C.

The program keeps a cache of mini-batches in its CacheState and calls back once per cache. What a
callback returns depends on the state alone, so that it can be repeated, left out and vectorised.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from hydrax.data._engine import DrawEngine, ErrorBox
from hydrax.data._loaders import HostDataLoader, array_struct
from hydrax.errors import StateError

__all__ = ["Cached", "EngineServer", "LoaderServer", "Server", "draw_cached"]

PyTree = Any

# Refills of a chain whose results are kept, for draws that are made again.
_KEPT = 2
# States of a user's data loader that are kept, to go back to.
_SAVED = 16


class Server(Protocol):
    """What a program calls back."""

    def fetch(
        self, chain_id: int, words: NDArray[np.uint32], refill: int
    ) -> tuple[list[NDArray[Any]], NDArray[np.bool_]]:
        """Cache number `refill` of a chain: leaves ``(cache, mb, ...)`` and their mask."""


class Cached(NamedTuple):
    """A cache of mini-batches, and the place in it.

    Attributes:
        batches: Leaves ``(cache, mb_size, ...)``.
        valid: ``(cache, mb_size)`` bool.
        line: Mini-batches of the cache that have been drawn.
        words: What the server gets; the last word counts the caches.
    """

    batches: PyTree
    valid: jax.Array
    line: jax.Array
    words: jax.Array


class EngineServer:
    """Serves caches out of an engine.

    Args:
        engine: Whose draws; held by the caller.
        cache_size: Draws of a cache.
    """

    def __init__(self, engine: DrawEngine, cache_size: int) -> None:
        self._engine = engine
        self._cache_size = cache_size

    def fetch(
        self, chain_id: int, words: NDArray[np.uint32], refill: int
    ) -> tuple[list[NDArray[Any]], NDArray[np.bool_]]:
        """Cache number `refill` of the chain that the words say."""
        first = refill * self._cache_size
        draws = [
            self._engine.copy([int(word) for word in words], first + line)
            for line in range(self._cache_size)
        ]
        *leaves, mask = (np.stack(parts) for parts in zip(*draws, strict=True))
        return leaves, mask


class _Chain:
    """How far a chain of a user's data loader has come.

    Args:
        period: Caches after which a chain in the order of the data repeats itself, and numbers of
            caches begin anew; None for random ones.

    Attributes:
        following: The cache that its next get_batches() returns.
        kept: The last caches.
        saved: States before a cache.
    """

    def __init__(self, period: int | None = None) -> None:
        self.period = period
        self.following = 0
        self.kept: OrderedDict[int, tuple[list[NDArray[Any]], NDArray[np.bool_]]] = OrderedDict()
        self.saved: OrderedDict[int, Any] = OrderedDict()


class LoaderServer:
    """Serves caches out of a data loader that the user has written.

    Such a loader goes forwards only. Caches that are asked for again are kept, come again in the
    next pass over the data, or are loaded again from a saved state where the loader saves states;
    caches in between are loaded and dropped.

    Args:
        loader: The data loader.
        structs: Shape and dtype of each leaf of a cache, as JAX gets it.
        box: Gets each error.
    """

    def __init__(
        self, loader: HostDataLoader, structs: list[jax.ShapeDtypeStruct], box: ErrorBox
    ) -> None:
        self._loader = loader
        self._structs = structs
        self._box = box
        self._chains: dict[int, _Chain] = {}
        self._lock = threading.RLock()
        self.is_released = False

    def release(self) -> None:
        """Refuse all that follows, and let go of the loader's data."""
        with self._lock:
            self.is_released = True
            self._chains.clear()
            del self._loader

    def register(self, register: Callable[[HostDataLoader], int], *, is_ordered: bool) -> int:
        """Begin a chain."""
        with self._lock:
            self._check()
            chain_id = int(register(self._loader))
            period = None
            if is_ordered:
                cache_size, mb_size = self._structs[0].shape[:2]
                draws = -(-int(self._loader.static_information["observation_count"]) // mb_size)
                period = draws // math.gcd(draws, cache_size)
            self._chains[chain_id] = _Chain(period)
            return chain_id

    def _check(self) -> None:
        if self.is_released:
            raise RuntimeError("the data loader has been released; make a new one")

    def fetch(
        self, chain_id: int, words: NDArray[np.uint32], refill: int
    ) -> tuple[list[NDArray[Any]], NDArray[np.bool_]]:
        """Cache number `refill` of a chain of the loader."""
        try:
            with self._lock:
                self._check()
                return self._fetch(chain_id, refill)
        except BaseException as error:
            self._box.error = error
            raise

    def _fetch(self, chain_id: int, refill: int) -> tuple[list[NDArray[Any]], NDArray[np.bool_]]:
        chain = self._chains.setdefault(chain_id, _Chain())
        if chain.period is not None:
            refill %= chain.period
        if refill in chain.kept:
            return chain.kept[refill]
        if chain.period is None and refill < chain.following:
            self._go_back(chain, chain_id, refill)
        while True:
            if chain.period is None:
                self._save(chain, chain_id)
            batches, mask = self._loader.get_batches(chain_id)
            result = self._checked(batches, mask)
            number = chain.following
            chain.following = number + 1 if chain.period is None else (number + 1) % chain.period
            chain.kept[number] = result
            while len(chain.kept) > _KEPT:
                chain.kept.popitem(last=False)
            if number == refill:
                return result

    def _save(self, chain: _Chain, chain_id: int) -> None:
        try:
            chain.saved[chain.following] = self._loader.save_state(chain_id)
        except NotImplementedError:
            return
        while len(chain.saved) > _SAVED:
            chain.saved.pop(next(key for key in chain.saved if key != 0))

    def _go_back(self, chain: _Chain, chain_id: int, refill: int) -> None:
        before = [number for number in chain.saved if number <= refill]
        if not before:
            raise StateError(
                f"{type(self._loader).__name__} goes forwards only: mini-batches of cache "
                f"{refill} were asked for after cache {chain.following - 1}; implement save_state "
                "and load_state to go back, or draw from the newest CacheState only"
            )
        number = max(before)
        self._loader.load_state(chain_id, chain.saved[number])
        chain.following = number

    def _checked(self, batches: PyTree, mask: Any) -> tuple[list[NDArray[Any]], NDArray[np.bool_]]:
        """What get_batches() returned, in the shapes and dtypes that the program expects."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batches)]
        if len(leaves) != len(self._structs):
            raise ValueError(
                f"get_batches returned {len(leaves)} arrays; the format has {len(self._structs)}"
            )
        for number, (leaf, struct) in enumerate(zip(leaves, self._structs, strict=True)):
            if leaf.shape != struct.shape:
                raise ValueError(
                    f"get_batches returned shape {leaf.shape} for leaf {number}; expected "
                    f"{struct.shape}: (cache size, mb_size, ...)"
                )
            if leaf.dtype != struct.dtype and not np.can_cast(
                leaf.dtype, struct.dtype, "same_kind"
            ):
                raise TypeError(
                    f"get_batches returned dtype {leaf.dtype} for leaf {number}; expected "
                    f"{struct.dtype}"
                )
            leaves[number] = leaf.astype(struct.dtype)  # a copy: the loader may use it again
        shape = self._structs[0].shape[:2]
        valid = np.ones(shape, np.bool_) if mask is None else np.array(mask, np.bool_)
        return leaves, np.broadcast_to(valid, shape)


def draw_cached(
    server: Callable[[], Server | None],
    structs: PyTree,
    cached: Cached,
    chain_id: jax.Array,
) -> tuple[Cached, tuple[PyTree, jax.Array]]:
    """Draw a mini-batch, calling the server back if the cache is used up.

    Args:
        server: Returns what is called back, or None once it has been released.
        structs: Shape and dtype of the leaves of a cache.
        cached: The cache, and the place in it.
        chain_id: The chain.

    Returns:
        The cache as it is after the draw; the mini-batch and its mask.
    """
    cache_size, mb_size = cached.valid.shape[-2:]
    is_used_up = cached.line >= cache_size
    leaves, treedef = jax.tree.flatten(structs)
    shapes = ([*leaves], array_struct((cache_size, mb_size), np.bool_))

    def serve(
        is_needed: Any, chain: Any, words: Any
    ) -> tuple[list[NDArray[Any]], NDArray[np.bool_]]:
        if not np.asarray(is_needed):  # where the draws are vectorised, both branches run
            zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
            return zeros, np.zeros((cache_size, mb_size), np.bool_)
        found = server()
        if found is None:
            raise RuntimeError("the data loader has been released; make a new one")
        words = np.asarray(words)
        return found.fetch(int(np.asarray(chain)), words, int(words[-1]))

    def refill(cached: Cached) -> Cached:
        fresh, valid = jax.pure_callback(
            serve, shapes, is_used_up, chain_id, cached.words, vmap_method="sequential"
        )
        return Cached(
            jax.tree.unflatten(treedef, fresh),
            valid,
            jnp.zeros_like(cached.line),
            cached.words.at[-1].add(1),
        )

    current = jax.lax.cond(is_used_up, refill, lambda cached: cached, cached)
    batch = jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, current.line, 0, keepdims=False),
        (current.batches, current.valid),
    )
    return current._replace(line=current.line + 1), batch
