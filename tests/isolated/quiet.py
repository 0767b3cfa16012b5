"""Runs to its end, or leaves early, with 16 loader processes; says nothing."""

import sys
import time

import numpy as np

from hydrax import DataGroup, Dataloader


def load(number, arrays, seed):
    arrays["x"][:] = number
    time.sleep(0.001)


if __name__ == "__main__":
    how, start_method = sys.argv[1:]
    group = DataGroup(10, range(100), loader_arrays={"x": ((4,), np.float32, np.float32)})
    with Dataloader(
        load, group, loader_count=16, end_at=("epoch", 3), start_method=start_method
    ) as dataloader:
        for batch in dataloader:
            if how == "early" and batch.batch_num == 2:
                break
            if how == "raise" and batch.batch_num == 2:
                raise SystemExit(3)
            del batch
