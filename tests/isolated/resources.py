"""Counts descriptors and memory maps in all its processes while 50 arrays at depth 32 flow."""

import json
import os
import sys
from pathlib import Path

import numpy as np

from hydrax import DataGroup, Dataloader


def load(number, arrays, seed):
    for array in arrays.values():
        array[:] = number


def counts(pid):
    folder = Path(f"/proc/{pid}")
    return len(list((folder / "fd").iterdir())), len((folder / "maps").read_text().splitlines())


def own_children():
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    batches = int(sys.argv[1])
    specs = {f"array{i}": ((3,), np.float32, np.float32) for i in range(50)}
    group = DataGroup(4, range(10_000), loader_arrays=specs)
    seen = []
    with Dataloader(load, group, depth=32, loader_count=2, end_at=("batch", batches)) as dataloader:
        for batch in dataloader:
            if batch.batch_num == 1 or batch.batch_num % 100 == 99:
                for array in batch.arrays.values():
                    assert np.array_equal(array[:, 2], batch.data)
                seen.append([counts(pid) for pid in (os.getpid(), *own_children())])
            del batch
    print(json.dumps(seen))
