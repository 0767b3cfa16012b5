"""Debug mode: arrays that are kept, or written to when nobody may, are errors that name them."""

from __future__ import annotations

import ctypes
import threading
import time

import jax
import ml_dtypes
import numpy as np
import pytest

from hydrax import (
    ArrayChangedError,
    ArrayKeptError,
    Batch,
    DataGroup,
    Dataloader,
    LoaderError,
    UnwrittenArrayError,
)

PLAIN = {"x": ((3,), np.float32, np.float32), "y": ((), np.int32, np.int32)}
CONVERTED = {"x": ((3,), np.float64, np.float32), "y": ((), np.int64, np.int32)}
WAYS = {
    "in process": {"loader_count": 0, "depth": 1},
    "forked": {"loader_count": 2, "depth": 3},
    "forked, depth 1": {"loader_count": 2, "depth": 1},
}
kept: list[object] = []


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    kept.clear()


def group(arrays=PLAIN, items=12, size=4, **options):
    return DataGroup(size, range(items), loader_arrays=arrays, **options)


def dataloader(loader, groups=None, **options):
    options = {"end_at": ("epoch", 1), "timeout_sec": 20, "debug": True, **options}
    return Dataloader(loader, groups or group(), **options)


def use_up(loader, groups=None, **options):
    with dataloader(loader, groups, **options) as batches:
        for batch in batches:
            del batch


def the_cause(loader, groups=None, **options):
    """The cause of the LoaderError that ends a run."""
    with pytest.raises(LoaderError) as caught:
        use_up(loader, groups, **options)
    return caught.value, caught.value.__cause__


def fill(number, arrays):
    arrays["x"][...] = number
    arrays["y"][...] = number


def load(number, arrays, seed):
    fill(number, arrays)
    return {"number": number, "copy": arrays["x"]}  # which Hydrax copies


def load_run(numbers, arrays, seeds):
    arrays["x"][:] = np.asarray(numbers)[:, None]
    arrays["y"][:] = numbers
    return {"number": list(map(int, numbers)), "copy": arrays["x"]}


@pytest.mark.parametrize("arrays", [PLAIN, CONVERTED], ids=["plain", "converted"])
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loader_without_fault_loads_the_same_batches(way, batched, arrays):
    def run(*, debug):
        batches = dataloader(
            load_run if batched else load,
            group(arrays, items=14, remainder="pad"),
            validation=("epoch", 1, group(arrays, items=6, remainder="short")),
            batched=batched,
            end_at=("epoch", 2),
            debug=debug,
            **WAYS[way],
        )
        with batches:
            return [
                (batch.indices, {name: array.tolist() for name, array in batch.arrays.items()},
                 batch.additional["number"], np.asarray(batch.additional["copy"]).tolist())
                for batch in map(Batch.copy, batches)
            ]  # fmt: skip

    found = run(debug=True)
    assert len(found) == 2 * (4 + 2)
    assert found == run(debug=False)


def keep_array(arrays):
    kept.append(arrays["y"])


def keep_mapping(arrays):
    kept.append(arrays)


def keep_view(arrays):
    kept.append(arrays["x"][..., :1])


def keep_memory(arrays):
    kept.append(memoryview(arrays["x"]))


def keep_in_closure(arrays):
    array = arrays["x"]
    kept.append(lambda: array)


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (keep_array, "'y'"),
        (keep_mapping, "'x'"),
        (keep_view, "'x'"),
        (keep_memory, "'x'"),
        (keep_in_closure, "'x'"),
    ],
)
@pytest.mark.parametrize(
    ("loader_count", "batched", "arrays"),
    [(1, False, PLAIN), (1, True, PLAIN), (0, False, CONVERTED)],
    ids=["single", "batched", "converted, in process"],
)
def test_a_loader_that_keeps_an_array_is_told_which(loader_count, batched, arrays, keep, name):
    def load_and_keep(numbers, arrays, seeds):
        arrays["x"][...] = 1
        arrays["y"][...] = 1
        if np.max(numbers) >= 5:
            keep(arrays)

    error, cause = the_cause(
        load_and_keep, group(arrays), batched=batched, loader_count=loader_count
    )
    assert isinstance(cause, ArrayKeptError)
    assert f"array {name}" in str(cause)
    assert error.index == (4 if batched else 5)


def test_what_holds_a_kept_array_is_named():
    def keep(number, arrays, seed):
        fill(number, arrays)
        kept.append(arrays["x"] if number else arrays["x"][1:])

    _, cause = the_cause(keep)
    assert "a view of it still refers" in str(cause)
    _, cause = the_cause(keep, start_at=(0, 1))
    assert "an object of type list still refers" in str(cause)


def test_an_array_inside_of_a_result_is_kept():
    def nest(number, arrays, seed):
        fill(number, arrays)
        return {"crops": [arrays["x"][:2]]}

    _, cause = the_cause(nest)
    assert isinstance(cause, ArrayKeptError)
    assert "return copies" in str(cause)


@pytest.mark.parametrize("loader_count", [0, 1])
def test_references_that_go_by_themselves_are_no_fault(loader_count):
    class Cycle:
        pass

    def load_with_cycle(number, arrays, seed):
        fill(number, arrays)
        cycle = Cycle()
        cycle.self, cycle.array = cycle, arrays["x"]
        try:
            raise ValueError
        except ValueError as error:
            cycle.error = error
        thread = threading.Thread(target=lambda array: time.sleep(0.02), args=(arrays["y"],))
        thread.start()

    use_up(load_with_cycle, group(items=4), loader_count=loader_count)


def write_later(array, delay_s):
    """Write to an array's memory from a thread that refers to nothing."""
    address, nbytes = array.ctypes.data, array.nbytes

    def write():
        time.sleep(delay_s)
        ctypes.memset(address, 7, nbytes)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@pytest.mark.parametrize("loader_count", [0, 1])
def test_a_write_after_the_return_fails_the_batch_by_name(loader_count):
    threads = []

    def load_and_write_later(number, arrays, seed):
        fill(number, arrays)
        if number == 5:
            threads.append(write_later(arrays["y"], 0.05))
        if number == 6:
            threads.pop().join()

    error, cause = the_cause(load_and_write_later, loader_count=loader_count)
    assert isinstance(cause, ArrayChangedError)
    assert "array 'y'" in str(cause)
    assert error.index == 5


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_a_write_to_a_batch_that_waits_is_caught(batched):
    def load_and_write_later(numbers, arrays, seeds):
        arrays["x"][...] = 1
        arrays["y"][...] = 1
        if np.max(numbers) == 7:
            write_later(arrays["x"][-1:] if batched else arrays["x"], 0.05)

    with dataloader(load_and_write_later, batched=batched) as batches:
        next(batches)
        time.sleep(0.4)
        with pytest.raises(LoaderError, match="array 'x'") as caught:
            next(batches)
    assert isinstance(caught.value.__cause__, ArrayChangedError)
    assert caught.value.index == 7


def test_an_item_that_writes_to_the_one_before_is_caught():
    addresses = []

    def write_to_previous(number, arrays, seed):
        fill(number, arrays)
        if addresses and number % 4:
            ctypes.memset(addresses.pop(), 9, 12)
        addresses.append(arrays["x"].ctypes.data)

    error, cause = the_cause(write_to_previous)
    assert isinstance(cause, ArrayChangedError)
    assert error.index == 0


def scribble(array):
    """Write to the memory of a jax.Array, as a library that shares it can."""
    ctypes.memset(array.unsafe_buffer_pointer(), 5, 4)


@pytest.mark.parametrize("loader_count", [0, 1])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_write_to_a_delivered_array_is_an_error_of_the_next_call(depth, loader_count):
    with dataloader(load, loader_count=loader_count, depth=depth) as batches:
        batch = next(batches)
        scribble(batch.arrays["y"])
        del batch
        with pytest.raises(
            ArrayChangedError, match=r"'y' of training batch 0 \(epoch 0, batch 0\)"
        ):
            next(batches)
        assert [batch.batch_num for batch in map(Batch.copy, batches)] == [1, 2]


def test_a_write_to_an_array_that_is_kept_is_an_error_of_the_end():
    with (
        pytest.raises(ArrayChangedError, match=r"'x' of training batch 1 .*at its item 2"),
        dataloader(load, depth=4) as batches,
    ):
        held = [batch.arrays["x"] for batch in batches]
        address = held[1].unsafe_buffer_pointer() + 2 * 12
        ctypes.memset(address, 5, 4)
    del held


def test_the_error_of_the_loop_goes_before_that_of_the_end():
    with pytest.raises(ZeroDivisionError), dataloader(load) as batches:
        scribble(next(batches).arrays["x"])
        raise ZeroDivisionError


def test_a_placement_function_may_write_but_not_later():
    views = []

    def place(arrays, layouts, additional, of_group):
        arrays["x"][...] += 1
        views.append(arrays["x"])
        return {name: jax.numpy.array(array) for name, array in arrays.items()}

    with dataloader(load, placement_func=place) as batches:
        assert next(batches).arrays["x"][0, 0] == 1.0
        views.clear()
        assert next(batches).arrays["x"][0, 0] == 5.0
        views.pop()[...] = 0
        with pytest.raises(ArrayChangedError, match="training batch 1"):
            next(batches)
        views.clear()


def test_computations_that_still_read_hold_what_is_checked():
    @jax.jit
    def slow_sum(x):
        return jax.lax.fori_loop(0, 2000, lambda _, y: y + jax.numpy.sin(x).sum(), 0.0)

    arrays = {"x": ((10_000,), np.float32, np.float32), "y": ((), np.int32, np.int32)}
    repeated = group(arrays, shuffle_later="repeat")
    with dataloader(load, repeated, depth=2, end_at=("epoch", 3)) as batches:
        sums = []
        for batch in batches:
            sums.append(slow_sum(batch.arrays["x"]))
            del batch
        assert len(set(map(float, sums))) == 3


def test_spawned_workers_check_as_well():
    error, cause = the_cause(load_and_keep_one, start_method="spawn")
    assert isinstance(cause, ArrayKeptError)
    assert error.index == 5


def load_and_keep_one(number, arrays, seed):
    fill(number, arrays)
    if number == 5:
        kept.append(arrays["x"])


@pytest.mark.parametrize("policy", ["drop_batch", "skip_item"])
def test_faults_follow_on_error(policy):
    with dataloader(load_and_keep_one, on_error=policy) as batches:
        found = [(batch.batch_num, batch.valid_count) for batch in map(Batch.copy, batches)]
    expected = [(0, 4), (1, 3), (2, 4)] if policy == "skip_item" else [(0, 4), (2, 4)]
    assert found == expected


def test_every_dtype_and_empty_arrays_pass_the_checks():
    dtypes = [np.bool_, np.uint8, np.float16, np.complex64, ml_dtypes.bfloat16, ml_dtypes.int4]
    arrays = {np.dtype(dtype).name: ((2, 3), dtype, dtype) for dtype in dtypes}
    arrays["none"] = ((0, 3), np.float32, np.float32)
    arrays["scalar"] = ((), ml_dtypes.bfloat16, ml_dtypes.bfloat16)

    def load_ones(number, views, seed):
        for view in views.values():
            view[...] = 1

    use_up(load_ones, group(arrays), end_at=("epoch", 2))


def test_an_unwritten_array_is_still_told_from_one_that_holds_the_pattern():
    def load_pattern(number, arrays, seed):
        arrays["x"].view(np.uint8)[...] = 0xFF
        if number != 6:
            arrays["y"][...] = -1

    error, cause = the_cause(load_pattern)
    assert isinstance(cause, UnwrittenArrayError)
    assert "array 'y'" in str(cause)
    assert error.index == 6


def test_the_environment_switches_it_on(monkeypatch):
    monkeypatch.setenv("HYDRAX_DEBUG", "1")
    _, cause = the_cause(
        lambda number, arrays, seed: keep_array(arrays) or fill(number, arrays), debug=False
    )
    assert isinstance(cause, ArrayKeptError)


def test_a_run_without_debug_mode_holds_no_slot_and_no_sums():
    with dataloader(load, debug=False) as batches:
        assert batches._flow.loading.watch is None
        batch = next(batches)
        slot = next(
            slot for slot in range(3) if batches._flow.loading.arena.slot_states()[slot] == 4
        )  # leased
        assert batches._flow.loading.arena.lease_count(slot) == len(batch.arrays)
        del batch
