"""Going on from a state a thousand million batches into a run, against a fresh start."""

from __future__ import annotations

import statistics
import time
from typing import Any

import harness
import numpy as np
from harness import HYDRAX, Target

BATCH = 10**9
ROUNDS = 15

CONTENDERS = (HYDRAX,)
TARGETS = (
    Target(
        "resume at batch 10⁹, to the first batch",
        "ms",
        (HYDRAX, "far_ms"),
        (HYDRAX, "fresh_ms"),
        1.5,
        at_least=False,
        reference_label="a fresh start",
    ),
)


def load(indices: Any, arrays: Any, seeds: Any) -> None:
    """The loader function."""
    arrays["x"][:] = indices


def first_batch_s(start_at: tuple[int, int], state: dict[str, Any] | None) -> Any:
    """Seconds from the Dataloader's construction to its first batch; and the state after it."""
    import hydrax

    group = hydrax.DataGroup(
        64,
        range(10**7),
        loader_arrays={"x": ((), np.int64, np.int32)},
        shuffle_first=True,
    )
    validation = ("batch", 1000, group)
    begin = time.perf_counter()
    dataloader = hydrax.Dataloader(
        load,
        group,
        validation=validation,
        start_at=start_at,
        batched=True,
        loader_count=harness.WORKER_COUNT,
    )
    if state is not None:
        dataloader.set_state(state)
    with dataloader:
        next(dataloader).arrays["x"].block_until_ready()
        elapsed_s = time.perf_counter() - begin
        return elapsed_s, dataloader.get_state()


def measure(contender: str, seconds: float) -> harness.Result:
    """Medians of fresh starts and of resumed ones, in turns."""
    import jax

    jax.numpy.ones(8).block_until_ready()
    fresh, far = [], []
    with harness.quiet_fork():
        _, state = first_batch_s((0, BATCH), None)
        for _ in range(ROUNDS):
            fresh.append(first_batch_s((0, 0), None)[0])
            far.append(first_batch_s((0, 0), state)[0])
    return {"fresh_ms": statistics.median(fresh) * 1e3, "far_ms": statistics.median(far) * 1e3}


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
