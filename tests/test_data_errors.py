"""What goes wrong behind a draw reaches the program that draws, and leaves the process usable."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import signal
import textwrap
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from isolated.run import finish
from isolated.run import start as start_script

import hydrax
from hydrax import _core, data
from hydrax.data.arena_loader import ArenaDataLoader
from hydrax.data.numpy_loader import NumpyDataLoader

# JAX raises the one or the other, depending on how it has dispatched the program.
FAILURES = (jax.errors.JaxRuntimeError, ValueError)


class SpecialError(ValueError):
    """Of this module alone."""


def group(count: int = 40) -> Any:
    return hydrax.DataGroup(1, range(count), loader_arrays={"x": ((), np.float32, np.float32)})


def start(load: Any, *, count: int = 40, cache_size: int = 1, **kwargs: Any) -> Any:
    loader = ArenaDataLoader(load, group(count), worker_count=2)
    init, get_batch, release = data.random_reference_data(loader, cache_size, 4, **kwargs)
    return loader, init, jax.jit(get_batch), release


def test_the_exception_of_a_loader_function_reaches_the_program(tmp_path):
    marker = tmp_path / "broken"
    marker.touch()

    def load(number: int, arrays: Any, seed: Any) -> None:
        if marker.exists():
            raise SpecialError(f"no row {number}")
        arrays["x"][...] = number

    loader, init, draw, release = start(load)
    state = init(seed=0)
    for _ in range(2):  # the same on the first and on a later call
        with pytest.raises(FAILURES, match="SpecialError: no row") as caught:
            jax.block_until_ready(draw(state))
        assert "raise SpecialError" in str(caught.value)  # the traceback in the loader process
        assert "random draw 0 (seed 0)" in str(caught.value)
        for source in (loader, release, init):
            error = data.last_error(source)
            assert type(error) is SpecialError
            assert "no row" in str(error)
    marker.unlink()
    _, batch = draw(state)
    assert batch["x"].shape == (4,)
    release()


def test_a_failing_start_up_reaches_the_program():
    def startup() -> None:
        raise SpecialError("cannot start")

    loader = ArenaDataLoader(lambda *_: None, group(), startup_func=startup)
    init, get_batch, release = data.random_reference_data(loader, 1, 4)
    with pytest.raises(FAILURES, match="SpecialError: cannot start"):
        jax.block_until_ready(jax.jit(get_batch)(init()))
    release()


def test_values_that_do_not_fit_are_an_error():
    def load(number: int, arrays: Any, seed: Any) -> None:
        arrays["x"][...] = 2**40

    wide = hydrax.DataGroup(1, range(9), loader_arrays={"x": ((), np.int64, np.int32)})
    init, get_batch, release = data.random_reference_data(ArenaDataLoader(load, wide), 1, 4)
    with pytest.raises(FAILURES, match="1099511627776 does not fit int32"):
        jax.block_until_ready(jax.jit(get_batch)(init()))
    assert isinstance(data.last_error(release), hydrax.ValueRangeError)
    release()


def test_the_death_of_a_loader_process_reaches_the_program_and_the_next_draw_works(tmp_path):
    marker = tmp_path / "deadly"
    marker.touch()

    def load(number: int, arrays: Any, seed: Any) -> None:
        if marker.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        arrays["x"][...] = number

    loader, init, draw, release = start(load)
    state = init(seed=0)
    with pytest.raises(FAILURES, match="SIGKILL"):
        jax.block_until_ready(draw(state))
    assert isinstance(data.last_error(loader), hydrax.WorkerDiedError)
    marker.unlink()
    state, batch = draw(state)
    assert batch["x"].shape == (4,)
    (engine,) = loader._engines
    os.kill(engine.pids[0], signal.SIGKILL)  # while it has nothing to do
    os.kill(engine.pids[1], signal.SIGKILL)
    with pytest.raises(FAILURES, match="SIGKILL"):
        jax.block_until_ready(draw(state._replace(current_line=jnp.uint32(500))))
    jax.block_until_ready(draw(state))
    release()


def test_programs_that_wait_for_one_loader_process_all_hear_how_it_died(tmp_path):
    marker = tmp_path / "deadly"
    marker.touch()

    def load(number: int, arrays: Any, seed: Any) -> None:
        if marker.exists():
            time.sleep(0.3)  # until all programs wait
            os.kill(os.getpid(), signal.SIGKILL)
        arrays["x"][...] = number

    _, init, draw, release = start(load)
    states = [init(seed=seed) for seed in range(6)]
    texts: list[str] = []

    def run(state: Any) -> None:
        try:
            jax.block_until_ready(draw(state))
        except FAILURES as error:
            texts.append(str(error))

    threads = [threading.Thread(target=run, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == len(states)
    assert [text for text in texts if "was ended by SIGKILL" not in text] == []
    marker.unlink()
    for state in states:
        jax.block_until_ready(draw(state))
    release()


def test_a_draw_that_waits_too_long_ends_and_says_what_the_processes_do(tmp_path):
    marker = tmp_path / "slow"
    marker.touch()

    def load(number: int, arrays: Any, seed: Any) -> None:
        if marker.exists():
            time.sleep(60)
        arrays["x"][...] = number

    _, init, draw, release = start(load, timeout_sec=0.5)
    state = init(seed=0)
    begin = time.monotonic()
    with pytest.raises(FAILURES, match="has been loading for") as caught:
        jax.block_until_ready(draw(state))
    assert "timeout_sec=0.5" in str(caught.value)
    assert time.monotonic() - begin < 20
    assert isinstance(data.last_error(release), hydrax.BatchTimeoutError)
    marker.unlink()
    jax.block_until_ready(draw(state))
    release()


def test_a_released_loader_says_so():
    loader = NumpyDataLoader(x=np.arange(10))
    init, get_batch, release = data.random_reference_data(loader, 2, 3)
    draw = jax.jit(get_batch)
    state, _ = draw(init())
    pid = next(iter(loader._engines)).pids[0]
    release()
    release()  # may be called again
    assert not psutil.pid_exists(pid)
    assert loader.nbytes == 0
    with pytest.raises(FAILURES, match="has been released"):
        jax.block_until_ready(draw(state))
    with pytest.raises(RuntimeError, match="has been released"):
        init()
    other_init, other_get, other_release = data.random_reference_data(loader, 2, 3)
    jax.block_until_ready(jax.jit(other_get)(other_init()))
    other_release()


def test_release_ends_a_draw_that_waits():
    def load(number: int, arrays: Any, seed: Any) -> None:
        time.sleep(60)

    _, init, draw, release = start(load)
    timer = threading.Timer(0.3, release)
    timer.start()
    with pytest.raises(FAILURES, match="has been released"):
        jax.block_until_ready(draw(init()))
    timer.join()


def test_a_state_of_other_data_is_refused():
    first = NumpyDataLoader(x=np.arange(10))
    second = NumpyDataLoader(x=np.arange(11))
    init, _, release = data.random_reference_data(first, 2, 3)
    _, get_batch, other_release = data.random_reference_data(second, 2, 3)
    with pytest.raises(FAILURES, match="11 observations"):
        jax.block_until_ready(jax.jit(get_batch)(init()))
    with pytest.raises(TypeError, match="CacheState"):
        get_batch("state")
    release()
    other_release()


def test_last_error_refuses_what_keeps_no_errors():
    with pytest.raises(TypeError, match="data loader of this package"):
        data.last_error(print)


INTERRUPTED = """
    import sys, time
    import jax, jax.numpy as jnp, numpy as np
    from hydrax import data
    from hydrax.data.numpy_loader import NumpyDataLoader

    loader = NumpyDataLoader(x=np.arange(100.0))
    init, get_batch, release = data.random_reference_data(loader, 10, 4)

    @jax.jit
    def run(state, length):
        def step(_, carry):
            state, total = carry
            state, batch = get_batch(state)
            return state, total + batch["x"].sum()
        return jax.lax.fori_loop(0, length, step, (state, 0.0))

    state = init(seed=0)
    jax.block_until_ready(run(state, 3))
    print("running")
    start = time.monotonic()
    try:
        try:
            jax.block_until_ready(run(state, 10**9))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            assert "interrupted" in str(error), error
            for _ in range(1000):  # Python raises it at once now
                time.sleep(0.001)
            print("no KeyboardInterrupt")
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - start < 30)
    jax.block_until_ready(run(state, 100))
    print("goes on")
    release()
"""


def test_ctrl_c_ends_a_long_scan_at_the_next_draw_and_the_process_goes_on():
    process = start_script("-c", textwrap.dedent(INTERRUPTED))
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result == (0, "interrupted True\ngoes on\n", "")


def test_an_interrupt_ends_a_draw_that_python_makes():
    def load(number: int, arrays: Any, seed: Any) -> None:
        time.sleep(60)

    loader, init, _, release = start(load)
    words = [int(word) for word in np.asarray(init(seed=0).state)]
    (engine,) = loader._engines
    timer = threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.copy(words, 0)
    assert time.monotonic() - begin < 20
    timer.join()
    release()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for what x86-64 calls")
def test_the_handler_of_sigint_uses_no_memory_that_is_allocated_at_the_first_use():
    assert b"__tls_get_addr" not in Path(_core.__file__).read_bytes()


FORGOTTEN = """
    import jax, numpy as np
    from hydrax import data
    from hydrax.data.numpy_loader import NumpyDataLoader

    loader = NumpyDataLoader(x=np.arange(100.0))
    init, get_batch, release = data.random_reference_data(loader, 10, 4)
    state, batch = jax.jit(get_batch)(init())
    print(*next(iter(loader._engines)).pids)
"""


def test_what_is_not_released_ends_with_the_process():
    result = finish(start_script("-c", textwrap.dedent(FORGOTTEN)))
    assert result.returncode == 0
    assert result.stderr == ""
    pids = [int(pid) for pid in result.stdout.split()]
    assert pids
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(10)
        assert not psutil.pid_exists(pid)


def test_what_is_forgotten_is_given_back():
    def forget() -> Any:
        values = np.zeros((1000, 1000))
        loader = NumpyDataLoader(copy=False, x=values)
        init, get_batch, _ = data.random_reference_data(loader, 2, 3)
        jax.block_until_ready(jax.jit(get_batch)(init()))
        (engine,) = loader._engines
        return weakref.ref(values), weakref.ref(engine), engine.pids

    values, engine, pids = forget()
    gc.collect()
    assert values() is None
    assert engine() is None
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_a_hundred_rounds_leave_nothing_behind():
    """Also no descriptors: each engine has an arena and processes of its own."""
    values = np.zeros((1000, 100), np.float32)

    def once() -> None:
        loader = NumpyDataLoader(copy=False, x=values)
        init, get_batch, release = data.random_reference_data(loader, 2, 3, worker_count=1)
        jax.block_until_ready(get_batch(init()))
        release()

    once()
    gc.collect()
    process = psutil.Process()
    before = process.num_fds(), len(process.children())
    memory = process.memory_info().rss
    for _ in range(100):
        once()
    gc.collect()
    assert (process.num_fds(), len(process.children())) == before
    assert process.memory_info().rss - memory < 64 * 2**20


def test_nbytes_states_the_shared_memory():
    loader = NumpyDataLoader(x=np.zeros((100, 256), np.float32))
    assert loader.nbytes == 0
    _, _, release = data.random_reference_data(loader, 4, 8)
    block = 4 * 8 * 256 * 4
    assert block * 3 <= loader.nbytes <= 70 * (block + 8192)
    release()
    assert loader.nbytes == 0


def test_a_fork_of_the_user_leaves_the_draws_alone():
    loader = NumpyDataLoader(x=np.arange(10))
    init, get_batch, release = data.random_reference_data(loader, 2, 3)
    draw = jax.jit(get_batch)
    state = init(seed=0)
    (engine,) = loader._engines
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that JAX has threads
        pid = os.fork()
    if pid == 0:
        # JAX must not be used here; leaving must not end the parent's loader processes.
        status = 1
        with contextlib.suppress(BaseException):
            release()
            status = 0 if engine.is_closed else 1
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    jax.block_until_ready(draw(state))
    release()


def test_python_goes_on_while_a_program_waits_for_data():
    def load(number: int, arrays: Any, seed: Any) -> None:
        time.sleep(0.05)
        arrays["x"][...] = number

    _, init, draw, release = start(load)
    state = init()
    count = 0
    thread = threading.Thread(target=lambda: jax.block_until_ready(draw(state)))
    thread.start()
    while thread.is_alive():
        count += 1
    assert count > 1000
    release()


def load_in_time(number: int, arrays: Any, seed: Any) -> None:
    time.sleep(0.01)
    arrays["x"][...] = number


def start_map() -> tuple[Any, Any]:
    """A program that runs on after the call of it has returned, and the end of its data."""
    mapper, release = data.full_data_mapper(ArenaDataLoader(load_in_time, group()), 1, 4)
    square = jnp.ones((64, 64))  # what little computes is not dispatched to another thread

    def fun(batch: Any, carry: Any) -> Any:
        return batch["x"] + 0 * (square @ square).sum(), carry

    return jax.jit(lambda: mapper(fun, 0)[0]), release


def test_release_waits_for_programs_whose_results_are_not_there_yet():
    program, release = start_map()
    results = [program(), program()]
    assert not results[-1].is_ready()
    release()
    for result in results:
        assert result.tolist() == list(range(40))


def test_programs_of_a_wrapper_that_is_forgotten_come_to_their_end():
    result = start_map()[0]()
    assert not result.is_ready()
    gc.collect()
    assert result.tolist() == list(range(40))


def test_what_failed_while_it_was_loaded_ahead_is_tried_again_when_it_is_needed(tmp_path):
    marker = tmp_path / "away"

    def load(number: int, arrays: Any, seed: Any) -> None:
        if marker.exists():
            with (tmp_path / "failures").open("a") as file:
                file.write("x")
            raise SpecialError("away for a moment")
        arrays["x"][...] = number

    loader, init, draw, release = start(load)
    (engine,) = loader._engines
    state, _ = draw(init(seed=0))

    def settle() -> None:
        """Until the loader processes have nothing to do."""
        requested = -1
        while requested != engine.blocks_requested:
            requested = engine.blocks_requested
            time.sleep(0.2)

    settle()
    marker.touch()
    for _ in range(6):
        state, _ = draw(state)
    settle()
    assert (tmp_path / "failures").stat().st_size > 1
    marker.unlink()
    for _ in range(20):
        state, batch = draw(state)
    assert batch["x"].shape == (4,)
    release()


RUNNING_AT_EXIT = """
    import gc, time
    import jax, jax.numpy as jnp, numpy as np, hydrax
    from hydrax import data
    from hydrax.data.arena_loader import ArenaDataLoader

    def load(number, arrays, seed):
        time.sleep(0.01)
        arrays["x"][...] = number

    group = hydrax.DataGroup(1, range(1000), loader_arrays={"x": ((64,), "f4", "f4")})
    init, get_batch, release = data.random_reference_data(ArenaDataLoader(load, group), 2, 4)
    square = jnp.ones((64, 64))

    @jax.jit
    def run(state):
        def step(state, _):
            state, batch = get_batch(state)
            return state, (batch["x"] @ square).sum()
        return jax.lax.scan(step, state, length=1000)

    state, sums = run(init(seed=0))
    if {is_forgotten}:
        del init, get_batch, release, run
        gc.collect()
    print(sums.is_ready())
"""


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_program_that_runs_at_exit_ends_quietly(is_forgotten):
    script = textwrap.dedent(RUNNING_AT_EXIT).replace("{is_forgotten}", str(is_forgotten))
    result = finish(start_script("-c", script))
    assert (result.stdout, result.stderr, result.returncode) == ("False\n", "", 0)
