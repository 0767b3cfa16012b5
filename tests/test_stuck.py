"""A loader process that does not go on: where it stands is told, and JAX in it is an error."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from isolated.run import run_script

import hydrax
from hydrax import (
    BatchTimeoutError,
    DataGroup,
    Dataloader,
    HydraxError,
    JaxInWorkerError,
    WorkerDiedError,
    _jax_watch,
)

SPECS = {"x": ((4,), np.float32, np.float32)}
TIMEOUT_S = 20


def numbers(count=20, batch_size=5):
    return DataGroup(batch_size, range(count), loader_arrays=SPECS)


def fill(number, arrays, seed):
    arrays["x"][:] = number


def wait_for_ever():
    time.sleep(1000)  # nobody answers


def wait_at_twelve(number, arrays, seed):
    arrays["x"][:] = number
    if number == 12:
        wait_for_ever()


def use_up(dataloader):
    for batch in dataloader:
        del batch


def text_of_timeout(load, timeout_s=0.5, **options):
    """The message of the time-out that a loader function ends in."""
    with Dataloader(load, numbers(), timeout_sec=TIMEOUT_S, **options) as dataloader:
        # The argument is for the start of the processes, too, which have much to import.
        dataloader._flow.loading.waiter._timeout_s = timeout_s
        with pytest.raises(BatchTimeoutError) as caught:
            use_up(dataloader)
    return str(caught.value)


def doing_at_twelve(do):
    """A loader function that does something at item 12."""

    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 12:
            do()

    return load


# The stack at a time-out


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_a_timeout_shows_the_line_at_which_each_busy_process_stands(start_method):
    text = text_of_timeout(wait_at_twelve, loader_count=2, depth=4, start_method=start_method)
    line = wait_for_ever.__code__.co_firstlineno + 1
    assert f'  File "{__file__}", line {line}, in wait_for_ever\n' in text
    assert "time.sleep(1000)  # nobody answers" in text
    assert text.index("in wait_at_twelve") < text.index("in wait_for_ever")
    assert "run_worker" not in text
    assert text.count("has nothing to do") == 1
    assert re.search(r"loading for \d+\.\d s, now at item 12 ", text)


def test_the_stack_of_a_process_whose_c_code_holds_the_gil_is_shown():
    text = text_of_timeout(doing_at_twelve(lambda: ctypes.PyDLL(None).sleep(1000)))
    assert "ctypes.PyDLL(None).sleep(1000)" in text


def test_the_stack_of_an_endless_loop_is_shown():
    def spin():
        while True:
            pass

    assert "in spin\n" in text_of_timeout(doing_at_twelve(spin))


def test_processes_at_the_same_place_share_one_stack():
    text = text_of_timeout(lambda *_: wait_for_ever(), loader_count=3)
    assert text.count("in wait_for_ever") == 1
    assert len(re.findall("at the same place as loader process 0", text)) == 2


def test_the_stacks_of_the_threads_of_a_loader_are_shown():
    def start_a_thread():
        thread = threading.Thread(target=wait_for_ever, daemon=True)
        thread.start()
        thread.join()

    text = text_of_timeout(doing_at_twelve(start_a_thread))
    assert text.index("thread.join()") < text.index("and another thread of it at")
    assert text.index("and another thread of it at") < text.index("in wait_for_ever")


def test_the_stack_of_startup_func_is_shown():
    text = text_of_timeout(fill, startup_func=wait_for_ever)
    assert "startup_func" in text
    assert "in wait_for_ever\n" in text


def test_the_stack_of_a_batched_loader_is_shown():
    text = text_of_timeout(lambda numbers, arrays, seeds: wait_for_ever(), batched=True)
    assert "in wait_for_ever\n" in text


def test_names_of_all_alphabets_are_shown_as_they_are(tmp_path):
    path = tmp_path / "größe \u6570.py"
    path.write_text("import time\ndef größe():\n    time.sleep(1000)  # ü\n", encoding="utf-8")
    names: dict = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    text = text_of_timeout(doing_at_twelve(names["größe"]))
    assert f'File "{path}", line 3, in größe\n' in text
    assert "# ü" in text


def test_a_very_deep_stack_is_shown_from_its_inner_end():
    def dive(depth):
        if depth:
            dive(depth - 1)
        else:
            wait_for_ever()

    text = text_of_timeout(doing_at_twelve(lambda: dive(300)))
    assert "in wait_for_ever\n" in text
    assert "no Python stack" not in text


def test_a_process_that_has_blocked_its_signals_is_reported_without_a_stack():
    def block():
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        wait_for_ever()

    text = text_of_timeout(doing_at_twelve(block))
    assert "item 12" in text
    assert "no Python stack: it has not answered" in text


def test_a_process_that_has_reset_its_signals_is_not_ended_by_being_asked():
    def reset():
        for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signum not in (32, 33):  # of the C library
                signal.signal(signum, signal.SIG_DFL)
        wait_for_ever()

    with Dataloader(doing_at_twelve(reset), numbers(), timeout_sec=0.5) as dataloader:
        for _ in range(2):
            with pytest.raises(BatchTimeoutError, match="no Python stack: it has reset signal"):
                use_up(dataloader)
        assert dataloader._flow.loading.pool.find_ended() is None


def test_a_file_that_took_the_place_of_the_closed_one_is_not_written_to(tmp_path):
    path = tmp_path / "results"

    def close_and_open():
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:
                continue
            if "hydrax-stack" in target:
                own = os.open(path, os.O_RDWR | os.O_CREAT)
                os.dup2(own, int(name))
        wait_for_ever()

    text = text_of_timeout(doing_at_twelve(close_and_open))
    assert "it has closed the file" in text
    assert path.read_bytes() == b""


def test_each_timeout_shows_the_stack_of_its_time(tmp_path):
    gate = tmp_path / "gate"

    def first():
        while not gate.exists():
            time.sleep(0.01)

    def both():
        first()
        wait_for_ever()

    with Dataloader(doing_at_twelve(both), numbers(), timeout_sec=0.5) as dataloader:
        with pytest.raises(BatchTimeoutError, match="in first\n"):
            use_up(dataloader)
        gate.touch()
        time.sleep(0.1)
        with pytest.raises(BatchTimeoutError) as caught:
            use_up(dataloader)
    assert "in first" not in str(caught.value)
    assert "in wait_for_ever" in str(caught.value)


def test_waiting_goes_on_after_a_stack_was_taken():
    with Dataloader(
        doing_at_twelve(lambda: time.sleep(1.2)), numbers(), end_at=("epoch", 1), timeout_sec=0.4
    ) as dataloader:
        values = []
        while len(values) < 4:
            try:
                batch = next(dataloader)
            except BatchTimeoutError as error:
                assert "time.sleep(1.2)" in str(error)  # noqa: PT017 - it may come or not
                continue
            values.append(float(batch.arrays["x"][2, 0]))
            del batch
        assert values == [2, 7, 12, 17]


# Nothing else is disturbed


def test_signals_and_handlers_of_the_user_are_left_alone():
    numbers_of = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGRTMAX)

    def handler(signum, frame):
        pass

    def load(number, arrays, seed):
        arrays["x"][:] = number
        return {"is_same": [signal.getsignal(n) is handler for n in numbers_of]}

    before = [signal.signal(n, handler) for n in numbers_of]
    try:
        with Dataloader(load, numbers(), end_at=("epoch", 1), timeout_sec=TIMEOUT_S) as dataloader:
            for batch in dataloader:
                assert batch.additional["is_same"] == [[True] * 4] * 5
                assert [signal.getsignal(n) for n in numbers_of] == [handler] * 4
                del batch
        assert [signal.getsignal(n) for n in numbers_of] == [handler] * 4
        # The signal that shows stacks is another one then.
        assert "in wait_for_ever\n" in text_of_timeout(wait_at_twelve)
    finally:
        for signum, old in zip(numbers_of, before, strict=True):
            signal.signal(signum, old)


def test_processes_that_a_loader_starts_are_left_alone(monkeypatch):
    monkeypatch.setattr(_jax_watch, "_IDLE_NS", 100_000_000)  # their parent is asked soon
    python = sys.executable
    code = "import signal; print(int(signal.getsignal(signal.SIGRTMAX)))"

    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 7:
            done = subprocess.run(
                [
                    "sh",
                    "-c",
                    f"sleep 1; grep SigCgt /proc/self/status; {python} -c '{code}'",
                ],
                capture_output=True,
                text=True,
                check=True,
            )
            caught, handler = done.stdout.split()[1:]
            return {"caught": int(caught, 16) >> 34, "handler": int(handler)}
        return None

    with Dataloader(load, numbers(), end_at=("epoch", 1), timeout_sec=TIMEOUT_S) as dataloader:
        batches = [(b.additional.get("caught"), b.additional.get("handler")) for b in dataloader]
    assert batches[1] == ([None, None, 0, None, None], [None, None, 0, None, None])


def test_a_loader_may_wait_long_and_often_without_harm(monkeypatch):
    """System calls that a look interrupts go on, and do so in the same place."""
    monkeypatch.setattr(_jax_watch, "_IDLE_NS", 20_000_000)
    monkeypatch.setattr(hydrax._waiting, "_WATCH_NS", 10_000_000)

    def load(number, arrays, seed):
        read, write = os.pipe()
        thread = threading.Timer(0.2, os.write, (write, b"x" * 16))
        thread.start()
        assert os.read(read, 16) == b"x" * 16
        start = time.monotonic()
        time.sleep(0.1)
        assert time.monotonic() - start >= 0.1
        thread.join()
        arrays["x"][:] = number

    with Dataloader(
        load, numbers(6, 2), loader_count=2, end_at=("epoch", 1), timeout_sec=TIMEOUT_S
    ) as dataloader:
        assert [float(b.arrays["x"][0, 0]) for b in dataloader] == [0, 2, 4]


def test_a_stack_that_is_taken_again_and_again_takes_no_more_memory():
    with Dataloader(wait_at_twelve, numbers(), timeout_sec=0.5) as dataloader:
        with pytest.raises(BatchTimeoutError):
            use_up(dataloader)
        pool = dataloader._flow.loading.pool
        sizes = set()
        for _ in range(50):
            assert pool.stacks([0])[0].frames[-1].function == "wait_for_ever"
            sizes.add(os.fstat(pool._stack_files._fds[0]).st_size)
        assert len(sizes) == 1


# Crashes


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_crash_names_the_line_and_writes_all_to_stderr(start_method, capfd):
    with (
        Dataloader(
            crash_at_five, numbers(), start_method=start_method, timeout_sec=TIMEOUT_S
        ) as dataloader,
        pytest.raises(WorkerDiedError, match="SIGSEGV") as caught,
    ):
        use_up(dataloader)
    assert f'File "{__file__}"' in str(caught.value)
    assert "ctypes.string_at(0)  # no such memory" in str(caught.value)
    assert "run_worker" not in str(caught.value)
    stderr = capfd.readouterr().err
    assert stderr.count("Fatal Python error: Segmentation fault") == 1
    assert "in crash_at_five" in stderr


def crash_at_five(number, arrays, seed):
    arrays["x"][:] = number
    if number == 5:
        ctypes.string_at(0)  # no such memory


def test_a_crash_of_what_a_loader_forks_is_not_that_of_the_loader(capfd):
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 5:
            pid = os.fork()
            if pid == 0:
                ctypes.string_at(0)
            _, status = os.waitpid(pid, 0)
            assert os.WTERMSIG(status) == signal.SIGSEGV
            wait_for_ever()

    with Dataloader(load, numbers(), timeout_sec=0.7) as dataloader:
        with pytest.raises(BatchTimeoutError, match="in wait_for_ever"):
            use_up(dataloader)
        os.kill(dataloader._flow.loading.pool.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
            use_up(dataloader)
    assert "string_at" not in str(caught.value)
    assert capfd.readouterr().err.count("Fatal Python error: Segmentation fault") == 1


def test_a_kill_after_a_stack_was_taken_is_not_taken_for_a_crash(capfd):
    with Dataloader(wait_at_twelve, numbers(), timeout_sec=0.5) as dataloader:
        with pytest.raises(BatchTimeoutError, match="in wait_for_ever"):
            use_up(dataloader)
        os.kill(dataloader._flow.loading.pool.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError) as caught:
            use_up(dataloader)
    assert "in wait_for_ever" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_replaced_process_shows_its_own_stack(capfd):
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 12:
            if not os.path.exists(flag):
                open(flag, "w").close()
                os.abort()
            wait_for_ever()

    flag = f"/proc/{os.getpid()}/cwd/.hydrax-test-{os.getpid()}"
    try:
        text = text_of_timeout(load, timeout_s=1.5, max_restarts=1)
    finally:
        os.unlink(flag)
    assert "in wait_for_ever\n" in text
    assert "Fatal Python error: Aborted" in capfd.readouterr().err


# JAX in a forked process


@jax.jit
def doubled(x):
    return 2 * x


BIG = np.ones(1 << 22, np.float32)


@pytest.fixture
def used_jax():
    """JAX has run something, as in every training process."""
    array = jnp.asarray(BIG)
    doubled(array).block_until_ready()
    return array


@pytest.fixture
def quick(monkeypatch):
    """Looks that come sooner than those of real runs."""
    monkeypatch.setattr(_jax_watch, "_IDLE_NS", 200_000_000)
    monkeypatch.setattr(_jax_watch, "_BETWEEN_NS", 200_000_000)
    monkeypatch.setattr(hydrax._waiting, "_WATCH_NS", 50_000_000)


def jax_error(load, **options):
    """The error that using JAX ends in; next() repeats it, and leaving is quick."""
    with Dataloader(load, numbers(), timeout_sec=TIMEOUT_S, **options) as dataloader:
        with pytest.raises(JaxInWorkerError) as caught:
            use_up(dataloader)
        with pytest.raises(JaxInWorkerError) as again:
            next(dataloader)
        assert again.value is caught.value
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 2  # a quarter of a second, if processors are free
    error = caught.value
    assert isinstance(error, HydraxError)
    assert isinstance(error, RuntimeError)
    assert error.filename == __file__
    assert f"{__file__}:{error.lineno}" in str(error)
    assert f"(pid {error.pid})" in str(error)
    assert "use NumPy" in str(error)
    assert "start_method='spawn'" in str(error)
    return error


def test_jax_in_a_forked_process_is_recognised_within_five_seconds(used_jax):
    called = []

    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 1:
            arrays["x"][:] = jnp.ones(71)[:4]

    start_s = time.monotonic()
    error = jax_error(load)
    assert time.monotonic() - start_s < 5
    assert not called
    assert 'arrays["x"][:] = jnp.ones(71)[:4]' in str(error)
    assert "item 1 (1)" in str(error)
    assert "in ones\n" in str(error)  # what was called
    assert str(error).count("  File ") == 2  # and not what happens inside of JAX


@pytest.mark.parametrize(
    ("call", "source"),
    [
        (lambda x: jax.random.normal(jax.random.key(0), (73,)), "jax.random.normal"),
        (lambda x: jax.device_put(np.ones(79, np.float32)) + 1, "jax.device_put"),
        (lambda x: jax.jit(lambda x: x * 3)(x), "jax.jit(lambda"),
        (lambda x: np.asarray(doubled(x)), "np.asarray(doubled"),
        (lambda x: doubled(x).block_until_ready(), "doubled(x).block"),
    ],
    ids=["random", "device_put", "new jit", "asarray of a jitted result", "block_until_ready"],
)
def test_calls_into_jax_are_recognised_by_their_line(call, source, used_jax, quick):
    assert source in str(jax_error(doing_at_twelve(lambda: call(used_jax))))


def test_jax_in_a_batched_loader_is_recognised_though_all_processes_are_stuck(used_jax, quick):
    def load(numbers, arrays, seeds):
        arrays["x"][:] = jnp.ones((83, 4))[: len(numbers)]

    assert "training batch" in str(jax_error(load, batched=True, loader_count=3))


def test_jax_in_startup_func_is_recognised(used_jax, quick):
    error = jax_error(fill, startup_func=lambda: jnp.ones(89))
    assert "in startup_func" in str(error)


def test_jax_after_a_long_wait_is_recognised(used_jax, quick):
    def load(number, arrays, seed):
        time.sleep(0.7)
        np.asarray(doubled(used_jax))

    assert "doubled(used_jax)" in str(jax_error(load))


def test_jax_in_a_thread_of_a_loader_is_recognised_by_the_timeout(used_jax, quick):
    def load():
        thread = threading.Thread(target=lambda: jnp.ones(97), daemon=True)
        thread.start()
        thread.join()

    text = text_of_timeout(doing_at_twelve(load), 1.5)
    assert "jnp.ones(97)" in text
    assert "JAX cannot be used in a forked process" in text


def test_a_timeout_that_comes_first_says_that_it_is_jax(used_jax):
    text = text_of_timeout(doing_at_twelve(lambda: jnp.ones(101)))
    assert "jnp.ones(101)" in text
    assert "JAX cannot be used in a forked process" in text


def test_what_only_looks_like_jax_is_waited_for(tmp_path, monkeypatch, used_jax, quick):
    """Slow NumPy, sleep, imports from JAX's folder, and functions that JAX calls back."""
    package = tmp_path / "jax_like"
    package.mkdir()
    (package / "__init__.py").write_text("import time; time.sleep(0.7)\nvalue = 1\n")
    (tmp_path / "slow_user.py").write_text(
        textwrap.dedent(
            """
            import time
            import jax.numpy
            time.sleep(0.7)
            value = 1
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    # As if the slow package were a part of JAX that is imported for the first time.
    folders = (*_jax_watch._jax_folders(), str(package) + os.sep)
    monkeypatch.setattr(_jax_watch, "_folders", folders)

    def slow(leaf):
        time.sleep(0.7)
        return leaf

    def load(number, arrays, seed):
        if number == 0:
            arrays["x"][:] = np.linalg.eigvals(np.random.default_rng(0).random((300, 300))).size
        elif number == 1:
            import slow_user

            arrays["x"][:] = slow_user.value
        elif number == 2:
            import jax_like

            arrays["x"][:] = jax_like.value
        elif number == 3:
            arrays["x"][:] = jax.tree.map(slow, {"a": 3})["a"]
        else:
            time.sleep(0.7)
            arrays["x"][:] = number

    with Dataloader(load, numbers(5, 1), end_at=("epoch", 1), timeout_sec=TIMEOUT_S) as dataloader:
        assert [float(b.arrays["x"][0, 0]) for b in dataloader] == [300, 1, 1, 3, 4]


def fill_by_jax(number, arrays, seed):
    arrays["x"][:] = jnp.full(4, number, jnp.float32) + 1


def use_the_cpu():
    jax.config.update("jax_platforms", "cpu")


@pytest.mark.slow
def test_the_remedy_works_jax_in_a_spawned_process():
    with Dataloader(
        fill_by_jax,
        numbers(),
        start_method="spawn",
        startup_func=use_the_cpu,
        end_at=("epoch", 1),
        timeout_sec=40,
    ) as dataloader:
        assert [float(b.arrays["x"][0, 0]) for b in dataloader] == [1, 6, 11, 16]


@pytest.mark.slow
def test_jax_that_has_not_started_before_the_fork_works_in_forked_processes():
    result = run_script("jax_later.py")
    assert result == (0, "[1.0, 6.0, 11.0, 16.0]\n", "")


# Native threads


def test_linear_algebra_that_was_used_before_the_fork_works_after_it():
    a = np.random.default_rng(0).random((200, 200))
    expected = float((a @ a).sum())

    def load(number, arrays, seed):
        arrays["x"][:] = np.float32((a @ a).sum() / expected)

    with Dataloader(
        load, numbers(), loader_count=4, end_at=("epoch", 1), timeout_sec=TIMEOUT_S
    ) as dataloader:
        assert all(np.allclose(np.asarray(b.arrays["x"]), 1) for b in dataloader)


def test_tokenizers_that_were_used_before_the_fork_work_after_it_and_are_quiet(capfd):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 1, "b": 2, "?": 0}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    assert len(tokenizer.encode_batch(["a b"] * 1000)) == 1000

    def load(number, arrays, seed):
        arrays["x"][:3] = tokenizer.encode("a b c").ids
        arrays["x"][3] = len(tokenizer.encode_batch(["a b"] * 100))

    with Dataloader(
        load, numbers(200), loader_count=8, end_at=("epoch", 1), timeout_sec=TIMEOUT_S
    ) as dataloader:
        for batch in dataloader:
            assert batch.arrays["x"].tolist() == [[1, 2, 0, 100]] * 5
            del batch
    assert len(capfd.readouterr().err.splitlines()) <= 1
