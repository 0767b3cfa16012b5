"""Trains in a daemonic child process, which may have no children of multiprocessing's own."""

import multiprocessing

import numpy as np

from hydrax import DataGroup, Dataloader


def load(number, arrays, seed):
    arrays["x"][:] = number


def train(start_method):
    group = DataGroup(10, range(100), loader_arrays={"x": ((4,), np.float32, np.float32)})
    with Dataloader(
        load, group, end_at=("epoch", 1), loader_count=4, start_method=start_method
    ) as dataloader:
        print(sum(1 for _ in dataloader), flush=True)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for start_method in ("fork", "spawn", "forkserver"):
        process = context.Process(target=train, args=(start_method,), daemon=True)
        process.start()
        process.join()
        assert process.exitcode == 0
