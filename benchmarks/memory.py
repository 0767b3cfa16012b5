"""Memory: proportional set size of the main process and 4 forked workers, beyond main alone."""

from __future__ import annotations

import gc
from typing import Any

import harness
import numpy as np
from harness import HYDRAX, HYDRAX_022, TORCH, Target

BATCH_SIZE = 64
BATCH_COUNT = 60
SHAPE = (224, 224, 3)
WORKER_COUNT = 4

CONTENDERS = (HYDRAX, HYDRAX_022, TORCH)
TARGETS = (
    Target(
        "4 workers: memory beyond main and arena, a worker",
        "MB",
        (HYDRAX, "a_worker_mb"),
        None,
        8,
        at_least=False,
    ),
    *(
        Target(
            "4 workers: memory beyond main, in all",
            "MB",
            (HYDRAX, "added_mb"),
            (reference, "added_mb"),
            None,
            at_least=False,
        )
        for reference in (HYDRAX_022, TORCH)
    ),
)


def load_item(index: int, arrays: Any, seed: int | None) -> None:
    """The loader function."""
    arrays["image"].fill(index & 255)


class TorchImages:
    """The same images as a PyTorch map-style data set of tensors."""

    def __len__(self) -> int:
        return BATCH_SIZE * BATCH_COUNT * 2

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full(SHAPE, index & 255, dtype=torch.uint8)


def all_nbytes() -> int:
    """Proportional set size of this process and all it started."""
    return harness.pss_nbytes() + sum(map(harness.pss_nbytes, harness.child_pids()))


def hydrax_nbytes(contender: str) -> tuple[int, int]:
    """Bytes of all processes in the middle of a run, and bytes of the arena (0 if unknown)."""
    import hydrax

    group = hydrax.DataGroup(
        BATCH_SIZE,
        range(BATCH_SIZE * BATCH_COUNT * 2),
        loader_arrays={"image": (SHAPE, np.uint8, np.uint8)},
    )
    dataloader = hydrax.Dataloader(
        load_item, group, loader_count=WORKER_COUNT, depth=harness.DEPTH + 1
    )
    consume = harness.take_arrays(contender)
    count = 0
    with dataloader:
        for batch in dataloader:
            consume(batch)
            del batch
            count += 1  # by hand: enumerate() holds a batch, which stops 0.2.2
            if count == BATCH_COUNT:
                nbytes = all_nbytes()
                break
    return nbytes, getattr(dataloader, "arena_nbytes", 0)


def torch_nbytes() -> tuple[int, int]:
    """The same for a PyTorch DataLoader with one batch a worker in advance."""
    import torch

    loader = torch.utils.data.DataLoader(
        TorchImages(),
        batch_size=BATCH_SIZE,
        num_workers=WORKER_COUNT,
        prefetch_factor=1,
        multiprocessing_context="fork",
    )
    for count, batch in enumerate(loader):
        del batch
        if count == BATCH_COUNT:
            return all_nbytes(), 0
    raise AssertionError("the loader ended early")


def measure(contender: str, seconds: float) -> harness.Result:
    """Megabytes added by loading, in all and, beyond the arena, by each worker."""
    import jax

    jax.numpy.ones(8).block_until_ready()
    if contender == TORCH:
        import torch.utils.data  # noqa: F401 - not counted: a program that uses it has it anyway
    else:
        import hydrax  # noqa: F401
    gc.collect()
    before_nbytes = harness.pss_nbytes()
    with harness.quiet_fork():
        if contender == TORCH:
            nbytes, arena_nbytes = torch_nbytes()
        else:
            nbytes, arena_nbytes = hydrax_nbytes(contender)
    added_nbytes = nbytes - before_nbytes
    result = {"added_mb": added_nbytes / 1e6}
    if arena_nbytes:
        result["a_worker_mb"] = (added_nbytes - arena_nbytes) / WORKER_COUNT / 1e6
    return result


if __name__ == "__main__":
    harness.main(measure, CONTENDERS)
