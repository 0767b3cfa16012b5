"""Sends itself SIGINT, to the whole process group, as often as told, while training."""

import os
import signal
import sys

import numpy as np

from hydrax import DataGroup, Dataloader


def load(number, arrays, seed):
    arrays["x"][:] = number


if __name__ == "__main__":
    group = DataGroup(10, range(100), loader_arrays={"x": ((4,), np.float32, np.float32)})
    with Dataloader(load, group, loader_count=4) as dataloader:
        for batch in dataloader:
            if batch.batch_num == 3:
                for _ in range(int(sys.argv[1])):
                    os.killpg(0, signal.SIGINT)
            if batch.batch_num > 3:
                sys.exit("a batch came after the signal")
            del batch
        print("left the loop, interrupted:", dataloader.interrupted)
