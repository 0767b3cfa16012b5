"""Per-item overhead: 8 float32 an item, batch 256, one loader call an item, or batched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import harness
import numpy as np
from harness import (
    GRAIN,
    HYDRAX,
    HYDRAX_022,
    HYDRAX_BATCHED,
    IN_PROCESS,
    TORCH,
    TORCH_TUNED,
    Target,
)

BATCH_SIZE = 256
ITEM_COUNT = 1_000_000
SHAPE = (8,)

CONTENDERS = (HYDRAX, HYDRAX_BATCHED, HYDRAX_022, TORCH, TORCH_TUNED, GRAIN, IN_PROCESS)
_LABEL = "8 float32 an item, batch 256"
TARGETS = tuple(
    Target(label, "items/s", (ours, "items_per_s"), (reference, "items_per_s"), limit)
    for label, ours, reference, limit in (
        (f"{_LABEL}, a call an item", HYDRAX, HYDRAX_022, 15),
        (f"{_LABEL}, a call an item", HYDRAX, TORCH, 5),
        (f"{_LABEL}, a call an item", HYDRAX, TORCH_TUNED, None),
        (f"{_LABEL}, a call an item", HYDRAX, GRAIN, 5),
        (f"{_LABEL}, a call an item", HYDRAX, IN_PROCESS, 0.7),
        (f"{_LABEL}, batched=True", HYDRAX_BATCHED, HYDRAX_022, 40),
    )
)

ROWS: np.ndarray
"""The data set, in memory: ``(ITEM_COUNT, 8)`` float32. Set by :func:`prepare`."""


def prepare() -> None:
    """Make the data set, unless this process inherited it."""
    global ROWS
    if "ROWS" not in globals():
        ROWS = np.random.default_rng(0).random((ITEM_COUNT, *SHAPE), np.float32)


def load_item(index: int, arrays: Any, seed: int | None) -> None:
    """The loader function with a call an item."""
    arrays["x"][:] = ROWS[index]


def load_items(indices: Any, arrays: Any, seeds: Any) -> None:
    """The loader function with a call for a run of items."""
    arrays["x"][:] = ROWS[indices]


def get_row(index: int) -> np.ndarray:
    """The same item for Grain."""
    return ROWS[index]


class TorchRows:
    """The same items as a PyTorch map-style data set."""

    def __len__(self) -> int:
        return ITEM_COUNT

    def __getitem__(self, index: int) -> np.ndarray:
        return ROWS[index]


def in_process_batches() -> Iterator[np.ndarray]:
    """The loader called in this process, into NumPy arrays made beforehand."""
    slots = [np.empty((BATCH_SIZE, *SHAPE), np.float32) for _ in range(harness.DEPTH)]
    order = np.random.default_rng(0).permutation(ITEM_COUNT).tolist()
    seed = 0
    while True:
        for start in range(0, ITEM_COUNT - BATCH_SIZE, BATCH_SIZE):
            array = slots[start // BATCH_SIZE % harness.DEPTH]
            for position, index in enumerate(order[start : start + BATCH_SIZE]):
                load_item(index, {"x": array[position]}, seed)
                seed += 1
            yield array


def measure(contender: str, seconds: float) -> harness.Result:
    """Items per second of one contender."""
    group = {
        "batch_size": BATCH_SIZE,
        "data": range(ITEM_COUNT),
        "loader_arrays": {"x": (SHAPE, np.float32, np.float32)},
    }
    prepare()
    if contender == HYDRAX_BATCHED:
        rate = harness.hydrax_rate(contender, load_items, prepare, group, seconds, batched=True)
    elif contender in (HYDRAX, HYDRAX_022):
        rate = harness.hydrax_rate(contender, load_item, prepare, group, seconds)
    else:
        batches: Iterator[Any]
        if contender == TORCH:
            batches = harness.torch_batches(TorchRows(), BATCH_SIZE)
        elif contender == TORCH_TUNED:
            collate = harness.numpy_collate
            batches = harness.torch_batches(TorchRows(), BATCH_SIZE, collate_fn=collate)
        elif contender == GRAIN:
            batches = harness.grain_batches(ITEM_COUNT, get_row, prepare, BATCH_SIZE)
        else:
            batches = in_process_batches()
        rate = harness.batches_per_second(batches, lambda batch: None, seconds)
    return {"items_per_s": rate * BATCH_SIZE}


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
