"""Fills a cache in a folder that has room for a part of it; run by a test on a 16 MB file system.

Usage: cache_full_disk.py FOLDER. Two epochs of 64 batches of 1 MB. Prints how many batches were
right in both, how many came from the cache, and the warnings.
"""

import logging
import sys

import numpy as np

import hydrax

messages = []


class Keep(logging.Handler):
    def emit(self, record):
        messages.append(f"{record.levelname}: {record.getMessage()}")


def load(number, arrays, seed):
    arrays["x"][:] = number


def main():
    handler = Keep(logging.WARNING)
    logging.getLogger("hydrax").addHandler(handler)
    group = hydrax.DataGroup(
        4,
        range(256),
        loader_arrays={"x": ((65_536,), np.float32, np.float32)},
        cache_location=sys.argv[1],
    )
    right = 0
    with hydrax.Dataloader(load, group, end_at=("epoch", 2), loader_count=2) as dataloader:
        for batch in dataloader:
            x = np.asarray(batch.arrays["x"])
            right += bool((x == np.array(batch.data)[:, None]).all())
            del batch, x
        stats = dataloader.stats()
    print(right, stats.batches_cached, stats.batches_saved)
    print(*messages, sep="\n")


if __name__ == "__main__":
    main()
