"""Compares its own memory with that of itself and four forked workers, in use."""

import os
from pathlib import Path

import jax
import numpy as np

from hydrax import DataGroup, Dataloader


def load(number, arrays, seed):
    arrays["x"][:] = number


def pss_nbytes(pid):
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def own_children():
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    descriptors = [f"folder/name-{i}.png" for i in range(100_000)]
    group = DataGroup(
        64, descriptors, loader_arrays={"x": ((64, 256), np.float32, np.float32)}, seed=1
    )
    step = jax.jit(lambda x: x.sum())
    step(np.zeros((64, 64, 256), np.float32)).block_until_ready()

    def load_length(name, arrays, seed):
        load(len(name), arrays, seed)

    dataloader = Dataloader(load_length, group, loader_count=4, end_at=("batch", 200))
    alone = pss_nbytes(os.getpid())
    with dataloader:
        for batch in dataloader:
            step(batch.arrays["x"]).block_until_ready()
            if batch.batch_num == 199:
                workers = own_children()
                together = sum(pss_nbytes(pid) for pid in (os.getpid(), *workers))
            del batch
    print(len(workers), dataloader.arena_nbytes, together - alone)
