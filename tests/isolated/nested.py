"""A loader that starts a program, ends another, and uses a pool of processes, for each item."""

import multiprocessing
import signal
import subprocess

import numpy as np

from hydrax import DataGroup, Dataloader


def load(number, arrays, seed):
    subprocess.run(["true"], check=True)
    with subprocess.Popen(["sleep", "100"]) as program:
        program.terminate()
    assert program.returncode == -signal.SIGTERM
    with multiprocessing.get_context("fork").Pool(2) as pool:
        arrays["x"][:] = pool.map(abs, [-number])[0]


if __name__ == "__main__":
    group = DataGroup(2, range(8), loader_arrays={"x": ((4,), np.float32, np.float32)})
    with Dataloader(load, group, end_at=("epoch", 1), timeout_sec=20) as dataloader:
        print([float(batch.arrays["x"][0, 0]) for batch in dataloader])
