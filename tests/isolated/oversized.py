"""Asks for more batches at a time than a 32-bit count holds."""

import sys

import numpy as np

from hydrax import DataGroup, Dataloader

if __name__ == "__main__":
    group = DataGroup(1, range(20), loader_arrays={"x": ((4,), np.float32, np.float32)})
    try:
        Dataloader(print, group, depth=int(sys.argv[1]))
    except (MemoryError, ValueError) as error:
        print(type(error).__name__, error)
