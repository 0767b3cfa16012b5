"""A list of 5 million path strings: what 4 forked workers copy of it, and the first batch of 16."""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import HYDRAX, TORCH, Target

ITEM_COUNT = 5_000_000
BATCH_SIZE = 10_000
WORKER_COUNT = 4
MANY_WORKER_COUNT = 16

CONTENDERS = (HYDRAX, TORCH)
TARGETS = (
    Target(
        "5M path strings, 4 workers: copied in an epoch, share of the list",
        "",
        (HYDRAX, "copied_share"),
        None,
        0.2,
        at_least=False,
    ),
    Target(
        "the same, with PyTorch",
        "",
        (TORCH, "copied_share"),
        None,
        None,
        at_least=False,
    ),
    Target(
        "5M path strings, 16 workers: first batch",
        "s",
        (HYDRAX, "first_batch_s"),
        None,
        3,
        at_least=False,
    ),
)


def path_strings() -> list[str]:
    """The descriptors: paths as a data set of images has them."""
    return [
        f"/data/train/n{number % 1000:08d}/n{number % 1000:08d}_{number:08d}.JPEG"
        for number in range(ITEM_COUNT)
    ]


def resident_nbytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def private_nbytes(pids: list[int]) -> int:
    """Memory that these processes hold alone."""
    return sum(
        int(line.split()[1]) * 1024
        for pid in pids
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Private_")
    )


def load_item(path: str, arrays: Any, seed: int | None) -> None:
    """The loader function: touches the descriptor."""
    arrays["x"][...] = len(path)


def hydrax_batches(paths: list[str], worker_count: int) -> Any:
    """An entered Dataloader of one epoch."""
    import hydrax

    group = hydrax.DataGroup(BATCH_SIZE, paths, loader_arrays={"x": ((), np.int32, np.int32)})
    return hydrax.Dataloader(
        load_item, group, loader_count=worker_count, depth=harness.DEPTH, end_at=("epoch", 1)
    )


class TorchPaths:
    """The same as a PyTorch map-style data set."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return len(self.paths[index])


def torch_batches(paths: list[str]) -> Any:
    """Batches of a PyTorch DataLoader over one epoch."""
    import torch

    return torch.utils.data.DataLoader(
        TorchPaths(paths),
        batch_size=BATCH_SIZE,
        num_workers=WORKER_COUNT,
        prefetch_factor=harness.DEPTH,
        multiprocessing_context="fork",
    )


def copied_nbytes(batches: Any) -> int:
    """Bytes that workers come to hold alone from the first batch of an epoch to its last."""
    batch_count = ITEM_COUNT // BATCH_SIZE
    before = after = count = 0
    pids: list[int] = []
    for batch in batches:
        del batch
        count += 1  # noqa: SIM113 - enumerate() holds a batch
        if count == 1:
            pids = harness.child_pids()
            before = private_nbytes(pids)
        elif count == batch_count - harness.DEPTH * WORKER_COUNT:
            after = private_nbytes(pids)
    return after - before


def measure(contender: str, seconds: float) -> harness.Result:
    """The share of the list that is copied, and seconds to the first batch."""
    import jax

    jax.numpy.ones(8).block_until_ready()
    begin_nbytes = resident_nbytes()
    paths = path_strings()
    list_nbytes = resident_nbytes() - begin_nbytes
    gc.collect()
    result = {}
    with harness.quiet_fork(), contextlib.ExitStack() as stack:
        if contender == TORCH:
            batches = torch_batches(paths)
        else:
            begin_s = time.perf_counter()
            with hydrax_batches(paths, MANY_WORKER_COUNT) as dataloader:
                next(dataloader)
                result["first_batch_s"] = time.perf_counter() - begin_s
            batches = stack.enter_context(hydrax_batches(paths, WORKER_COUNT))
        result["copied_share"] = copied_nbytes(batches) / list_nbytes
    return result


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
