"""How often loader processes open the file of an h5py.Dataset for themselves; run as a script."""

import os
import sys

import h5py
import numpy as np

import hydrax


def open_count(path):
    """Descriptors of this process that lead to a file."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(link) and os.path.samefile(link, path) for link in links)


def load(row, arrays, seed):
    """Load a row; says how often the file is open."""
    arrays["x"][:] = row
    return {"open": open_count(sys.argv[1])}


with h5py.File(sys.argv[1], "r") as file:
    group = hydrax.DataGroup(
        600, file["group/rows"], loader_arrays={"x": ((4,), np.int32, np.int32)}
    )
    for _ in range(2):
        inherited = open_count(sys.argv[1])
        with hydrax.Dataloader(load, group, loader_count=2, end_at=("epoch", 1)) as batches:
            batch = next(batches)
            print({count - inherited for count in batch.additional["open"]})
            batch.get_data(0)  # read by the main process, before the next ones are forked
