"""Loading blocks of draws into an arena, in a loader process. Imports no JAX."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hydrax import _core
from hydrax._convert import convert
from hydrax._failures import describe_failure
from hydrax._random import ItemRandom
from hydrax._specs import ArrayLayout
from hydrax.data._source import DrawSource, chain_from_numbers

__all__ = ["MASK", "DrawJob", "DrawLoader"]

MASK = "mask"
"""Name of the mask in a block's layouts; leaves are named by their numbers."""


@dataclass(frozen=True)
class DrawJob:
    """What the loader processes of one engine do.

    Attributes:
        source: What they load.
        mb_size: Observations of a draw.
        labels: What to call the leaves in messages.
        layouts: Where the leaves, ``"0"``, ``"1"`` and so on, and the mask lie in a slot.
        nice: Added to the niceness of the processes.
    """

    source: DrawSource
    mb_size: int
    labels: Sequence[str]
    layouts: Mapping[str, ArrayLayout]
    nice: int = 0

    @property
    def startup_func(self) -> Callable[[], None]:
        """What a loader process calls first."""
        return self.source.start

    def make_loader(self, arena: _core.Arena) -> DrawLoader:
        """What loads runs in a loader process."""
        return DrawLoader(arena, self)


class DrawLoader:
    """Loads runs of rows into an arena.

    Args:
        arena: Where to load to.
        job: What to load.
    """

    def __init__(self, arena: _core.Arena, job: DrawJob) -> None:
        self._arena = arena
        self._job = job
        self._random = ItemRandom()
        self._dtypes = [dtype for _, dtype in job.source.specs]
        self._slots: dict[int, tuple[list[NDArray[Any]], NDArray[np.bool_]]] = {}

    @property
    def random(self) -> ItemRandom:
        """The global generators' switch."""
        return self._random

    def load(self, run: _core.Run) -> None:
        """Load a run and end it, failed if anything goes wrong."""
        try:
            self._load(run)
            run.complete(None)
        except BaseException as error:
            self.fail(run, error, "loading")

    def fail(self, run: _core.Run, error: BaseException, stage: str) -> None:
        """End a run as failed."""
        run.fail(run.first, pickle.dumps(tuple(describe_failure(error, "", stage))))

    def _load(self, run: _core.Run) -> None:
        source = self._job.source
        chain = chain_from_numbers(run.epoch, run.seed_key, run.seed_start)
        start, stop = run.first, run.first + run.count
        leaves, mask = self._slot_arrays(run.slot)
        slots = [leaf[start:stop] for leaf in leaves]
        parts = [
            slot if slot.dtype == dtype else np.empty(slot.shape, dtype)
            for slot, dtype in zip(slots, self._dtypes, strict=True)
        ]
        first = run.first_position + start
        if source.is_itemwise:

            def begin(number: int, seed: int) -> None:
                if run.begin(start + number, seed):
                    self._random.forget()

            source.load_items(chain, first, run.count, parts, mask[start:stop], begin)
        else:
            mb_size = self._job.mb_size
            count = run.count // mb_size
            source.load(
                chain,
                first // mb_size,
                count,
                [part.reshape(count, mb_size, *part.shape[1:]) for part in parts],
                mask[start:stop].reshape(count, mb_size),
            )
        run.check()  # a loader function may have forked
        for label, part, slot in zip(self._job.labels, parts, slots, strict=True):
            if part is not slot:
                convert(label, part, slot)

    def _slot_arrays(self, slot: int) -> tuple[Sequence[NDArray[Any]], NDArray[np.bool_]]:
        """The leaves and the mask of a slot, one row per observation."""
        arrays = self._slots.get(slot)
        if arrays is None:
            start = slot * self._arena.slot_nbytes
            memory = memoryview(self._arena)
            found = {
                name: np.ndarray(layout.shape, layout.dtype, memory, offset=start + layout.offset)
                for name, layout in self._job.layouts.items()
            }
            mask = found.pop(MASK)
            arrays = self._slots[slot] = (list(found.values()), mask)
        return arrays
