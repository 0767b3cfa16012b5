"""``next()`` on a ready batch against one bare ``jax.dlpack.from_dlpack`` per array."""

from __future__ import annotations

import statistics
import time
from typing import Any

import harness
import numpy as np
from harness import HYDRAX, Target

BATCH_SIZE = 32
SHAPE = (16,)
ARRAY_COUNTS = (1, 4, 16)
READY_COUNT = 16

CONTENDERS = (HYDRAX,)
TARGETS = tuple(
    Target(
        f"next() on a ready batch, arrays: {count}",
        "µs",
        (HYDRAX, f"next_{count}_us"),
        (HYDRAX, f"bare_{count}_us"),
        1.3,
        at_least=False,
        reference_label="bare from_dlpack",
    )
    for count in ARRAY_COUNTS
)


def load_items(indices: Any, arrays: Any, seeds: Any) -> None:
    """A loader that is quick, so that the next batch is ready soon."""
    for array in arrays.values():
        array[:] = 1


def aligned_array() -> np.ndarray:
    """An array that JAX takes without a copy: it starts at a multiple of 64 bytes."""
    nbytes = BATCH_SIZE * SHAPE[0] * 4
    memory = np.zeros(nbytes + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    return memory[offset : offset + nbytes].view(np.float32).reshape(BATCH_SIZE, *SHAPE)


def compare(array_count: int, seconds: float) -> tuple[float, float]:
    """Median microseconds of ``next()`` and of the bare calls, in rounds that take turns.

    A round waits until all slots are ready and then takes them one after the other, so that both
    sides run with warm caches, without a pause, and while no worker is at work.
    """
    import jax

    import hydrax

    names = [f"array_{number}" for number in range(array_count)]
    group = hydrax.DataGroup(
        BATCH_SIZE,
        range(100_000),
        loader_arrays=dict.fromkeys(names, (SHAPE, np.float32, np.float32)),
    )
    dataloader = hydrax.Dataloader(
        load_items, group, loader_count=harness.WORKER_COUNT, depth=READY_COUNT, batched=True
    )
    sources = [[aligned_array() for _ in names] for _ in range(READY_COUNT)]
    from_dlpack = jax.dlpack.from_dlpack
    next_ns: list[int] = []
    bare_ns: list[int] = []

    def take_next(number: int) -> Any:
        batch = next(dataloader)
        return batch, [batch.arrays[name] for name in names]

    def take_bare(number: int) -> Any:
        return [from_dlpack(source) for source in sources[number]]

    with harness.quiet_fork(), dataloader:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(next_ns) < 10 * READY_COUNT:
            for take, times in ((take_next, next_ns), (take_bare, bare_ns)):
                time.sleep(0.02)
                taken = []
                for number in range(READY_COUNT):
                    begin = time.perf_counter_ns()
                    taken.append(take(number))
                    times.append(time.perf_counter_ns() - begin)
                taken.clear()
    return statistics.median(next_ns) / 1e3, statistics.median(bare_ns) / 1e3


def measure(contender: str, seconds: float) -> harness.Result:
    """Both times for each number of arrays; ``contender`` is always ours."""
    result = {}
    for count in ARRAY_COUNTS:
        next_us, bare_us = compare(count, seconds / len(ARRAY_COUNTS))
        result[f"next_{count}_us"] = next_us
        result[f"bare_{count}_us"] = bare_us
    return result


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
