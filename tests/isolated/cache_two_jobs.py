"""One of several jobs that use a cache at the same time.

Usage: cache_two_jobs.py FOLDER. Three epochs; prints how many of 180 batches were right.
"""

import sys

import numpy as np

import hydrax


def load(number, arrays, seed):
    arrays["x"][:] = number
    return {"number": number}


def main():
    group = hydrax.DataGroup(
        4,
        range(240),
        loader_arrays={"x": ((5_000,), np.float32, np.float32)},
        cache_location=sys.argv[1],
    )
    right = 0
    with hydrax.Dataloader(load, group, end_at=("epoch", 3)) as dataloader:
        for batch in dataloader:
            x = np.asarray(batch.arrays["x"])
            right += (x == np.array(batch.data)[:, None]).all() and batch.additional == {
                "number": list(batch.data)
            }
            del batch, x
    print(right)


if __name__ == "__main__":
    main()
