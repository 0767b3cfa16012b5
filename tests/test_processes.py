"""Loader processes: how they start and end, what they cost, and what signals do."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import threading
import time
import warnings
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest
from isolated.run import FOLDER, finish, is_running, run_script, seconds_until_gone, start

import hydrax
from hydrax import BatchTimeoutError, DataGroup, Dataloader, LoaderError, WorkerStartError

SPECS = {"x": ((4,), np.float32, np.float32)}
START_METHODS = ("fork", "forkserver", "spawn")
TIMEOUT_S = 15


def fill(number, arrays, seed):
    arrays["x"][:] = number


def fill_with_noise(number, arrays, seed):
    time.sleep(number % 3 / 2000)
    arrays["x"][:] = np.random.default_rng(seed).normal(size=4) + number
    return {"seed": seed}


def fill_or_sleep(number, arrays, seed):
    arrays["x"][:] = number
    if number >= 10:
        time.sleep(3)


def fail_at_seven(number, arrays, seed):
    arrays["x"][:] = number
    if number == 7:
        raise ValueError("bad picture")


def report_pid(number, arrays, seed):
    arrays["x"][:] = number
    return {"pid": os.getpid(), "is_worker": hydrax.is_worker()}


def run_a_long_command(number, arrays, seed):
    with subprocess.Popen(["sleep", "60"]) as process:
        Path(os.environ["HYDRAX_TEST_FOLDER"], str(process.pid)).touch()


def numbers(count=20, batch_size=5, **options):
    return DataGroup(batch_size, range(count), loader_arrays=SPECS, **options)


def firsts(dataloader):
    return [float(batch.arrays["x"][0, 0]) for batch in dataloader]


def worker_pids(dataloader):
    """All loader processes that have loaded something in the rest of the run."""
    return {pid for batch in dataloader for pid in batch.additional["pid"]}


# How they start


@pytest.mark.parametrize("start_method", START_METHODS)
def test_each_start_method_gives_the_bytes_that_loading_in_process_gives(start_method):
    def run(**options):
        group = numbers(60, 8, seed=5, shuffle_first=True)
        with Dataloader(
            fill_with_noise, group, end_at=("epoch", 2), timeout_sec=30, **options
        ) as dataloader:
            return [
                (np.asarray(batch.arrays["x"]).tobytes(), batch.additional["seed"])
                for batch in dataloader
            ]

    assert run(start_method=start_method, loader_count=2) == run(loader_count=0)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_loader_defined_in_the_script_works_with_each_start_method(start_method):
    result = run_script("main_loader.py", start_method)
    assert result == (0, "[80.0, 280.0, 480.0, 680.0]\n", "")


@pytest.mark.parametrize("how", ["command", "stdin"])
def test_a_script_without_a_file_works_with_fork_and_is_refused_otherwise(how):
    script = (FOLDER / "main_loader.py").read_text()
    fork = script.replace("sys.argv[1]", "'fork'")
    spawn = script.replace("sys.argv[1]", "'spawn'")
    runs = [
        finish(start("-c", text) if how == "command" else start("-", stdin=text))
        for text in (fork, spawn)
    ]
    assert runs[0] == (0, "[80.0, 280.0, 480.0, 680.0]\n", "")
    assert runs[1].returncode == 1
    assert runs[1].stderr.splitlines()[-1].startswith("TypeError: loader_func")
    assert "start_method='fork'" in runs[1].stderr


def test_top_level_code_runs_exactly_once_under_fork(tmp_path):
    log = tmp_path / "pids"
    result = run_script("unguarded.py", "fork", str(log))
    assert result == (0, "40.0\n140.0\n240.0\n340.0\n", "")
    assert len(log.read_text().split()) == 1


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_main_script_without_guard_is_told_so_at_once(start_method, tmp_path):
    log = tmp_path / "pids"
    start_s = time.monotonic()
    result = run_script("unguarded.py", start_method, str(log))
    assert time.monotonic() - start_s < 20
    assert result.returncode == 1
    assert "WorkerStartError" in result.stderr
    assert "if __name__ == '__main__':" in result.stderr
    pids = [int(pid) for pid in log.read_text().split()]
    assert len(pids) <= 3  # the script itself, and once in each loader process
    seconds_until_gone(pids, 2)


def test_a_dataloader_works_while_a_module_is_imported():
    assert run_script("at_import.py") == (0, "10\n", "")


def test_a_dataloader_works_in_a_daemonic_process():
    assert run_script("daemonic.py") == (0, "10\n" * 3, "")


def test_the_users_choice_of_start_method_is_left_alone():
    before = multiprocessing.get_start_method(allow_none=True)
    with Dataloader(fill, numbers(), end_at=("epoch", 1)) as dataloader:
        assert len(firsts(dataloader)) == 4
    assert multiprocessing.get_start_method(allow_none=True) == before


class FailsToLoad:
    """A loader that a fresh process cannot unpickle."""

    def __call__(self, number, arrays, seed):
        pass

    def __setstate__(self, state):
        raise OSError("no licence server")

    def __getstate__(self):
        return {"a": 1}


class ExitsWhenLoaded(FailsToLoad):
    def __setstate__(self, state):
        os._exit(9)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_process_that_cannot_load_its_job_says_why(start_method):
    with pytest.raises(WorkerStartError, match="no licence server"):
        Dataloader(FailsToLoad(), numbers(), start_method=start_method).__enter__()
    with pytest.raises(WorkerStartError):
        Dataloader(ExitsWhenLoaded(), numbers(), start_method=start_method).__enter__()


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_loader_that_raises_is_reported_with_each_start_method(start_method):
    with Dataloader(
        fail_at_seven, numbers(), start_method=start_method, end_at=("epoch", 1)
    ) as dataloader:
        next(dataloader)
        with pytest.raises(LoaderError, match="bad picture") as caught:
            next(dataloader)
        assert isinstance(caught.value.__cause__, ValueError)
        assert firsts(dataloader) == [10, 15]


def test_the_startup_func_runs_once_in_each_of_all_loader_processes(tmp_path):
    log = tmp_path / "pids"

    def start_up():
        assert hydrax.is_worker()
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")

    with Dataloader(
        fill, numbers(200, 2), startup_func=start_up, loader_count=5, depth=2, end_at=("epoch", 1)
    ) as dataloader:
        assert len(firsts(dataloader)) == 100
        deadline = time.monotonic() + 5
        while len(log.read_text().split()) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
    pids = log.read_text().split()
    assert len(pids) == len(set(pids)) == 5  # loader_count is not cut to depth


def test_loader_processes_know_what_they_are_and_the_main_process_does_too():
    with Dataloader(report_pid, numbers(), end_at=("epoch", 1), loader_count=2) as dataloader:
        for batch in dataloader:
            assert all(batch.additional["is_worker"])
            assert os.getpid() not in batch.additional["pid"]
            del batch
    assert not hydrax.is_worker()
    with Dataloader(report_pid, numbers(), end_at=("epoch", 1), loader_count=0) as dataloader:
        for batch in dataloader:
            assert not any(batch.additional["is_worker"])
            assert set(batch.additional["pid"]) == {os.getpid()}
            del batch


def test_the_same_processes_load_all_epochs():
    with Dataloader(report_pid, numbers(), end_at=("epoch", 20), loader_count=2) as dataloader:
        assert len(worker_pids(dataloader)) <= 2


def test_loader_nice_is_added_to_the_niceness_of_loader_processes():
    def load(number, arrays, seed):
        arrays["x"][:] = os.nice(0)

    with Dataloader(load, numbers(), loader_nice=3, end_at=("epoch", 1)) as dataloader:
        assert firsts(dataloader) == [os.nice(0) + 3] * 4


def test_the_loader_may_start_and_end_processes_of_its_own():
    assert run_script("nested.py", timeout_s=30) == (0, "[0.0, 2.0, 4.0, 6.0]\n", "")


def test_a_loader_may_fork_and_leave_threads_behind():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        threading.Thread(target=time.sleep, args=(100,)).start()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    start_s = time.monotonic()
    with Dataloader(
        load, numbers(), end_at=("epoch", 1), loader_count=2, timeout_sec=TIMEOUT_S
    ) as dataloader:
        assert firsts(dataloader) == [0, 5, 10, 15]
    assert time.monotonic() - start_s < 5


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("way_back", ["raises", "returns"])
def test_a_forked_child_that_comes_back_from_the_loader_function_does_not_load(
    way_back, batched, capfd
):
    def load(number, arrays, seed):
        pid = os.fork()
        if pid == 0:
            if way_back == "raises":
                raise RuntimeError("in the child")
            return
        os.waitpid(pid, 0)
        arrays["x"][:] = np.reshape(number, (-1, 1))

    with Dataloader(
        load,
        DataGroup(10, range(30), loader_arrays={"x": ((4,), np.int16, np.float32)}),
        batched=batched,
        end_at=("epoch", 1),
        on_error="skip_item",
        timeout_sec=TIMEOUT_S,
    ) as dataloader:
        for batch in dataloader:
            assert batch.mask.all()
            assert batch.arrays["x"][:, 0].tolist() == list(batch.data)
            del batch
    assert "end it there with os._exit()" in capfd.readouterr().err


# How they end


@pytest.mark.parametrize(
    ("start_method", "work"),
    [
        ("fork", "quick"),
        ("fork", "sleep"),
        ("fork", "hold_gil"),
        ("fork", "start"),
        ("forkserver", "sleep"),
        ("spawn", "quick"),
    ],
)
def test_no_loader_process_outlives_a_killed_main_process(start_method, work):
    main = start(str(FOLDER / "endless.py"), start_method, work)
    assert main.stdout.readline() == "training\n"
    # Of the four, those that have items to load start a program each.
    count = 4 + (start_method == "forkserver") + 2 * (work == "start")
    deadline_s = time.monotonic() + 10
    while len(workers := psutil.Process(main.pid).children(recursive=True)) < count:
        assert time.monotonic() < deadline_s, workers
        time.sleep(0.01)
    main.kill()
    main.wait()
    try:
        seconds_until_gone([worker.pid for worker in workers], 1)
    finally:
        finish(main)


def test_sigterm_ends_the_main_process_and_its_loader_processes():
    main = start(str(FOLDER / "endless.py"), "fork", "sleep")
    assert main.stdout.readline() == "training\n"
    workers = psutil.Process(main.pid).children(recursive=True)
    os.killpg(main.pid, signal.SIGTERM)  # as a shell or a scheduler does
    result = finish(main, 5)
    seconds_until_gone([worker.pid for worker in workers], 1)
    assert result == (-signal.SIGTERM, "", "")


@pytest.mark.parametrize("start_method", START_METHODS)
def test_leaving_the_block_does_not_wait_for_items_that_take_long(start_method):
    with Dataloader(
        fill_or_sleep, numbers(400, 10), loader_count=4, start_method=start_method
    ) as dataloader:
        next(dataloader)
        time.sleep(0.05)
        workers = psutil.Process().children(recursive=True)
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 1
    ours = [worker.pid for worker in workers if "tracker" not in " ".join(command_of(worker))]
    seconds_until_gone(ours, 0.5)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_what_a_loader_waits_for_ends_with_its_process(start_method, tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRAX_TEST_FOLDER", str(tmp_path))
    with Dataloader(run_a_long_command, numbers(), start_method=start_method, timeout_sec=60):
        deadline = time.monotonic() + TIMEOUT_S
        while not (started := list(tmp_path.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.01)
    pids = [int(path.name) for path in started]
    assert len(pids) == 1
    seconds_until_gone(pids, at_most_s=1)


def command_of(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_sixteen_busy_processes_end_as_quickly_as_one():
    with Dataloader(fill_or_sleep, numbers(400, 10), loader_count=16) as dataloader:
        next(dataloader)
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 1


@pytest.mark.parametrize(
    ("how", "start_method"),
    [
        ("end", "fork"),
        ("early", "fork"),
        ("raise", "fork"),
        ("early", "forkserver"),
        ("end", "spawn"),
    ],
)
def test_sixteen_processes_end_without_a_word(how, start_method):
    status = 3 if how == "raise" else 0
    assert run_script("quiet.py", how, start_method) == (status, "", "")


def test_an_exception_in_the_loop_comes_out_at_once_as_it_is():
    held = []
    error = RuntimeError("the loss is NaN")

    def train():
        with Dataloader(fill, numbers()) as dataloader:
            for batch in dataloader:
                held.append(batch)
                raise error

    start_s = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        train()
    assert caught.value is error
    assert time.monotonic() - start_s < 2
    assert held[0].arrays["x"][:, 0].tolist() == [0, 1, 2, 3, 4]
    error.__traceback__ = None


def test_a_dataloader_that_was_never_entered_holds_nothing():
    before = len(os.listdir("/proc/self/fd"))
    dataloader = Dataloader(fill, numbers())
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(RuntimeError, match="with block"):
        next(dataloader)
    with pytest.raises(RuntimeError, match="with block"):
        next(iter(dataloader))


def test_a_dataloader_is_entered_once():
    dataloader = Dataloader(fill, numbers(), end_at=("epoch", 1))
    with dataloader:
        with pytest.raises(RuntimeError, match="entered"):
            dataloader.__enter__()
        assert firsts(dataloader) == [0, 5, 10, 15]
        assert list(dataloader) == []
    with pytest.raises(RuntimeError, match="left"):
        next(dataloader)
    with pytest.raises(RuntimeError, match="entered"):
        dataloader.__enter__()
    dataloader.__exit__(None, None, None)


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_forgotten_dataloader_ends_its_processes_and_gives_sigint_back(start_method):
    before = signal.getsignal(signal.SIGINT)
    dataloader = Dataloader(report_pid, numbers(100), start_method=start_method)
    dataloader.__enter__()
    pids = next(dataloader).additional["pid"]
    gone = weakref.ref(dataloader)
    del dataloader
    gc.collect()
    assert gone() is None
    seconds_until_gone(pids, 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_iterators_can_be_dropped_and_made_anew():
    def batches(dataloader):
        for batch in dataloader:
            yield batch.get_data(0)
            del batch

    with Dataloader(fill, numbers(), end_at=("epoch", 1), timeout_sec=TIMEOUT_S) as dataloader:
        generator = batches(dataloader)
        assert next(generator) == 0
        generator.close()
        assert next(iter(dataloader)).get_data(0) == 5
        assert [batch.get_data(0) for batch in dataloader] == [10, 15]


def test_a_failed_start_leaves_nothing_and_the_handlers_alone():
    before = signal.getsignal(signal.SIGINT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    dataloader = Dataloader(fill, numbers(), loader_count=8)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, hard))
    try:
        with pytest.raises(OSError, match="open files"):
            dataloader.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert signal.getsignal(signal.SIGINT) is before


# What they cost


def test_descriptors_and_maps_are_constant_from_the_second_batch_on():
    result = run_script("resources.py", "1000")
    assert result.returncode == 0, result.stderr
    first, *later = json.loads(result.stdout)
    for counts in later:
        assert [fds for fds, _ in counts] == [fds for fds, _ in first]
    # Of the maps, those of the arena; a malloc may map something of its own at any time.
    for process in zip(first, *later, strict=True):
        maps = [count for _, count in process]
        assert max(maps) - maps[0] <= 3, maps


def test_jobs_that_start_at_the_same_instant_do_not_collide():
    jobs = [start(str(FOLDER / "resources.py"), "20") for _ in range(4)]
    for job in jobs:
        result = finish(job)
        assert result.returncode == 0, result.stderr


def test_four_forked_processes_cost_the_arena_and_8_mb_each_at_most():
    result = run_script("memory.py")
    assert result.returncode == 0, result.stderr
    workers, arena_nbytes, more_nbytes = (int(word) for word in result.stdout.split())
    assert workers == 4
    assert more_nbytes <= arena_nbytes + workers * 8 * 2**20


# Signals, threads and forks


def test_the_first_sigint_stops_the_flow_of_batches():
    with Dataloader(fill, numbers(), timeout_sec=TIMEOUT_S) as dataloader:
        count = 0
        for batch in dataloader:
            count += 1
            if batch.batch_num == 3:
                signal.raise_signal(signal.SIGINT)
            del batch
        assert dataloader.interrupted
        assert count == 4
        assert list(dataloader) == []
    assert dataloader.interrupted


def test_the_second_sigint_raises_at_the_next_batch():
    with Dataloader(fill, numbers(), timeout_sec=TIMEOUT_S) as dataloader:
        next(dataloader)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            next(dataloader)
    assert dataloader.interrupted


@pytest.mark.parametrize("times", [1, 2, 3])
def test_sigint_to_the_whole_process_group_ends_as_documented(times):
    result = run_script("interrupts.py", str(times), timeout_s=20)
    if times == 1:
        assert result == (0, "left the loop, interrupted: True\n", "")
    elif times == 2:
        assert result.returncode == -signal.SIGINT
        assert result.stderr.count("Traceback") == 1
        assert result.stderr.splitlines()[-1] == "KeyboardInterrupt"
    else:
        assert result == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("loader_count", [0, 1])
def test_sigint_ends_the_waiting_for_a_batch(loader_count):
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])

    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 5:
            time.sleep(0.6 if loader_count == 0 else 100)

    with Dataloader(load, numbers(), loader_count=loader_count, timeout_sec=30) as dataloader:
        next(dataloader)
        timer.start()
        start_s = time.monotonic()
        assert [batch.batch_num for batch in dataloader] in ([], [1])
        assert dataloader.interrupted
    assert time.monotonic() - start_s < 2
    timer.join()


def test_sigint_is_not_lost_in_what_python_calls_after_a_fork():
    pids = []  # a hook stays for good; it does nothing once this is empty

    def interrupt():  # exceptions of it are not raised
        if pids:
            os.kill(pids.pop(), signal.SIGINT)
            time.sleep(0.05)  # another thread gets it meanwhile

    os.register_at_fork(after_in_parent=interrupt)
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    try:
        pids.append(os.getpid())
        with pytest.raises(KeyboardInterrupt), Dataloader(fill, numbers(), loader_count=2):
            pytest.fail("the signal is lost")
    finally:
        is_over.set()
        thread.join()
    assert not pids
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_interrupt_from_another_thread_ends_the_waiting_for_a_batch():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 5:
            time.sleep(100)

    with Dataloader(load, numbers(), timeout_sec=30) as dataloader:
        next(dataloader)
        timer = threading.Timer(0.2, dataloader.interrupt)
        timer.start()
        start_s = time.monotonic()
        assert list(dataloader) == []
        assert dataloader.interrupted
    assert time.monotonic() - start_s < 1.5
    timer.join()


def test_interrupt_before_the_start_and_after_the_end_is_harmless():
    dataloader = Dataloader(fill, numbers())
    dataloader.interrupt()
    with dataloader:
        assert list(dataloader) == []
    dataloader.interrupt()
    assert dataloader.interrupted


def test_the_users_signal_handlers_are_as_before():
    numbers_of_signals = (signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD, signal.SIGTERM)

    def handler(signum, frame):
        pass

    before = {number: signal.signal(number, handler) for number in numbers_of_signals}
    try:
        with Dataloader(fill, numbers(), end_at=("epoch", 1)) as dataloader:
            assert len(firsts(dataloader)) == 4
            for number in numbers_of_signals[1:]:
                assert signal.getsignal(number) is handler
        for number in numbers_of_signals:
            assert signal.getsignal(number) is handler
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def test_a_handler_that_was_set_inside_the_block_stays():
    before = signal.getsignal(signal.SIGINT)

    def handler(signum, frame):
        pass

    try:
        with Dataloader(fill, numbers(), end_at=("epoch", 1)):
            signal.signal(signal.SIGINT, handler)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ignored_sigint_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Dataloader(fill, numbers(), end_at=("epoch", 1), timeout_sec=9) as dataloader:
            signal.raise_signal(signal.SIGINT)
            assert len(firsts(dataloader)) == 4
            assert not dataloader.interrupted
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "nested"])
def test_two_dataloaders_left_in_any_order_give_sigint_back(order):
    before = signal.getsignal(signal.SIGINT)
    dataloaders = [Dataloader(fill, numbers()) for _ in range(2)]
    for dataloader in dataloaders:
        dataloader.__enter__()
    for index in order:
        dataloaders[index].__exit__(None, None, None)
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is before


@pytest.mark.parametrize("how", ["ignored", "collected"])
@pytest.mark.parametrize("end", ["whole", "killed"])
def test_a_program_that_collects_all_its_children_itself_can_train(how, end):
    result = run_script("signals.py", how, end)
    expected = "10 0\n" if end == "whole" else r"WorkerDiedError \d 0\n"
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(expected, result.stdout)


def test_sigint_while_leaving_lets_no_process_live_on():
    pids = []

    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number >= 10:
            time.sleep(100)
        return {"pid": os.getpid()}

    dataloader = Dataloader(load, numbers(), loader_count=2, timeout_sec=TIMEOUT_S)
    dataloader.__enter__()
    for _ in range(2):
        pids += next(dataloader).additional["pid"]
    time.sleep(0.1)
    timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    try:
        dataloader.__exit__(None, None, None)
        time.sleep(0.2)
    except KeyboardInterrupt:
        pass
    timer.join()
    seconds_until_gone(pids, 1)


def test_a_dataloader_works_off_the_main_thread():
    got = []
    before = signal.getsignal(signal.SIGINT)

    def train():
        with Dataloader(
            fill, numbers(), end_at=("epoch", 1), loader_count=2, timeout_sec=TIMEOUT_S
        ) as dataloader:
            got.extend(firsts(dataloader))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(20)
    assert got == [0, 5, 10, 15]
    assert signal.getsignal(signal.SIGINT) is before


def test_several_threads_train_side_by_side():
    got = {}

    def train(index):
        group = DataGroup(5, range(100 * index, 100 * index + 60), loader_arrays=SPECS)
        with Dataloader(
            fill, group, end_at=("epoch", 1), loader_count=1, timeout_sec=TIMEOUT_S
        ) as dataloader:
            got[index] = firsts(dataloader)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == {index: list(range(100 * index, 100 * index + 60, 5)) for index in range(4)}


def test_a_child_that_the_user_forks_does_not_end_the_parents_flow():
    assert run_script("forked_child.py") == (0, "20\n", "")


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_child_that_the_user_forks_has_no_descriptor_of_ours_and_says_nothing(
    start_method, capfd
):
    def descriptors():
        return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}

    before = descriptors()
    with Dataloader(
        fill, numbers(), start_method=start_method, loader_count=2, end_at=("epoch", 1)
    ) as dataloader:
        first = next(dataloader)
        del first
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python advises against it, with reason
            pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(0 if descriptors() <= before else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert firsts(dataloader) == [5, 10, 15]
    assert capfd.readouterr().err == ""


def test_two_dataloaders_deliver_their_own_and_closing_one_disturbs_nobody():
    def load_wide(number, arrays, seed):
        arrays["wide"][:] = -number

    wide = DataGroup(3, range(90), loader_arrays={"wide": ((2, 7), np.int16, np.int16)})
    first = Dataloader(fill, numbers(100), end_at=("epoch", 1), loader_count=2, timeout_sec=9)
    second = Dataloader(load_wide, wide, end_at=("epoch", 1), timeout_sec=9)
    with first:
        second.__enter__()
        for start_number in range(0, 50, 5):
            x = next(first).arrays["x"]
            assert x[:, 0].tolist() == list(range(start_number, start_number + 5))
            y = next(second).arrays["wide"]
            low = start_number // 5 * 3
            assert y[:, 1, 6].tolist() == [-low, -low - 1, -low - 2]
        second.__exit__(None, None, None)
        assert y[0, 0, 0] == -27  # its memory outlives it
        del x, y
        assert firsts(first) == list(range(50, 100, 5))


def test_one_data_group_serves_two_dataloaders():
    group = numbers(20, 5, shuffle_first=True)
    with (
        Dataloader(fill, group, end_at=("epoch", 1), timeout_sec=9) as first,
        Dataloader(fill, group, end_at=("epoch", 1), timeout_sec=9) as second,
    ):
        for one, other in zip(first, second, strict=True):
            assert list(one.indices) == list(other.indices)
            assert np.array_equal(one.arrays["x"], other.arrays["x"])
            del one, other


def test_stopped_processes_are_reported_by_the_timeout_and_do_not_hold_up_the_end():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 7:
            os.kill(os.getpid(), signal.SIGSTOP)

    with Dataloader(load, numbers(), timeout_sec=1) as dataloader:
        next(dataloader)
        with pytest.raises(BatchTimeoutError, match=r"process 0 \(pid \d+\).*item 7"):
            next(dataloader)
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 1


def test_a_stopped_process_that_goes_on_is_forgiven():
    pids = []

    def load(number, arrays, seed):
        arrays["x"][:] = number
        return {"pid": os.getpid()}

    with Dataloader(load, numbers(100), end_at=("epoch", 1), timeout_sec=9) as dataloader:
        pids += next(dataloader).additional["pid"]
        os.kill(pids[0], signal.SIGSTOP)
        threading.Timer(0.3, os.kill, [pids[0], signal.SIGCONT]).start()
        assert firsts(dataloader) == list(range(5, 100, 5))


def test_starting_and_leaving_many_times_leaves_nothing(rng):
    counts = []
    for round_number in range(60):
        with Dataloader(
            fill, numbers(100), loader_count=int(rng.integers(1, 4)), timeout_sec=TIMEOUT_S
        ) as dataloader:
            for _ in range(int(rng.integers(0, 4))):
                next(dataloader)
        if round_number in (5, 59):
            counts.append(
                (
                    len(os.listdir("/proc/self/fd")),
                    threading.active_count(),
                    Path("/proc/self/maps").read_text().count("memfd"),
                )
            )
    assert counts[0] == counts[1]
    assert not any(is_running(child.pid) for child in psutil.Process().children())


def test_a_startup_func_sets_the_processors_of_its_process_and_affinity_is_inherited():
    processors = os.sched_getaffinity(0)
    pinned = {min(processors)}

    def load(number, arrays, seed):
        return {"processors": os.sched_getaffinity(0)}

    def seen(startup_func):
        with Dataloader(
            load, numbers(), loader_count=2, startup_func=startup_func, timeout_sec=TIMEOUT_S
        ) as dataloader:
            return next(dataloader).additional["processors"][0]

    os.sched_setaffinity(0, pinned)
    try:
        assert seen(None) == pinned
        assert seen(lambda: os.sched_setaffinity(0, processors)) == processors
    finally:
        os.sched_setaffinity(0, processors)
