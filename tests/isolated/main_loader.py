"""Its loader function is defined in the script itself; prints a sum per batch."""

import sys

import numpy as np

from hydrax import DataGroup, Dataloader


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def load(self, number, arrays, seed):
        arrays["x"][:] = number * self.factor


if __name__ == "__main__":
    group = DataGroup(5, range(20), loader_arrays={"x": ((4,), np.float32, np.float32)})
    with Dataloader(
        Scale(2).load, group, end_at=("epoch", 1), loader_count=2, start_method=sys.argv[1]
    ) as dataloader:
        print([float(batch.arrays["x"].sum()) for batch in dataloader])
