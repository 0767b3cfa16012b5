"""Trains for ever: start_method, and what its loader does.

That is "quick", "sleep", "start" (a program that sleeps) or "hold_gil".
"""

import ctypes
import subprocess
import sys
import time

import numpy as np

from hydrax import DataGroup, Dataloader

WORK = sys.argv[2]


def load(number, arrays, seed):
    arrays["x"][:] = number
    if number < 20:
        return
    if WORK == "sleep":
        time.sleep(60)
    elif WORK == "start":
        subprocess.run(["sleep", "60"])
    elif WORK == "hold_gil":
        ctypes.PyDLL(None).sleep(60)


if __name__ == "__main__":
    group = DataGroup(10, range(1000), loader_arrays={"x": ((4,), np.float32, np.float32)})
    with Dataloader(load, group, loader_count=4, start_method=sys.argv[1]) as dataloader:
        for batch in dataloader:
            if batch.batch_num == 1:
                print("training", flush=True)
            del batch
            time.sleep(0.001)
