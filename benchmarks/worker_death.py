"""Time from the ``kill -9`` of a loader process to the exception in the training loop."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from typing import Any

import harness
import numpy as np
from harness import HYDRAX, Target

KILLS = 21

CONTENDERS = (HYDRAX,)
TARGETS = (
    Target(
        "kill -9 of a loader process: until the exception, median",
        "ms",
        (HYDRAX, "latency_ms"),
        None,
        50,
        at_least=False,
    ),
)


def load(number: int, arrays: Any, seed: int) -> None:
    """The loader function: 5 ms an item, so that the loop waits most of the time."""
    time.sleep(0.005)
    arrays["x"][...] = number


def time_one_kill(moment: float) -> float:
    """Seconds from the kill, which comes ``moment`` seconds after the first batch."""
    import hydrax

    killed_at: list[float] = []
    group = hydrax.DataGroup(8, range(10**6), loader_arrays={"x": ((), np.int32, np.int32)})
    with hydrax.Dataloader(load, group, loader_count=harness.WORKER_COUNT) as dataloader:
        next(dataloader)
        pid = dataloader.stats().workers[0].pid

        def kill() -> None:
            time.sleep(moment)
            killed_at.append(time.perf_counter())
            os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            for batch in dataloader:
                del batch
        except hydrax.WorkerDiedError:
            raised_at = time.perf_counter()
        thread.join()
    return raised_at - killed_at[0]


def measure(contender: str, seconds: float) -> harness.Result:
    """The median over some kills."""
    import jax

    jax.numpy.ones(8).block_until_ready()
    with harness.quiet_fork():
        times = [time_one_kill(0.003 * (1 + kill)) for kill in range(KILLS)]
    return {"latency_ms": statistics.median(times) * 1e3}


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
