"""Rows of 100 bytes, batch 1,024, batched, against plain NumPy fancy indexing of the same data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import harness
import numpy as np
from harness import HYDRAX_BATCHED, Target

BATCH_SIZE = 1_024
ITEM_COUNT = 1_000_000
SHAPE = (100,)
NUMPY = "NumPy fancy indexing"

CONTENDERS = (HYDRAX_BATCHED, NUMPY)
TARGETS = (
    Target(
        "rows of 100 bytes, batch 1,024, batched=True",
        "rows/s",
        (HYDRAX_BATCHED, "rows_per_s"),
        (NUMPY, "rows_per_s"),
        1 / 3,
    ),
)

ROWS: np.ndarray
"""The data set, ``(ITEM_COUNT, 100)`` uint8. Set by :func:`measure`."""


def load_items(indices: Any, arrays: Any, seeds: Any) -> None:
    """The loader function."""
    arrays["row"][:] = ROWS[indices]


def numpy_batches() -> Iterator[np.ndarray]:
    """Batches made by fancy indexing, in a new order each epoch."""
    generator = np.random.default_rng(0)
    while True:
        order = generator.permutation(ITEM_COUNT)
        for start in range(0, ITEM_COUNT - BATCH_SIZE, BATCH_SIZE):
            yield ROWS[order[start : start + BATCH_SIZE]]


def measure(contender: str, seconds: float) -> harness.Result:
    """Rows per second of one contender."""
    global ROWS
    ROWS = np.random.default_rng(0).integers(0, 256, (ITEM_COUNT, *SHAPE), np.uint8)
    if contender == NUMPY:
        rate = harness.batches_per_second(numpy_batches(), lambda batch: None, seconds)
    else:
        group = {
            "batch_size": BATCH_SIZE,
            "data": range(ITEM_COUNT),
            "loader_arrays": {"row": (SHAPE, np.uint8, np.uint8)},
        }
        rate = harness.hydrax_rate(contender, load_items, None, group, seconds, batched=True)
    return {"rows_per_s": rate * BATCH_SIZE}


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
