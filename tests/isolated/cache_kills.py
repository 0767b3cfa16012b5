"""Kills jobs with SIGKILL at random moments while they fill a cache, and looks at what is left.

Usage: cache_kills.py FOLDER ROUNDS SEED. Prints a line of JSON: how many jobs were killed, batches
reported as saved, reported batches that were missing afterwards, batches with wrong content, files
that verify() calls damaged, and stale temporary files left in the end.

JAX cannot be used in a forked process, so the jobs' placement function returns NumPy arrays.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import signal
import sys
import time
import warnings

import numpy as np

import hydrax
import hydrax._placement  # imports JAX once, here
from hydrax import cache
from hydrax._cache import CacheFolder, Key, layouts_of, read_descriptor

BATCH_COUNT = 24
BATCH_SIZE = 4
SPECS = {"x": ((20_000,), np.float32, np.float32), "label": ((), np.int32, np.int32)}


def load(number, arrays, seed):
    arrays["x"][:] = np.arange(20_000) + number
    arrays["label"][...] = number
    return {"number": number, "bytes": bytes(number)}


class Report(logging.Handler):
    """Writes the names of saved files to a descriptor, at once."""

    def __init__(self, fd):
        super().__init__()
        self.fd = fd

    def emit(self, record):
        text = record.getMessage()
        if text.startswith("saved "):
            os.write(self.fd, text.split("/")[-1].encode() + b"\n")


def job(folder, report_fd):
    """Two epochs; ends by itself if it is not killed."""
    logger = logging.getLogger("hydrax")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(Report(report_fd))
    group = hydrax.DataGroup(
        BATCH_SIZE,
        range(BATCH_COUNT * BATCH_SIZE),
        loader_arrays=SPECS,
        cache_location=folder,
    )
    with hydrax.Dataloader(
        load,
        group,
        end_at=("epoch", 2),
        loader_count=2,
        placement_func=lambda arrays, *_: dict(arrays),
    ) as dataloader:
        for batch in dataloader:
            del batch


def kill_one(folder, seconds):
    """Start a job and kill it; returns the files it has reported, and whether it was killed."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        try:
            job(folder, write_fd)
        finally:
            os._exit(0)
    os.close(write_fd)
    pidfd = os.pidfd_open(pid)
    if not select.select([pidfd], [], [], seconds)[0]:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    with os.fdopen(read_fd) as reports:  # ends when the workers have ended, too
        saved = reports.read().split()
    _, status = os.waitpid(pid, 0)
    return saved, os.WIFSIGNALED(status)


def wrong_batches(folder):
    """Batches of which a file is there and read as good, but is not what was loaded."""
    facts = read_descriptor(folder)
    layouts = layouts_of(facts)
    facts = {name: facts[name] for name in facts if name not in ("format", "version")}
    files = CacheFolder(folder, facts, layouts, is_readonly=True)
    wrong = 0
    for batch in range(BATCH_COUNT):
        if not files.has(Key(0, batch)):
            continue
        mapping, additional = files.read(Key(0, batch), BATCH_SIZE)
        numbers = np.arange(batch * BATCH_SIZE, (batch + 1) * BATCH_SIZE)
        arrays = {
            name: np.ndarray(layout.shape, layout.dtype, mapping, offset=layout.offset)
            for name, layout in layouts.items()
        }
        is_right = (
            (arrays["x"] == numbers[:, None] + np.arange(20_000)).all()
            and (arrays["label"] == numbers).all()
            and additional
            == {"number": numbers.tolist(), "bytes": [bytes(int(number)) for number in numbers]}
        )
        wrong += not is_right
    return wrong


def main():
    folder, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")  # about forking with threads
    generator = random.Random(seed)
    killed = reported = lost = wrong = damaged = 0
    longest = 0.5
    saved = set()
    for _ in range(rounds):
        start = time.monotonic()
        new, is_killed = kill_one(folder, generator.uniform(0, longest))
        # The moments are to lie within the job, however slow the machine is just now.
        if not is_killed:
            longest = max(0.1, (time.monotonic() - start) * 0.8)
        elif not new:
            longest = min(longest * 1.1, 5.0)
        killed += is_killed
        reported += len(new)
        saved.update(new)
        if not os.path.exists(os.path.join(folder, "cache.json")):
            continue
        present = {name for name in os.listdir(folder) if name.endswith(".batch")}
        lost += len(saved - present)
        damaged += len(list(cache.verify(folder)))
        wrong += wrong_batches(folder)
        if len(present) == BATCH_COUNT:
            cache.clear(folder)
            saved.clear()
    kill_one(folder, 20)  # one in peace
    stale = sum(name.endswith(".tmp") for name in os.listdir(folder))
    print(
        json.dumps(
            {
                "killed": killed,
                "reported": reported,
                "lost": lost,
                "wrong": wrong,
                "damaged": damaged,
                "stale": stale,
                "complete": len(list(cache.verify(folder))) == 0
                and cache.info(folder).batch_count == BATCH_COUNT,
            }
        )
    )


if __name__ == "__main__":
    main()
