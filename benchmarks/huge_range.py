"""A group over ``range(10**9)`` with items shuffled: time to the first batch, memory added."""

from __future__ import annotations

import gc
import time
from typing import Any

import harness
import numpy as np
from harness import HYDRAX, Target

BATCH_SIZE = 256
ITEM_COUNT = 10**9

CONTENDERS = (HYDRAX,)
TARGETS = (
    Target("range(10**9), shuffled: start", "s", (HYDRAX, "start_s"), None, 0.2, at_least=False),
    Target(
        "range(10**9), shuffled: memory added",
        "MB",
        (HYDRAX, "added_mb"),
        None,
        20,
        at_least=False,
    ),
)


def load_items(indices: Any, arrays: Any, seeds: Any) -> None:
    """The loader function."""
    arrays["x"][:] = indices


def measure(contender: str, seconds: float) -> harness.Result:
    """Start of everything, from the DataGroup on, in seconds; memory of all processes in MB."""
    import jax

    import hydrax

    jax.numpy.ones(8).block_until_ready()
    gc.collect()
    before_nbytes = harness.pss_nbytes()
    begin = time.perf_counter()
    group = hydrax.DataGroup(
        BATCH_SIZE,
        range(ITEM_COUNT),
        loader_arrays={"x": ((), np.int64, np.int32)},
        shuffle_first=True,
    )
    dataloader = hydrax.Dataloader(
        load_items, group, loader_count=harness.WORKER_COUNT, batched=True
    )
    with harness.quiet_fork(), dataloader:
        batch = next(iter(dataloader))
        batch.arrays["x"].block_until_ready()
        start_s = time.perf_counter() - begin
        after_nbytes = harness.pss_nbytes() + sum(map(harness.pss_nbytes, harness.child_pids()))
        del batch
    return {"start_s": start_s, "added_mb": (after_nbytes - before_nbytes) / 1e6}


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
