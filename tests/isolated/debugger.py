"""A forgotten debugger in the loader function; prints what comes of it."""

import pdb

import numpy as np

from hydrax import DataGroup, Dataloader, LoaderError


def load(number, arrays, seed):
    arrays["x"][:] = number
    if number == 7:
        pdb.set_trace()


if __name__ == "__main__":
    group = DataGroup(5, range(20), loader_arrays={"x": ((4,), np.float32, np.float32)})
    with Dataloader(load, group, end_at=("epoch", 1), timeout_sec=10) as dataloader:
        try:
            for batch in dataloader:
                del batch
        except LoaderError as error:
            print(error)
