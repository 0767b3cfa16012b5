"""Trains with SIGCHLD ignored, or with a handler of it that collects all children."""

import os
import signal
import sys

import numpy as np

from hydrax import DataGroup, Dataloader


def load(number, arrays, seed):
    arrays["x"][:] = number
    if number == 95 and sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def collect_all(signum, frame):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN if sys.argv[1] == "ignored" else collect_all)
    group = DataGroup(10, range(100), loader_arrays={"x": ((4,), np.float32, np.float32)})
    count = 0
    try:
        with Dataloader(load, group, end_at=("epoch", 1), loader_count=2) as dataloader:
            for batch in dataloader:
                count += 1
                del batch
    except RuntimeError as error:
        print(type(error).__name__, end=" ")
    fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]]
    print(count, sum("pidfd" in fd for fd in fds))
