"""300 runs of 200 batches, each with a fault at a random moment.

Whatever is done to a run, it ends within ten seconds, with the right exception or with every batch;
what was delivered is right to the last byte and in order; and nothing is left of it. The counts are
printed at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import signal
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from isolated.run import FOLDER, finish, seconds_until_gone, start

from hydrax import (
    BatchRetainedError,
    BatchTimeoutError,
    DataGroup,
    Dataloader,
    LoaderError,
    WorkerDiedError,
)

BATCHES, BATCH_SIZE, WORDS = 200, 4, 24
# Of a run that is to be ended by its fault; more than come until then.
MANY_BATCHES = 10 * BATCHES
ITEMS = 40 * BATCH_SIZE
RUN_LIMIT_S = 10.0
DEADLY_SIGNALS = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGHUP,
)

outcomes: Counter[str] = Counter()

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _report_counts(request):
    yield
    request.node.user_properties.append(("runs with a fault", dict(outcomes)))
    outcomes.clear()


def words_of(numbers, seeds):
    """What the arrays of items hold, one row for each."""
    keys = (np.asarray(numbers, np.uint64) * 7919 + np.asarray(seeds, np.uint64)) % 2**32
    return (
        np.arange(WORDS, dtype=np.uint32) * np.uint32(2654435761) ^ keys.astype(np.uint32)[:, None]
    )


def load_right(number, arrays, seed):
    arrays["words"][:] = words_of([number], [seed])[0]
    arrays["number"][...] = number
    if number % 5 == 0:
        time.sleep(0.0002)


def group():
    return DataGroup(
        BATCH_SIZE,
        range(ITEMS),
        loader_arrays={
            "words": ((WORDS,), np.uint32, np.uint32),
            "number": ((), np.int32, np.int32),
        },
        shuffle_first=True,
        seed=7,
    )


@pytest.fixture(scope="module")
def expected():
    """Numbers and seeds of each batch, as loading in this process has them."""
    with Dataloader(
        load_right, group(), loader_count=0, end_at=("batch", MANY_BATCHES)
    ) as dataloader:
        return [(list(batch.indices), list(batch.seeds)) for batch in dataloader]


def check(batch, expected, skipped=frozenset()):
    """Compare with what it should be; items that are skipped are masked zeros."""
    numbers, seeds = expected[batch.batch_num]
    assert batch.mask.tolist() == [number not in skipped for number in numbers]
    is_valid = np.asarray(batch.mask)
    assert batch.arrays["number"].tolist() == np.where(is_valid, numbers, 0).tolist()
    words = np.where(is_valid[:, None], words_of(numbers, seeds), 0)
    np.testing.assert_array_equal(np.asarray(batch.arrays["words"]), words)


def held():
    """How many processes, descriptors, threads and mappings there are."""
    return (
        len(psutil.Process().children(recursive=True)),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        sum("/memfd:hydrax" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    )


@contextlib.contextmanager
def one_run(outcome):
    """A run that is counted: within its time, and with nothing left of it."""
    gc.collect()
    before = held()
    start_s = time.monotonic()
    yield
    elapsed_s = time.monotonic() - start_s
    assert elapsed_s < RUN_LIMIT_S, f"{outcome}: took {elapsed_s:.1f} s"
    deadline_s = time.monotonic() + 1
    while held() != before:
        gc.collect()
        assert time.monotonic() < deadline_s, f"{outcome}: {before} before, {held()} after"
    outcomes[outcome] += 1


def consume(dataloader, expected):
    """Check all batches; returns their numbers."""
    numbers = []
    for batch in dataloader:
        check(batch, expected)
        numbers.append(batch.batch_num)
        del batch
    return numbers


def endless(rng):
    """Options of a run that the fault ends."""
    return options(rng, end_at=("batch", MANY_BATCHES))


def options(rng, **more):
    return {
        "loader_count": int(rng.integers(1, 4)),
        "depth": int(rng.integers(2, 6)),
        "timeout_sec": 8,
        "end_at": ("batch", BATCHES),
        **more,
    }


@contextlib.contextmanager
def meanwhile(rng, act, within_s=0.08):
    """Do something on another thread at a random moment; it is done when the block is left."""
    thread = threading.Thread(target=lambda: (time.sleep(rng.uniform(0, within_s)), act()))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def is_settled(pid):
    """Whether a worker has come so far that a signal is not taken for one to the whole group."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16) == 0


def signal_worker(rng, dataloader, signum, pids=None):
    """Send a signal to a worker, which may have ended already; its pid is added to pids."""
    pid = int(rng.choice([worker.pid for worker in dataloader.stats().workers]))
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while signum == signal.SIGTERM and not is_settled(pid):
            time.sleep(0.001)
        os.kill(pid, signum)
    if pids is not None:
        pids.append(pid)


def test_a_worker_ended_by_a_signal_is_the_right_error(expected, rng):
    for number in range(64):
        signum = DEADLY_SIGNALS[number % len(DEADLY_SIGNALS)]
        with one_run(f"a worker ended by {signum.name}: WorkerDiedError"):
            pids = []
            with Dataloader(load_right, group(), **endless(rng)) as dataloader:
                act = functools.partial(signal_worker, rng, dataloader, signum, pids)
                with meanwhile(rng, act), pytest.raises(WorkerDiedError) as caught:
                    consume(dataloader, expected)
            assert caught.value.pid == pids[0]
            assert caught.value.exitcode == -signum
            assert signum.name in str(caught.value)
            del caught


def test_workers_that_are_killed_again_and_again_cost_nothing(expected, rng):
    for _ in range(50):
        with one_run("workers killed and replaced: every batch"):
            due = set(rng.integers(0, BATCHES, 4).tolist())
            with Dataloader(load_right, group(), **options(rng, max_restarts=99)) as dataloader:
                for batch in dataloader:
                    check(batch, expected)
                    if batch.batch_num in due:
                        signal_worker(rng, dataloader, DEADLY_SIGNALS[batch.batch_num % 8])
                    del batch
                stats = dataloader.stats()
            assert stats.batches_delivered == BATCHES
            assert stats.items_delivered == BATCHES * BATCH_SIZE


def test_stopped_workers_go_on_where_they_were(expected, rng):
    def pause(dataloader):
        pids = []
        signal_worker(rng, dataloader, signal.SIGSTOP, pids)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(pids[0], signal.SIGCONT)

    for _ in range(20):
        with (
            one_run("a worker stopped and continued: every batch"),
            Dataloader(load_right, group(), **options(rng)) as dataloader,
            meanwhile(rng, functools.partial(pause, dataloader), within_s=0.03),
        ):
            assert consume(dataloader, expected) == list(range(BATCHES))


@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize(
    ("deed", "text"),
    [
        pytest.param(lambda: os._exit(5), "status 5", id="exits"),
        pytest.param(lambda: ctypes.string_at(0), "SIGSEGV", id="crashes"),
        pytest.param(os.abort, "SIGABRT", id="aborts"),
    ],
)
def test_a_loader_that_ends_its_process(deed, text, max_restarts, expected, rng, tmp_path):
    for number in range(5):
        flag = tmp_path / f"{number}"
        at = int(rng.integers(ITEMS))

        def load(number, arrays, seed, flag=flag, at=at):
            if number == at and not flag.exists():
                flag.touch()
                deed()
            load_right(number, arrays, seed)

        outcome = "every batch" if max_restarts else "WorkerDiedError"
        with (
            one_run(f"a loader whose process ends ({text}): {outcome}"),
            Dataloader(load, group(), **options(rng, max_restarts=max_restarts)) as dataloader,
        ):
            if max_restarts:
                assert consume(dataloader, expected) == list(range(BATCHES))
            else:
                with pytest.raises(WorkerDiedError, match=f"{text}.*item {at} "):
                    consume(dataloader, expected)


def test_items_that_fail_are_an_error_or_a_dropped_batch(expected, rng):
    for number in range(40):
        failing = set(rng.integers(0, ITEMS, 3).tolist())
        bad = [n for n in range(BATCHES) if failing & set(expected[n][0])]

        def load(number, arrays, seed, failing=failing):
            if number in failing:
                raise ValueError(f"number {number} is bad")
            load_right(number, arrays, seed)

        if number % 2:
            with (
                one_run("items that raise, on_error='drop_batch': all other batches"),
                Dataloader(load, group(), **options(rng, on_error="drop_batch")) as dataloader,
            ):
                found = consume(dataloader, expected)
                assert found == [n for n in range(BATCHES) if n not in bad]
                assert dataloader.stats().batches_dropped == len(bad)
            continue
        with one_run("items that raise: a LoaderError in the place of each batch"):
            found, errors = [], 0
            with Dataloader(load, group(), **options(rng)) as dataloader:
                while len(found) + errors < BATCHES:
                    try:
                        batch = next(dataloader)
                    except LoaderError as error:
                        errors += error.index in failing
                        continue
                    check(batch, expected)
                    found.append(batch.batch_num)
                    del batch
            assert found == [n for n in range(BATCHES) if n not in bad]
            assert errors == len(bad)


def test_items_that_fail_may_be_skipped_and_all_others_come(expected, rng):
    for _ in range(14):
        failing = set(rng.integers(0, ITEMS, 3).tolist())

        def load(number, arrays, seed, failing=failing):
            arrays["words"][:] = 1  # what is left of it is not to be seen
            if number in failing:
                raise ValueError(f"number {number} is bad")
            load_right(number, arrays, seed)

        with (
            one_run("items that raise, on_error='skip_item': every other item"),
            Dataloader(load, group(), **options(rng, on_error="skip_item")) as dataloader,
        ):
            for batch in dataloader:
                check(batch, expected, failing)
                del batch
            stats = dataloader.stats()
            skipped = sum(
                number in failing for numbers, _ in expected[:BATCHES] for number in numbers
            )
            assert stats.items_skipped + stats.items_dropped == skipped
            assert stats.items_delivered == BATCHES * BATCH_SIZE - skipped


def test_a_loader_that_is_stuck_is_a_time_out(expected, rng):
    for _ in range(8):
        at = int(rng.integers(ITEMS))

        def load(number, arrays, seed, at=at):
            if number == at:
                time.sleep(1000)
            load_right(number, arrays, seed)

        with (
            one_run("a loader that sleeps for ever: BatchTimeoutError"),
            Dataloader(load, group(), **options(rng, timeout_sec=0.3)) as dataloader,
            pytest.raises(BatchTimeoutError, match=f"item {at} "),
        ):
            consume(dataloader, expected)


def test_batches_that_are_kept_are_a_time_out_and_stay_right(expected, rng):
    for _ in range(8):
        with one_run("batches that are kept: BatchRetainedError"):
            kept = []
            with Dataloader(load_right, group(), **options(rng, timeout_sec=0.3)) as dataloader:
                with pytest.raises(BatchRetainedError, match="kept"):
                    for batch in dataloader:
                        kept.append(batch)
                assert 2 <= len(kept) <= 5
                for batch in kept:
                    check(batch, expected)
                del batch
                kept.clear()
                consume(dataloader, expected)


class _StopTraining(Exception):
    pass


@pytest.mark.parametrize("how", ["break", "exception", "generator", "forgotten"])
def test_leaving_at_any_moment_leaves_nothing(how, expected, rng):
    def leave_at(last, dataloader):
        for batch in dataloader:
            check(batch, expected)
            if batch.batch_num == last:
                if how == "exception":
                    raise _StopTraining
                return
            del batch

    def batches(dataloader):
        with dataloader:
            yield from dataloader

    for _ in range(6):
        last = int(rng.integers(BATCHES))
        with one_run(f"left early, by {how}: nothing is left"):
            dataloader = Dataloader(load_right, group(), **options(rng))
            if how == "generator":
                generator = batches(dataloader)
                for _, batch in zip(range(last), generator, strict=False):
                    check(batch, expected)
                batch = None
                generator.close()
                del generator
            elif how == "forgotten":
                dataloader.__enter__()
                leave_at(last, dataloader)
            else:
                with contextlib.suppress(_StopTraining), dataloader:
                    leave_at(last, dataloader)
            del dataloader


def test_sigint_at_any_moment_ends_the_flow_softly(expected, rng):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(20):
        with one_run("SIGINT to the main process: the flow ends after a whole batch"):
            with Dataloader(load_right, group(), **endless(rng)) as dataloader:
                with meanwhile(rng, interrupt):
                    found = consume(dataloader, expected)
                assert dataloader.interrupted
            assert found == list(range(len(found)))


def test_processes_that_the_user_forks_meanwhile_do_not_matter(expected, rng):
    def fork(pids):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(0)
        pids.append(pid)

    for _ in range(10):
        pids = []
        with one_run("forks of the user's: every batch"):
            with Dataloader(load_right, group(), **options(rng)) as dataloader:
                due = int(rng.integers(BATCHES))
                for batch in dataloader:
                    check(batch, expected)
                    if batch.batch_num == due:
                        fork(pids)
                    del batch
            os.waitpid(pids[0], 0)


def test_workers_of_a_killed_main_process_end_and_free_the_memory(rng):
    for _ in range(3):  # side by side, since each has to import JAX
        programs = [start(str(FOLDER / "endless.py"), "fork", "quick") for _ in range(4)]
        for program in programs:
            assert program.stdout.readline() == "training\n"
        for program in programs:
            workers = [child.pid for child in psutil.Process(program.pid).children()]
            assert len(workers) == 4
            time.sleep(rng.uniform(0, 0.05))
            program.kill()
            assert seconds_until_gone(workers, at_most_s=2) < 1
            assert finish(program).returncode == -signal.SIGKILL
            outcomes["the main process killed: all processes are gone"] += 1
