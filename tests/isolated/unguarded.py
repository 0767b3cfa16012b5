"""A script without a guard: all of it is top level."""

import os
import sys

import numpy as np

from hydrax import DataGroup, Dataloader

with open(sys.argv[2], "a") as log:
    log.write(f"{os.getpid()}\n")


def load(number, arrays, seed):
    arrays["x"][:] = number


group = DataGroup(5, range(20), loader_arrays={"x": ((4,), np.float32, np.float32)})
with Dataloader(
    load, group, end_at=("epoch", 1), loader_count=2, start_method=sys.argv[1]
) as dataloader:
    for batch in dataloader:
        print(float(batch.arrays["x"].sum()))
        del batch
