"""Forks while it trains; the child leaves through the with block, the parent trains on."""

import os
import warnings

import numpy as np

from hydrax import DataGroup, Dataloader


def load(number, arrays, seed):
    arrays["x"][:] = number


class Leave(Exception):
    pass


def train():
    count = 0
    with Dataloader(load, group, end_at=("epoch", 1), timeout_sec=10) as dataloader:
        for batch in dataloader:
            count += 1
            if count == 3 and os.fork() == 0:
                raise Leave
            if count == 3:
                os.wait()
            del batch
    return count


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Python and JAX advise against such a fork, with reason
    group = DataGroup(10, range(200), loader_arrays={"x": ((4,), np.float32, np.float32)})
    try:
        print(train())
    except Leave:
        os._exit(0)  # JAX's own end does not survive a fork
