"""Makes and enters Dataloaders of 512 MiB in a control group that has less memory than that.

The limit is there when the Dataloader is made, or comes between that and the with block.
Arguments: the group's folder, and the file in it that takes the limit.
"""

import os
import sys
from pathlib import Path

import numpy as np

import hydrax

FOLDER, LIMIT = Path(sys.argv[1]), sys.argv[2]
BATCH_SIZE, ITEM_NBYTES = 4, 32 << 20
SMALL, LARGE = 300, 2048  # MiB


def limit_memory(mib):
    (FOLDER / LIMIT).write_text(str(mib << 20))


def load(number, arrays, seed):
    arrays["x"][...] = number


def make():
    arrays = {"x": ((ITEM_NBYTES // 4,), np.float32, np.float32)}
    group = hydrax.DataGroup(BATCH_SIZE, range(400), loader_arrays=arrays)
    return hydrax.Dataloader(load, group, depth=4, loader_count=2)


def report(act):
    try:
        return act()
    except hydrax.HydraxError as error:
        print(f"{type(error).__name__}: {error}")


def main():
    limit_memory(SMALL)
    (FOLDER / "cgroup.procs").write_text(str(os.getpid()))
    report(make)
    limit_memory(LARGE)
    dataloader = make()
    limit_memory(SMALL)
    report(dataloader.__enter__)


if __name__ == "__main__":
    main()
