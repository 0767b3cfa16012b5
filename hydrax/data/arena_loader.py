"""A data loader over any loader function, for programs under ``jit``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from hydrax import _context, _core
from hydrax._arguments import check_int
from hydrax._datagroup import DataGroup
from hydrax._sequences import take_array
from hydrax._shared_items import readable
from hydrax.data._draws import ORDERED, Chain, Selections
from hydrax.data._host import SourceDataLoader
from hydrax.data._loaders import array_struct
from hydrax.data._source import DrawSource

__all__ = ["ArenaDataLoader"]

_SEED_COUNT = 2**31
# Draws whose rows are looked up at a time.
_KEPT_DRAWS = 16


@dataclass(frozen=True)
class _LoadedRun:
    """What loader_context() tells about the items that are being loaded."""

    epoch: int
    kind: int
    group: int = 0


class _ArenaSource(DrawSource):
    """Loads the observations of each draw by calls of a loader function."""

    def __init__(
        self,
        loader_func: Callable[..., Any],
        group: DataGroup[Any],
        mb_size: int,
        *,
        is_batched: bool,
        worker_count: int,
        startup_func: Callable[[], None] | None,
    ) -> None:
        self._loader_func = loader_func
        self._group = group
        self._data = readable(group.data)
        self._specs = sorted(group.specs, key=lambda spec: spec.name)
        self._names = [spec.name for spec in self._specs]
        self._mb_size = mb_size
        self.is_itemwise = not is_batched
        self.worker_count = worker_count
        self._startup_func = startup_func
        self._selections = Selections(len(group), mb_size)
        # The rows around those that were loaded last: chain, number of the first, index, mask.
        self._kept: tuple[Chain, int, list[int], list[bool]] = (ORDERED, 0, [], [])

    @property
    def specs(self) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        return [(spec.shape, spec.dtype) for spec in self._specs]

    def start(self) -> None:
        if self._startup_func is not None:
            self._startup_func()

    def load(
        self,
        chain: Chain,
        first: int,
        count: int,
        arrays: Sequence[NDArray[Any]],
        mask: NDArray[np.bool_],
    ) -> None:
        indices, valid = self._selections[chain].block(first, count)
        np.copyto(mask, valid)
        rows = count * self._mb_size
        start = first * self._mb_size
        seeds = None
        if not chain.is_ordered:
            seeds = np.array([_seed(chain, start + row) for row in range(rows)], np.int64)
        parts = {
            name: array.reshape(rows, *array.shape[2:])
            for name, array in zip(self._names, arrays, strict=True)
        }
        # A range's items are made of the indices in their place, which the selection keeps.
        descriptors = take_array(self._data, indices.reshape(-1).copy())
        previous = self._enter(chain, start)
        try:
            self._loader_func(descriptors, MappingProxyType(parts), seeds)
        finally:
            _context.set_run(*previous)

    def load_items(
        self,
        chain: Chain,
        first: int,
        count: int,
        arrays: Sequence[NDArray[Any]],
        mask: NDArray[np.bool_],
        begin: Callable[[int, int], None],
    ) -> None:
        indices, valid = self._rows(chain, first, count)
        mask[:] = valid
        loader_func = self._loader_func
        data = self._data
        names = self._names
        previous = self._enter(chain, first)
        try:
            for row, index in enumerate(indices):
                seed = _seed(chain, first + row)
                begin(row, seed)
                views = {name: array[row, ...] for name, array in zip(names, arrays, strict=True)}
                loader_func(
                    data[index], MappingProxyType(views), None if chain.is_ordered else seed
                )
        finally:
            _context.set_run(*previous)

    def _rows(self, chain: Chain, first: int, count: int) -> tuple[list[int], list[bool]]:
        """Index and mask of some rows; those near the last ones are at hand."""
        kept, start, indices, valid = self._kept
        if kept != chain or first < start or first + count > start + len(indices):
            first_draw = first // self._mb_size
            draw_count = -(-(first + count) // self._mb_size) - first_draw
            found = self._selections[chain].block(first_draw, max(draw_count, _KEPT_DRAWS))
            indices, valid = found[0].reshape(-1).tolist(), found[1].reshape(-1).tolist()
            start = first_draw * self._mb_size
            self._kept = chain, start, indices, valid
        begin = first - start
        return indices[begin : begin + count], valid[begin : begin + count]

    def _enter(self, chain: Chain, position: int) -> tuple[Any, int]:
        kind = _core.VALIDATION if chain.is_ordered else _core.TRAINING
        run: Any = _LoadedRun(position // len(self._group), kind)
        return _context.set_run(run, 0 if chain.is_ordered else 1)


def _seed(chain: Chain, position: int) -> int:
    """Seed of the observation at a position of a chain."""
    key = _core.mix(chain.seed & (2**64 - 1), chain.seed >> 64)
    return _core.permute(key, _SEED_COUNT, position % _SEED_COUNT)


class ArenaDataLoader(SourceDataLoader):
    """Draws from whatever a loader function can load: files to decode, data to augment.

    Args:
        loader_func: Called as ``loader_func(descriptor, arrays, seed)`` for each observation, in a
            loader process, as by :class:`hydrax.Dataloader`. ``seed`` is an int in [0, 2**31) that
            depends on the draw alone; where the data are mapped in order it is None. What it
            returns is dropped. It must not use JAX.
        data_group: The observations. Their number in a mini-batch is the wrapper's ``mb_size``, not
            the group's batch size; order and seeds are the chain's.
        worker_count: Loader processes, by default one per processor, two at least.
        startup_func: Called once in each loader process before it loads.
        batched: Whether ``loader_func`` takes many observations in one call, as by
            :class:`hydrax.Dataloader`.

    Raises:
        TypeError: An argument is of the wrong kind.

    Example:
        >>> import hydrax
        >>> from hydrax.data import full_data_mapper
        >>> def load(number, arrays, seed):
        ...     arrays["x"][...] = number**2
        >>> group = hydrax.DataGroup(1, range(10), loader_arrays={"x": ((), "f4", "f4")})
        >>> mapper, release = full_data_mapper(ArenaDataLoader(load, group), 2, 3)
        >>> results, _ = mapper(lambda batch, state: (batch["x"], state), None)
        >>> float(results.sum())
        285.0
        >>> release()
    """

    def __init__(
        self,
        loader_func: Callable[..., Mapping[str, Any] | None],
        data_group: DataGroup[Any],
        *,
        worker_count: int | None = None,
        startup_func: Callable[[], None] | None = None,
        batched: bool = False,
    ) -> None:
        super().__init__()
        if not callable(loader_func):
            raise TypeError(f"loader_func is {loader_func!r}; expected a callable")
        if startup_func is not None and not callable(startup_func):
            raise TypeError(f"startup_func is {startup_func!r}; expected a callable or None")
        if not isinstance(data_group, DataGroup):
            raise TypeError(f"data_group is {type(data_group).__name__}; expected a DataGroup")
        if worker_count is None:
            worker_count = max(2, os.cpu_count() or 1)
        self._worker_count = check_int("worker_count", worker_count, minimum=1, maximum=2**12)
        self._loader_func = loader_func
        self._group = data_group
        self._startup_func = startup_func
        self._is_batched = bool(batched)

    @property
    def static_information(self) -> dict[str, Any]:
        """``{"observation_count": int}``."""
        return {"observation_count": len(self._group)}

    @property
    def _format(self) -> dict[str, jax.ShapeDtypeStruct]:
        specs = sorted(self._group.specs, key=lambda spec: spec.name)
        return {spec.name: array_struct(spec.shape, spec.jax_dtype) for spec in specs}

    def _source(self, mb_size: int) -> DrawSource:
        return _ArenaSource(
            self._loader_func,
            self._group,
            mb_size,
            is_batched=self._is_batched,
            worker_count=self._worker_count,
            startup_func=self._startup_func,
        )
