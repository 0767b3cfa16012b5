"""Loader processes that die: what is raised, and how a run goes on with others in their place."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from isolated.run import seconds_until_gone

from hydrax import DataGroup, Dataloader, LoaderError, WorkerDiedError, loader_context

TIMEOUT_S = 20.0
ITEMS, BATCH_SIZE = 120, 8


class Deadly:
    """Loads numbers and seeds; at chosen items it ends its process, each time once.

    Args:
        folder: Where it remembers what it has done.
        at: Item to what it does there.
        times: How often it does it.
    """

    def __init__(self, folder, at, times=1):
        self.folder = Path(folder)
        self.at = at
        self.times = times

    def __call__(self, number, arrays, seed):
        arrays["x"][:] = number
        arrays["seed"][...] = seed
        deed = self.at.get(number)
        if deed is not None:
            for time_ in range(self.times):
                flag = self.folder / f"{number}.{time_}"
                if not flag.exists():
                    flag.touch()
                    deed()
                    break
        return {"number": number}


def report_pid(number, arrays, seed):
    arrays["x"][:] = number
    arrays["seed"][...] = seed
    return {"pid": os.getpid()}


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_if_there(pid):
    """Kill a loader process, which may have been killed and replaced since it loaded."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def exit_hard():
    os._exit(3)


def crash():
    ctypes.string_at(0)


def group(**options):
    return DataGroup(
        BATCH_SIZE,
        range(ITEMS),
        loader_arrays={
            "x": ((5,), np.int32, np.int32),
            "seed": ((), np.uint32, np.uint32),
        },
        shuffle_first=True,
        **options,
    )


def contents(dataloader):
    found = []
    for batch in dataloader:
        assert batch.additional["number"] == batch.arrays["x"][:, 0].tolist()
        found.append({name: np.asarray(array).tolist() for name, array in batch.arrays.items()})
        del batch
    return found


def run(loader, **options):
    options = {"end_at": ("epoch", 2), "loader_count": 3, "timeout_sec": TIMEOUT_S, **options}
    with Dataloader(loader, group(), **options) as dataloader:
        return contents(dataloader), dataloader.stats()


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_a_dead_worker_is_replaced_and_the_batches_are_the_same(start_method, tmp_path, caplog):
    expected, _ = run(Deadly(tmp_path, {}), loader_count=0)
    deadly = Deadly(tmp_path, {17: kill_self, 60: exit_hard, 101: crash})
    with caplog.at_level(logging.WARNING, logger="hydrax"):
        found, stats = run(deadly, start_method=start_method, max_restarts=3)
    assert found == expected
    assert stats.batches_delivered == len(expected)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 3
    for number, text in ((17, "SIGKILL"), (60, "status 3"), (101, "SIGSEGV")):
        assert any(f"item {number} " in warning and text in warning for warning in warnings)


def test_a_batched_loader_is_called_again_for_a_dead_worker_with_the_same_items(tmp_path):
    flag = tmp_path / "died"

    def load(numbers, arrays, seeds):
        arrays["x"][:] = np.asarray(numbers)[:, None]
        arrays["seed"][:] = seeds
        if 40 in numbers and not flag.exists():
            flag.touch()
            kill_self()
        return {"number": np.asarray(numbers).tolist()}

    found, _ = run(load, batched=True, max_restarts=1)
    flag.unlink()
    expected, _ = run(load, batched=True, max_restarts=1, loader_count=1)
    assert found == expected


def test_more_deaths_than_restarts_are_the_error_of_the_last_one(tmp_path):
    deadly = Deadly(tmp_path, {33: kill_self}, times=10)
    start_s = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"SIGKILL while loading item 33 ") as caught:
        run(deadly, max_restarts=2)
    assert time.monotonic() - start_s < 10
    assert len(list(tmp_path.iterdir())) == 3
    assert 33 in caught.value.indices


def test_a_worker_that_dies_idle_is_noticed_though_batches_are_ready():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        arrays["seed"][...] = os.getpid()

    with Dataloader(load, group(), loader_count=2, depth=8, timeout_sec=TIMEOUT_S) as dataloader:
        pid = int(next(dataloader).arrays["seed"][0])
        time.sleep(0.3)  # all slots are full
        os.kill(pid, signal.SIGKILL)
        seconds_until_gone([pid], at_most_s=5)
        time.sleep(0.05)  # next() looks every 20 ms
        with pytest.raises(WorkerDiedError, match="SIGKILL while it waited for work"):
            next(dataloader)


def test_a_worker_that_dies_idle_is_replaced(caplog):
    def load(number, arrays, seed):
        arrays["x"][:] = number
        arrays["seed"][...] = os.getpid()
        return {"number": number}

    with Dataloader(
        load,
        group(),
        loader_count=1,
        depth=2,
        timeout_sec=TIMEOUT_S,
        max_restarts=1,
        end_at=("epoch", 1),
    ) as dataloader:
        first = next(dataloader)
        pid = int(first.arrays["seed"][0])
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        seconds_until_gone([pid], at_most_s=5)
        time.sleep(0.05)
        seen = {pid}
        numbers = first.arrays["x"][:, 0].tolist()
        del first
        for batch in dataloader:
            numbers += batch.arrays["x"][:, 0].tolist()
            seen |= set(batch.arrays["seed"].tolist())
            del batch
        assert sorted(numbers) == list(range(ITEMS))
        assert len(seen) == 2
    assert "waited for work" in caplog.text


def test_a_startup_func_runs_in_each_replacement(tmp_path):
    started = tmp_path / "started"
    deeds = tmp_path / "deeds"
    deeds.mkdir()

    def start_up():
        with started.open("a") as file:
            file.write(f"{os.getpid()}\n")

    run(Deadly(deeds, {5: kill_self, 6: exit_hard}), max_restarts=2, startup_func=start_up)
    assert len(started.read_text().split()) == 5


def test_a_worker_that_dies_in_its_startup_func_says_so():
    with pytest.raises(WorkerDiedError, match="status 7 before it had started"):
        run(lambda number, arrays, seed: None, startup_func=lambda: os._exit(7), max_restarts=2)


@pytest.mark.parametrize("deterministic", [True, False])
def test_random_kills_cost_no_item_and_change_no_byte(deterministic, tmp_path, rng):
    def load(number, arrays, seed):
        arrays["x"][:] = number
        arrays["seed"][...] = seed
        time.sleep(0.0005)
        return {"number": number, "pid": os.getpid()}

    def collect(**options):
        batches = {}
        with Dataloader(
            load,
            group(),
            end_at=("epoch", 6),
            timeout_sec=TIMEOUT_S,
            deterministic=deterministic,
            **options,
        ) as dataloader:
            for batch in dataloader:
                batches[batch.batch_num] = np.asarray(batch.arrays["x"]).tolist(), batch.seeds
                if options["max_restarts"] and rng.random() < 0.15:
                    kill_if_there(int(rng.choice(batch.additional["pid"])))
                del batch
        return batches

    assert collect(loader_count=3, max_restarts=100) == collect(loader_count=2, max_restarts=0)


def test_an_error_of_an_item_comes_though_its_worker_died_before(tmp_path):
    def fail():
        raise OSError("no such file")

    deadly = Deadly(tmp_path, {10: kill_self, 11: fail}, times=1)
    with pytest.raises(LoaderError, match="no such file"):
        run(deadly, max_restarts=1)


def test_a_replacement_is_a_worker_like_any_other(tmp_path):
    def load(number, arrays, seed):
        arrays["x"][:] = loader_context().worker_index
        arrays["seed"][...] = os.getpid()
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            sys.stdout.flush()
            kill_self()
        return {"number": loader_context().worker_index}

    with Dataloader(
        load, group(), loader_count=1, timeout_sec=TIMEOUT_S, max_restarts=1, end_at=("batch", 2)
    ) as dataloader:
        for batch in dataloader:
            assert set(batch.arrays["x"][:, 0].tolist()) == {0}
            assert os.getpgid(int(batch.arrays["seed"][0])) == int(batch.arrays["seed"][0])
            del batch


def test_deaths_leave_no_descriptors(tmp_path):
    def load(number, arrays, seed):
        arrays["x"][:] = number
        arrays["seed"][...] = os.getpid()
        return {"number": number}

    with Dataloader(
        load, group(), loader_count=2, timeout_sec=TIMEOUT_S, max_restarts=50
    ) as dataloader:
        counts = []
        for batch in dataloader:
            counts.append(len(os.listdir("/proc/self/fd")))
            if len(counts) % 10 == 0:
                kill_if_there(int(batch.arrays["seed"][0]))
            del batch
            if len(counts) == 300:
                break
        assert max(counts[20:]) <= counts[5] + 1
        assert dataloader.stats().batches_delivered == 300


def test_a_fork_server_that_dies_is_replaced_where_a_worker_is(caplog):
    with Dataloader(
        report_pid,
        group(),
        loader_count=2,
        timeout_sec=TIMEOUT_S,
        start_method="forkserver",
        max_restarts=1,
        end_at=("epoch", 2),
    ) as dataloader:
        pid = next(dataloader).additional["pid"][0]
        server = psutil.Process(pid).ppid()
        assert server != os.getpid()
        kill_if_there(server)
        seconds_until_gone([server], at_most_s=5)
        kill_if_there(pid)
        seconds_until_gone([pid], at_most_s=5)
        time.sleep(0.05)  # next() looks every 20 ms
        numbers = [n for batch in dataloader for n in batch.arrays["x"][:, 0].tolist()]
        assert len(numbers) == 2 * ITEMS - BATCH_SIZE
    assert "another starts" in caplog.text
    assert "restart 1 of at most 1" in caplog.text
