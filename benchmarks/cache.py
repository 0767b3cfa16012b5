"""The second epoch from the disk cache against reading the same files from the page cache.

The bare loop maps each file with ``mmap`` and sums its float32 values with NumPy; the other one
sums the same values from the jax.Arrays of the batches. Each sum reads every byte once. The two
take turns in one process, an epoch each, so that whatever else the machine does meets both; the
best epoch of each counts. Hydrax 0.2.2 maps its files too, and checks nothing.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from typing import Any

import harness
import numpy as np
from harness import HYDRAX, HYDRAX_022, Target

CONTENDERS = (HYDRAX, HYDRAX_022)
BATCH_SIZE = 8
BATCH_COUNT = 48
ITEM_FLOATS = 2**18  # a batch is 8 MiB
MIN_EPOCHS = 4

TARGETS = (
    Target("disk cache, second epoch", "x mmap and sum", (HYDRAX, "share"), None, 0.8),
    Target(
        "disk cache, second epoch", "GB/s", (HYDRAX, "gb_per_s"), (HYDRAX_022, "gb_per_s"), None
    ),
)


def load(number: int, arrays: Any, seed: Any) -> None:
    arrays["x"][:] = number


def total(array: Any) -> float:
    return float(np.asarray(array).sum())


EXPECTED = float(sum(range(BATCH_COUNT * BATCH_SIZE)) * ITEM_FLOATS)


def bare_epoch(contender: str, folder: str) -> float:
    """Seconds that the bare loop takes for all files."""
    suffix, offset = (".batch", 128) if contender == HYDRAX else (".dat", 0)
    start = time.perf_counter()
    result = 0.0
    for number in range(BATCH_COUNT):
        with open(os.path.join(folder, f"e0-b{number}{suffix}"), "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        result += total(np.frombuffer(mapped, np.float32, BATCH_SIZE * ITEM_FLOATS, offset))
        del mapped
    assert result == EXPECTED
    return time.perf_counter() - start


def measure(contender: str, seconds: float) -> harness.Result:
    """Speed of the second and later epochs, and its share of the bare loop's."""
    import jax

    import hydrax

    bare: list[float] = []
    cached: list[float] = []
    with tempfile.TemporaryDirectory() as folder, harness.quiet_fork():
        group = hydrax.DataGroup(
            BATCH_SIZE,
            range(BATCH_COUNT * BATCH_SIZE),
            loader_arrays={"x": ((ITEM_FLOATS,), np.float32, np.float32)},
            cache_location=os.path.join(folder, "cache"),
        )
        with hydrax.Dataloader(load, group, depth=harness.DEPTH) as dataloader:
            result, start = 0.0, time.perf_counter()
            for batch in dataloader:
                result += total(batch.arrays["x"])
                epoch, is_last = batch.epoch, batch.epoch_batch == BATCH_COUNT - 1
                del batch
                if contender == HYDRAX_022:
                    jax.device_put(0)  # gives the memory back
                if not is_last:
                    continue
                assert result == EXPECTED
                if epoch >= 1:  # the first one fills the cache
                    cached.append(time.perf_counter() - start)
                    bare.append(bare_epoch(contender, os.path.join(folder, "cache")))
                if len(cached) >= MIN_EPOCHS and sum(cached) + sum(bare) > seconds:
                    break
                result, start = 0.0, time.perf_counter()
            dataloader.interrupt()
    return {
        "share": min(bare) / min(cached),
        "gb_per_s": BATCH_COUNT * BATCH_SIZE * ITEM_FLOATS * 4 / min(cached) / 1e9,
    }


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
