"""A program that may open 64 files: it reads numbers, then keeps arrays until none is left."""

from __future__ import annotations

import os
import resource

import numpy as np

import hydrax


def load(number, arrays, seed):
    arrays["x"][:] = number


def open_files():
    return len(os.listdir("/proc/self/fd"))


def main():
    group = hydrax.DataGroup(5, range(100), loader_arrays={"x": ((4,), np.float32, np.float32)})
    losses = []
    with hydrax.Dataloader(load, group, end_at=("batch", 1000), timeout_sec=20) as dataloader:
        for batch in dataloader:
            losses.append(float(batch.arrays["x"][0, 0].sum()))
            if batch.batch_num == 100:
                first = open_files()
            del batch
        print(first, open_files())
    history = []
    with hydrax.Dataloader(load, group, timeout_sec=1) as dataloader:
        try:
            for batch in dataloader:
                history.append(batch.arrays["x"])
        except hydrax.BatchRetainedError as error:
            print(error)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    main()
