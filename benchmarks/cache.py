"""The second epoch from the disk cache against reading the same files from the page cache.

The bare loop maps each file with ``mmap`` and sums its float32 values with NumPy; the other one
sums the same values from the jax.Arrays of the batches. Each sum reads every byte once. The two
take turns in one process, an epoch each; the share is the median over such pairs. Hydrax 0.2.2 is
no contender: its memory comes back so late that this loop stalls, or needs a collection a batch.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from typing import Any

import harness
import numpy as np
from harness import HYDRAX, Target

CONTENDERS = (HYDRAX,)
BATCH_SIZE = 8
EPOCH_NBYTES = 2**29
LARGE, SMALL = 2**25, 2**20
"""Bytes of a batch; 64 images of 224x224 as float32 have 37 MB, vectors of 4,096 have 1 MB."""
MIN_EPOCHS = 4

TARGETS = (
    Target("disk cache, batches of 32 MiB", "x mmap and sum", (HYDRAX, "large_share"), None, 0.8),
    Target("disk cache, batches of 1 MiB", "x mmap and sum", (HYDRAX, "small_share"), None, None),
    Target("disk cache, batches of 32 MiB", "GB/s", (HYDRAX, "large_gb_per_s"), None, None),
    Target("disk cache, batches of 1 MiB", "GB/s", (HYDRAX, "small_gb_per_s"), None, None),
)


def load(number: int, arrays: Any, seed: Any) -> None:
    arrays["x"][:] = number % 8


def total(array: Any) -> float:
    return float(np.asarray(array).sum())


def bare_epoch(folder: str, batch_nbytes: int) -> float:
    """Seconds that the bare loop takes for all files."""
    start = time.perf_counter()
    result = 0.0
    for number in range(EPOCH_NBYTES // batch_nbytes):
        with open(os.path.join(folder, f"e0-b{number}.batch"), "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        result += total(np.frombuffer(mapped, np.float32, batch_nbytes // 4, offset=128))
        del mapped
    assert result == 3.5 * EPOCH_NBYTES // 4
    return time.perf_counter() - start


def measure_size(batch_nbytes: int, seconds: float) -> tuple[float, float]:
    """Share of the bare loop's speed, and GB/s, in the second and later epochs."""
    import hydrax

    count = EPOCH_NBYTES // batch_nbytes
    bare: list[float] = []
    cached: list[float] = []
    with tempfile.TemporaryDirectory() as folder, harness.quiet_fork():
        location = os.path.join(folder, "cache")
        group = hydrax.DataGroup(
            BATCH_SIZE,
            range(count * BATCH_SIZE),
            loader_arrays={"x": ((batch_nbytes // 4 // BATCH_SIZE,), np.float32, np.float32)},
            cache_location=location,
        )
        with hydrax.Dataloader(load, group, depth=harness.DEPTH) as dataloader:
            result, start = 0.0, time.perf_counter()
            for batch in dataloader:
                result += total(batch.arrays["x"])
                epoch, is_last = batch.epoch, batch.epoch_batch == count - 1
                del batch
                if not is_last:
                    continue
                assert result == 3.5 * EPOCH_NBYTES // 4
                if epoch >= 1:  # the first one fills the cache
                    cached.append(time.perf_counter() - start)
                    bare.append(bare_epoch(location, batch_nbytes))
                if len(cached) >= MIN_EPOCHS and sum(cached) + sum(bare) > seconds:
                    break
                result, start = 0.0, time.perf_counter()
            dataloader.interrupt()
    shares = [before / after for before, after in zip(bare, cached, strict=True)]
    return statistics.median(shares), EPOCH_NBYTES / statistics.median(cached) / 1e9


def measure(contender: str, seconds: float) -> harness.Result:
    """Both sizes of batches."""
    large_share, large_rate = measure_size(LARGE, seconds / 2)
    small_share, small_rate = measure_size(SMALL, seconds / 2)
    return {
        "large_share": large_share,
        "small_share": small_share,
        "large_gb_per_s": large_rate,
        "small_gb_per_s": small_rate,
    }


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
