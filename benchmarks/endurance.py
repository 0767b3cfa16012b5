"""Memory of all processes over a million batches; a tenth of that in a quick run."""

from __future__ import annotations

import os
from typing import Any

import harness
import numpy as np
from harness import HYDRAX, Target

BATCHES_PER_SECOND_ASKED = 500_000

CONTENDERS = (HYDRAX,)
TARGETS = (
    Target(
        "a million batches: growth of all processes",
        "MB",
        (HYDRAX, "grown_mb"),
        None,
        2,
        at_least=False,
    ),
    Target(
        "a million batches: descriptors and mappings added",
        "",
        (HYDRAX, "grown_handles"),
        None,
        0,
        at_least=False,
    ),
)


def load(indices: Any, arrays: Any, seeds: Any) -> None:
    """The loader function."""
    arrays["x"][:] = indices


def private_nbytes() -> int:
    """Private memory of this process and the workers."""
    total = 0
    for pid in (os.getpid(), *harness.child_pids()):
        with open(f"/proc/{pid}/smaps_rollup") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith("Private_"))
    return total * 1024


def handles() -> int:
    """Descriptors and mappings of this process and the workers."""
    total = 0
    for pid in (os.getpid(), *harness.child_pids()):
        total += len(os.listdir(f"/proc/{pid}/fd"))
        with open(f"/proc/{pid}/maps") as file:
            total += sum("memfd" in line for line in file)
    return total


def measure(contender: str, seconds: float) -> harness.Result:
    """What the last nine tenths of the batches add to what the first tenth took."""
    import hydrax

    batch_count = int(seconds * BATCHES_PER_SECOND_ASKED)
    group = hydrax.DataGroup(
        4, range(10**6), loader_arrays={"x": ((), np.int64, np.int32)}, shuffle_first=True
    )
    with (
        harness.quiet_fork(),
        hydrax.Dataloader(
            load,
            group,
            loader_count=harness.WORKER_COUNT,
            batched=True,
            depth=8,
            end_at=("batch", batch_count),
        ) as dataloader,
    ):
        for batch in dataloader:
            number = batch.batch_num
            del batch
            if number == batch_count // 10:
                before_nbytes, before_handles = private_nbytes(), handles()
            elif number == batch_count - 1:
                grown_nbytes = private_nbytes() - before_nbytes
                grown_handles = handles() - before_handles
    return {"grown_mb": grown_nbytes / 1e6, "grown_handles": grown_handles}


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
