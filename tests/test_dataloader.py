"""Behaviour of the Dataloader that belongs to no other file: threads, closing, results."""

import gc
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hydrax import (
    Batch,
    DataGroup,
    Dataloader,
    LoaderError,
    debug_batch_references,
    loader_context,
)

ARRAYS = {"x": ((4,), np.int32, np.int32)}


def load(number, arrays, seed):
    arrays["x"][:] = number


def group(items=40, size=4, arrays=ARRAYS):
    return DataGroup(size, range(items), loader_arrays=arrays)


@pytest.mark.parametrize("loader_count", [0, 1, 2])
def test_results_that_refer_to_the_arrays_are_those_of_their_item(loader_count):
    def load_with_raw(number, arrays, seed):
        arrays["w"][:] = number
        return {"raw": arrays["w"]}

    wide = {"w": ((3000,), np.int64, np.int32)}
    dataloader = Dataloader(
        load_with_raw,
        group(items=256, size=64, arrays=wide),
        loader_count=loader_count,
        end_at=("epoch", 2),
    )
    with dataloader:
        for batch in dataloader:
            for item, raw in zip(batch.indices, batch.additional["raw"], strict=True):
                assert (raw == item).all()
            del batch


@pytest.mark.parametrize("loader_count", [0, 2])
def test_a_result_that_is_used_again_is_that_of_its_item(loader_count):
    shared = {}

    def load_with_shared(number, arrays, seed):
        arrays["x"][:] = number
        shared["number"] = number
        return shared

    with Dataloader(
        load_with_shared, group(), loader_count=loader_count, end_at=("epoch", 1)
    ) as dataloader:
        for batch in dataloader:
            assert batch.additional["number"] == list(batch.indices)
            del batch


@pytest.mark.parametrize("loader_count", [0, 1])
def test_next_in_two_threads_at_once_is_an_error_and_harms_nothing(loader_count):
    entered, go_on = threading.Event(), threading.Event()

    def slow(number, arrays, seed):
        entered.set()
        if loader_count == 0:
            go_on.wait(20)
        arrays["x"][:] = number

    user_bits = np.random.get_bit_generator()
    with Dataloader(slow, group(), loader_count=loader_count, end_at=("epoch", 1)) as dataloader:
        if loader_count:
            held = [next(dataloader) for _ in range(3)]  # so that a thread has to wait
        batches = []
        thread = threading.Thread(target=lambda: batches.append(next(dataloader)))
        thread.start()
        if loader_count == 0:
            assert entered.wait(20)
        else:
            while not dataloader._next_lock.locked():
                pass
        with pytest.raises(RuntimeError, match="running already"):
            next(dataloader)
        go_on.set()
        if loader_count:
            held.clear()
        thread.join(20)
        assert batches.pop().arrays["x"].shape == (4, 4)
        assert next(dataloader).arrays["x"].shape == (4, 4)
    assert np.random.get_bit_generator() is user_bits


def test_errors_that_are_kept_keep_no_slot_in_the_main_process():
    def failing(number, arrays, seed):
        raise OSError(number)

    kept = []
    with Dataloader(
        failing, group(), loader_count=0, depth=2, end_at=("epoch", 1), timeout_sec=20
    ) as dataloader:
        for _ in range(10):
            with pytest.raises(LoaderError) as caught:
                next(dataloader)
            kept.append(caught.value)
    assert len({error.index for error in kept}) == 10
    assert all(isinstance(error.__cause__, OSError) for error in kept)


def test_leaving_the_block_gives_the_arena_back_though_the_dataloader_is_kept():
    with Dataloader(load, group(), end_at=("epoch", 1)) as dataloader:
        next(dataloader)
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert "hydrax-arena" not in maps.read()
    assert dataloader.arena_nbytes > 0


def test_showing_references_keeps_none(capsys):
    with Dataloader(load, group(), depth=2, end_at=("epoch", 1)) as dataloader:
        batch = next(dataloader)
        debug_batch_references()
        assert "<TrainingBatch 0" in capsys.readouterr().out
        states = dataloader._flow.loading.arena.slot_states()
        assert states.count(4) == 1
        del batch
        assert dataloader._flow.loading.arena.slot_states().count(4) == 0


def test_a_state_that_is_set_after_an_interruption_goes_on():
    with Dataloader(load, group(), end_at=("epoch", 1)) as dataloader:
        next(dataloader)
        state = dataloader.get_state()
        dataloader.interrupt()
        assert list(dataloader) == []
        dataloader.set_state(state)
        assert not dataloader.interrupted
        assert int(next(dataloader).arrays["x"][0, 0]) == 4


@pytest.mark.parametrize("loader_count", [0, 2])
def test_a_slow_step_over_arrays_of_the_buffer_protocol_is_waited_for(loader_count):
    def place(arrays, layouts, additional, group):
        return {name: jax.device_put(array) for name, array in arrays.items()}

    @jax.jit
    def step(total, x):
        def body(_, a):
            return jnp.tanh(a @ a.T * 1e-3)

        square = jnp.tile(x.astype(jnp.float32), (16, 16))
        return total + jax.lax.fori_loop(0, 5000, body, square).sum()

    total = jnp.zeros(())
    dataloader = Dataloader(
        load,
        group(items=24),
        loader_count=loader_count,
        depth=2,
        end_at=("epoch", 1),
        timeout_sec=20,
        placement_func=place,
    )
    with dataloader:
        for batch in dataloader:
            total = step(total, batch.arrays["x"])
            del batch
    assert np.isfinite(float(total))


@pytest.mark.parametrize("loader_count", [0, 1])
def test_debug_mode_loads_what_is_loaded_without_it(loader_count):
    def load_noise(number, arrays, seed):
        arrays["x"][:] = [random.randrange(-3, 3), *np.random.randint(-3, 3, size=3)]

    def contents(debug):
        dataloader = Dataloader(
            load_noise, group(), loader_count=loader_count, debug=debug, end_at=("epoch", 2)
        )
        with dataloader:
            return [batch.arrays["x"].tolist() for batch in map(Batch.copy, dataloader)]

    assert contents(debug=True) == contents(debug=False)


def test_a_loader_in_the_main_process_may_use_a_dataloader_of_its_own():
    def outer_load(number, arrays, seed):
        before = loader_context()
        drawn = random.random()
        with Dataloader(load, group(items=4), loader_count=0, end_at=("epoch", 1)) as inner:
            arrays["x"][:] = next(inner).arrays["x"][number % 4]
        assert loader_context() == before
        random.seed(3)
        assert random.random() != drawn

    with Dataloader(outer_load, group(items=8), loader_count=0, end_at=("epoch", 1)) as dataloader:
        rows = [batch.arrays["x"][:, 0].tolist() for batch in map(Batch.copy, dataloader)]
    assert rows == [[0, 1, 2, 3], [0, 1, 2, 3]]
