"""Host data loaders that load in processes of their own: what they have in common."""

from __future__ import annotations

import abc
import itertools
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from hydrax._arguments import check_int
from hydrax._convert import convert
from hydrax.data import _draws
from hydrax.data._draws import ORDERED, Chain
from hydrax.data._engine import DrawEngine, ErrorBox
from hydrax.data._loaders import HostDataLoader
from hydrax.data._source import DrawSource
from hydrax.errors import StateError

__all__ = ["SourceDataLoader", "check_sizes"]

PyTree = Any


def check_sizes(observation_count: int, cache_size: Any, mb_size: Any) -> tuple[int, int]:
    """Check the sizes of a chain against the data set.

    Raises:
        TypeError: A size is not an int.
        ValueError: A size is out of range; names both numbers.
    """
    cache_size = check_int("cached_batches_count", cache_size, minimum=1)
    mb_size = check_int("mb_size", mb_size, minimum=1)
    if mb_size > observation_count:
        raise ValueError(
            f"mb_size is {mb_size}, but the data set has only {observation_count} observations"
        )
    return cache_size, mb_size


@dataclass
class _Registered:
    """A chain that was begun.

    Attributes:
        chain: Which draws it has.
        cache_size: Draws that get_batches() returns at a time.
        mb_size: Observations of a draw.
        draws: Draws that get_batches() has returned so far.
    """

    chain: Chain
    cache_size: int
    mb_size: int
    draws: int = 0


class SourceDataLoader(HostDataLoader):
    """A host data loader over a :class:`DrawSource`.

    A subclass implements :attr:`_format`, :attr:`static_information` and :meth:`_source`.
    """

    def __init__(self) -> None:
        self._chains: dict[int, _Registered] = {}
        self._chain_ids = itertools.count()
        self._sources: dict[int, DrawSource] = {}  # that get_batches() loads from, by mb_size
        self._errors = ErrorBox()
        self._engines: weakref.WeakSet[DrawEngine] = weakref.WeakSet()
        self._source_lock = threading.RLock()

    @abc.abstractmethod
    def _source(self, mb_size: int) -> DrawSource:
        """A new source of draws of mb_size observations."""

    def _random_chain(self, **kwargs: Any) -> Chain:
        """The chain that the arguments of register_random_pipeline() ask for."""
        unknown = kwargs.keys() - {"seed", "shuffle", "in_epochs"}
        if unknown:
            raise TypeError(
                f"a chain of random draws has no option {', '.join(sorted(unknown))}; its options "
                "are seed, shuffle and in_epochs"
            )
        return _draws.random_chain(**kwargs)

    @property
    def _observation_count(self) -> int:
        return int(self.static_information["observation_count"])

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that the draws of this loader can take, over all its wrappers.

        Nothing is cached on a CPU device: programs copy out of this memory one draw at a time.
        """
        return sum(engine.nbytes for engine in self._engines)

    def make_engine(
        self,
        *,
        cache_size: int,
        mb_size: int,
        worker_count: int | None,
        timeout_s: float | None,
        box: ErrorBox,
    ) -> DrawEngine:
        """An engine that serves the draws of this loader; the caller closes it."""
        dtypes = [
            np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))
            for leaf in jax.tree.leaves(self._format)
        ]
        engine = DrawEngine(
            self._source(mb_size),
            mb_size=mb_size,
            cache_size=cache_size,
            observation_count=self._observation_count,
            dtypes=dtypes,
            labels=self._labels(),
            boxes=(box, self._errors),
            worker_count=worker_count,
            timeout_s=timeout_s,
        )
        self._engines.add(engine)
        return engine

    def _labels(self) -> list[str]:
        """What to call the leaves in messages."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._format)
        return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]

    def registered_chain(self, chain_id: int) -> Chain:
        """Which draws a chain has."""
        return self._registered(chain_id).chain

    def _registered(self, chain_id: int) -> _Registered:
        try:
            return self._chains[int(chain_id)]
        except KeyError:
            raise KeyError(f"there is no chain {int(chain_id)} in this data loader") from None

    def _register(self, chain: Chain, chain_id: int, cache_size: Any, mb_size: Any) -> int:
        if mb_size is None:
            raise ValueError("mb_size is None: say how many observations a mini-batch is to have")
        cache_size, mb_size = check_sizes(self._observation_count, cache_size, mb_size)
        self._chains[chain_id] = _Registered(chain, cache_size, mb_size)
        return chain_id

    def register_random_pipeline(
        self, cache_size: int = 1, mb_size: int | None = None, **kwargs: Any
    ) -> int:
        """Begin a chain of random mini-batches.

        Args:
            cache_size: Mini-batches that :meth:`get_batches` returns at a time.
            mb_size: Observations of a mini-batch.
            **kwargs: ``seed``: of the random order, an int; the id of the chain if it is left out,
                one from the operating system for None. ``shuffle``: take all observations in a
                random order, and then in another one, instead of drawing each independently.
                ``in_epochs``: with ``shuffle``, begin each order with a mini-batch of its own; what
                fills up the last one before is marked by a mask of False.

        Returns:
            The id of the chain.

        Raises:
            TypeError: Another option is given.
            ValueError: A size or the seed is out of range.
        """
        chain_id = next(self._chain_ids)
        kwargs.setdefault("seed", chain_id)
        return self._register(self._random_chain(**kwargs), chain_id, cache_size, mb_size)

    def register_ordered_pipeline(
        self, cache_size: int = 1, mb_size: int | None = None, **kwargs: Any
    ) -> int:
        """Begin a chain of mini-batches in the order of the data.

        The last mini-batch of a pass is filled up from the start of the data, where its mask is
        False; then the next pass begins.

        Args:
            cache_size: Mini-batches that :meth:`get_batches` returns at a time.
            mb_size: Observations of a mini-batch.
            **kwargs: Ignored.

        Returns:
            The id of the chain.

        Raises:
            ValueError: A size is out of range.
        """
        return self._register(ORDERED, next(self._chain_ids), cache_size, mb_size)

    def get_batches(self, chain_id: int) -> tuple[PyTree, NDArray[np.bool_]]:
        """The next mini-batches of a chain, loaded in this process.

        Args:
            chain_id: As a ``register`` method returned it.

        Returns:
            The pytree of an observation with NumPy leaves ``(cache_size, mb_size, ...)``, and the
            mask, ``(cache_size, mb_size)`` bool.
        """
        registered = self._registered(chain_id)
        shape = registered.cache_size, registered.mb_size
        structs, treedef = jax.tree.flatten(self._format)
        with self._source_lock:
            source = self._sources.get(registered.mb_size)
            if source is None:
                source = self._source(registered.mb_size)
                source.start()
                self._sources[registered.mb_size] = source
            leaves = [np.empty(shape + item, dtype) for item, dtype in source.specs]
            mask = np.empty(shape, np.bool_)
            first = registered.draws
            if source.is_itemwise:
                rows = shape[0] * shape[1]
                source.load_items(
                    registered.chain,
                    first * registered.mb_size,
                    rows,
                    [leaf.reshape(rows, *leaf.shape[2:]) for leaf in leaves],
                    mask.reshape(rows),
                    lambda number, seed: None,
                )
            else:
                self._load(source, registered, leaves, mask)
            registered.draws += registered.cache_size
        placed = []
        for label, leaf, struct in zip(self._labels(), leaves, structs, strict=True):
            dtype = np.dtype(jax.dtypes.canonicalize_dtype(struct.dtype))
            if leaf.dtype != dtype:
                target = np.empty(leaf.shape, dtype)
                convert(label, leaf, target)
                leaf = target
            placed.append(leaf)
        return jax.tree.unflatten(treedef, placed), mask

    @staticmethod
    def _load(
        source: DrawSource,
        registered: _Registered,
        leaves: list[NDArray[Any]],
        mask: NDArray[np.bool_],
    ) -> None:
        source.load(registered.chain, registered.draws, registered.cache_size, leaves, mask)

    def save_state(self, chain_id: int) -> dict[str, Any]:
        """What is needed to go on with a chain where :meth:`get_batches` stands.

        Programs that draw under ``jit`` carry their place in the :class:`CacheState` instead: save
        that.

        Args:
            chain_id: As a ``register`` method returned it.

        Returns:
            A small dict of ints and strings, which can be written as JSON.
        """
        registered = self._registered(chain_id)
        if registered.chain.is_ordered:
            return {"ordered": {"draws": registered.draws, "mb_size": registered.mb_size}}
        return {
            "random": {
                "seed": hex(registered.chain.seed),
                "options": registered.chain.options,
                "draws": registered.draws,
                "mb_size": registered.mb_size,
            }
        }

    def load_state(self, chain_id: int, data: Any) -> None:
        """Let a chain go on where :meth:`save_state` was called.

        Args:
            chain_id: A chain of the same kind and ``mb_size``; its cache size may be another.
            data: What :meth:`save_state` returned; stays as it is.

        Raises:
            StateError: The data are of another kind of chain, or not of this package.
        """
        registered = self._registered(chain_id)
        kind = "ordered" if registered.chain.is_ordered else "random"
        if not isinstance(data, Mapping) or not isinstance(data.get(kind), Mapping):
            raise StateError(f"the state is not one of a chain of {kind} draws of this package")
        saved = data[kind]
        try:
            draws, mb_size = int(saved["draws"]), int(saved["mb_size"])
            chain = (
                ORDERED
                if kind == "ordered"
                else Chain(False, int(saved["seed"], 16), int(saved["options"]))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError("the state is incomplete") from error
        if mb_size != registered.mb_size:
            raise StateError(
                f"the state is of mini-batches of {mb_size} observations, but the chain's have "
                f"{registered.mb_size} (mb_size)"
            )
        registered.chain = chain
        registered.draws = draws
