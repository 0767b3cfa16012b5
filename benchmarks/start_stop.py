"""Start-up until the first batch, and leaving: at the end and in the middle of an epoch.

JAX is up before the first time is taken, as it is in a training program, and workers are forked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
from harness import HYDRAX, HYDRAX_022, TORCH, Target

BATCH_SIZE = 64
BATCH_COUNT = 20
ITEM_COUNT = BATCH_SIZE * BATCH_COUNT
SHAPE = (28, 28)

CONTENDERS = (HYDRAX, HYDRAX_022, TORCH)
TARGETS = tuple(
    Target(label, "ms", (HYDRAX, metric), (reference, metric), limit, at_least=False)
    for label, metric in (
        ("start to first batch", "start_ms"),
        ("leaving at the end", "leave_end_ms"),
        ("leaving in mid-epoch", "leave_mid_ms"),
    )
    for reference, limit in ((TORCH, 1.0), (HYDRAX_022, None))
)


def load_item(index: int, arrays: Any, seed: int | None) -> None:
    """The loader function."""
    arrays["image"].fill(index)


class TorchImages:
    """The same images as a PyTorch map-style data set of tensors."""

    def __len__(self) -> int:
        return ITEM_COUNT

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full(SHAPE, float(index))


def run_hydrax(batch_limit: int) -> tuple[float, float]:
    """Seconds until the first batch and seconds to leave after ``batch_limit`` batches."""
    import hydrax

    group = hydrax.DataGroup(
        BATCH_SIZE, range(ITEM_COUNT), loader_arrays={"image": (SHAPE, np.float32, np.float32)}
    )
    dataloader = hydrax.Dataloader(
        load_item,
        group,
        loader_count=harness.WORKER_COUNT,
        depth=harness.DEPTH,
        end_at=("epoch", 1),
    )
    import jax

    count = 0
    begin = time.perf_counter()
    with dataloader:
        for batch in dataloader:
            batch.arrays["image"]
            if count == 0:
                start_s = time.perf_counter() - begin
            del batch
            jax.device_put(0)
            count += 1  # by hand: enumerate() holds a batch, which stops 0.2.2
            leave_from = time.perf_counter()
            if count == batch_limit:
                break
    return start_s, time.perf_counter() - leave_from


def run_torch(batch_limit: int) -> tuple[float, float]:
    """The same for a PyTorch DataLoader, whose iterator starts and ends the workers."""
    import torch

    loader = torch.utils.data.DataLoader(
        TorchImages(),
        batch_size=BATCH_SIZE,
        shuffle=False,
        num_workers=harness.WORKER_COUNT,
        prefetch_factor=harness.DEPTH,
        multiprocessing_context="fork",
    )
    begin = time.perf_counter()
    batches = iter(loader)
    for count, batch in enumerate(batches, 1):
        if count == 1:
            start_s = time.perf_counter() - begin
        del batch
        leave_from = time.perf_counter()
        if count == batch_limit:
            break
    del batches
    return start_s, time.perf_counter() - leave_from


def measure(contender: str, seconds: float) -> harness.Result:
    """Medians over several runs in one process, the first of which is not counted."""
    import jax

    jax.numpy.ones(8).block_until_ready()
    run: Callable[[int], tuple[float, float]] = run_torch if contender == TORCH else run_hydrax
    at_end, in_middle = [], []
    with harness.quiet_fork():
        run(BATCH_COUNT // 2)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(at_end) < 3:
            at_end.append(run(BATCH_COUNT + 1))
            in_middle.append(run(BATCH_COUNT // 2))
    return {
        "start_ms": statistics.median(start for start, _ in at_end + in_middle) * 1e3,
        "leave_end_ms": statistics.median(leave for _, leave in at_end) * 1e3,
        "leave_mid_ms": statistics.median(leave for _, leave in in_middle) * 1e3,
    }


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
