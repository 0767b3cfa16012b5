"""Large items: uint8 224x224x3 filled by the loader, batch 64."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import harness
import numpy as np
from harness import GRAIN, HYDRAX, HYDRAX_022, IN_PROCESS, TORCH, Target

BATCH_SIZE = 64
ITEM_COUNT = 100_000
SHAPE = (224, 224, 3)
BARE = "two bare processes"

CONTENDERS = (HYDRAX, HYDRAX_022, TORCH, GRAIN, IN_PROCESS, BARE)
_LABEL = "uint8 224x224x3, batch 64"
TARGETS = tuple(
    Target(_LABEL, "batches/s", (HYDRAX, "batches_per_s"), (reference, "batches_per_s"), limit)
    for reference, limit in (
        (HYDRAX_022, 3),
        (TORCH, None),
        (GRAIN, None),
        (IN_PROCESS, None),
        (BARE, 0.8),
    )
)


def load_item(index: int, arrays: Any, seed: int | None) -> None:
    """The loader function: one image of one value."""
    arrays["image"].fill(index & 255)


def make_image(index: int) -> np.ndarray:
    """The same image for loaders that stack items themselves."""
    return np.full(SHAPE, index & 255, np.uint8)


class TorchImages:
    """The same images as a PyTorch map-style data set of tensors."""

    def __len__(self) -> int:
        return ITEM_COUNT

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full(SHAPE, index & 255, dtype=torch.uint8)


def in_process_batches(slot_count: int) -> Iterator[np.ndarray]:
    """The loader called in this process, into NumPy arrays made beforehand."""
    slots = [np.empty((BATCH_SIZE, *SHAPE), np.uint8) for _ in range(slot_count)]
    order = np.random.default_rng(0).permutation(ITEM_COUNT).tolist()
    while True:
        for start in range(0, ITEM_COUNT - BATCH_SIZE, BATCH_SIZE):
            array = slots[start // BATCH_SIZE % slot_count]
            for position, index in enumerate(order[start : start + BATCH_SIZE]):
                load_item(index, {"image": array[position]}, start)
            yield array


def bare_rate(seconds: float) -> float:
    """Batches per second of two processes that fill arrays of their own and hand nothing over.

    Together they go round three batches, as two workers do in an arena of depth 3; rounded up to
    two for each.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(harness.WORKER_COUNT)
    rates = context.SimpleQueue()

    def fill() -> None:
        barrier.wait()
        batches = in_process_batches(slot_count=2)
        rates.put(harness.batches_per_second(batches, lambda batch: None, seconds))

    processes = [context.Process(target=fill) for _ in range(harness.WORKER_COUNT)]
    for process in processes:
        process.start()
    total = sum(rates.get() for _ in processes)
    for process in processes:
        process.join()
    return float(total)


def measure(contender: str, seconds: float) -> harness.Result:
    """Batches per second of one contender."""
    if contender in (HYDRAX, HYDRAX_022):
        group = {
            "batch_size": BATCH_SIZE,
            "data": range(ITEM_COUNT),
            "loader_arrays": {"image": (SHAPE, np.uint8, np.uint8)},
        }
        return {"batches_per_s": harness.hydrax_rate(contender, load_item, None, group, seconds)}
    if contender == BARE:
        return {"batches_per_s": bare_rate(seconds)}
    batches: Iterator[Any]
    if contender == TORCH:
        batches = harness.torch_batches(TorchImages(), BATCH_SIZE)
    elif contender == GRAIN:
        batches = harness.grain_batches(ITEM_COUNT, make_image, None, BATCH_SIZE)
    else:
        batches = in_process_batches(harness.DEPTH)
    return {"batches_per_s": harness.batches_per_second(batches, lambda batch: None, seconds)}


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
