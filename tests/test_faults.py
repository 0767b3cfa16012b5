"""Known faults of data loaders, tried out: none of them is silent, and none is a hang."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time

import jax
import numpy as np
import pytest

import hydrax
from hydrax import (
    BatchTimeoutError,
    DataGroup,
    Dataloader,
    HydraxError,
    LoaderError,
    UnwrittenArrayError,
    WorkerDiedError,
)

SPECS = {"x": ((4,), np.float32, np.float32)}
TIMEOUT_S = 15


def fill(number, arrays, seed):
    arrays["x"][:] = number


def numbers(count=20, batch_size=5, data=None, **options):
    return DataGroup(
        batch_size, range(count) if data is None else data, loader_arrays=SPECS, **options
    )


def use_up(dataloader):
    for batch in dataloader:
        del batch


def keep_all(dataloader, kept):
    for batch in dataloader:
        kept.append(batch.arrays["x"])


def firsts(dataloader):
    return [float(batch.arrays["x"][0, 0]) for batch in dataloader]


# Time-outs


def test_a_timeout_says_where_each_loader_process_stands():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 12:
            time.sleep(100)

    with (
        Dataloader(load, numbers(), loader_count=2, depth=4, timeout_sec=0.5) as dataloader,
        pytest.raises(BatchTimeoutError) as caught,
    ):
        use_up(dataloader)
    text = str(caught.value)
    assert "timeout_sec=0.5" in text
    assert re.search(r"loader process \d \(pid \d+\) has been loading for 0\.\d s.*item 12 ", text)
    assert "training group 0, training batch 2" in text
    assert text.count("loader process") == 2
    assert "slots" not in text
    assert isinstance(caught.value, TimeoutError)


def test_a_timeout_comes_on_time_and_waiting_may_go_on_after_it():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 5:
            time.sleep(1.2)

    with Dataloader(load, numbers(), end_at=("epoch", 1), timeout_sec=0.4) as dataloader:
        next(dataloader)
        start_s = time.monotonic()
        timeouts = 0
        while True:
            try:
                batch = next(dataloader)
                break
            except BatchTimeoutError:
                timeouts += 1
        assert 1 <= timeouts <= 3
        assert 0.8 < time.monotonic() - start_s < 5
        assert batch.get_data(0) == 5
        del batch
        assert firsts(dataloader) == [10, 15]


def test_a_timeout_with_all_slots_kept_says_so_and_how_many():
    kept = []
    with (
        Dataloader(fill, numbers(100), depth=3, timeout_sec=0.5) as dataloader,
        pytest.raises(BatchTimeoutError, match=r"all 3 slots.*held.*batch\.copy\(\)"),
    ):
        keep_all(dataloader, kept)
    assert len(kept) == 3
    assert [float(array[0, 0]) for array in kept] == [0, 5, 10]


def test_a_timeout_names_a_startup_func_that_hangs():
    with (
        Dataloader(
            fill, numbers(), startup_func=lambda: time.sleep(100), timeout_sec=0.5
        ) as dataloader,
        pytest.raises(BatchTimeoutError, match="startup_func"),
    ):
        next(dataloader)


def test_a_timeout_of_zero_waits_as_long_as_it_takes():
    def load(number, arrays, seed):
        time.sleep(0.3)
        arrays["x"][:] = number

    with Dataloader(load, numbers(2, 2), end_at=("epoch", 1), timeout_sec=0) as dataloader:
        assert firsts(dataloader) == [0]


def test_waiting_is_counted_as_idle_time_and_having_is_not():
    def load(number, arrays, seed):
        time.sleep(0.05)
        arrays["x"][:] = number

    with Dataloader(load, numbers(20, 5), end_at=("epoch", 1), timeout_sec=9) as dataloader:
        next(dataloader)
        assert dataloader.idle_usec() > 150_000
        time.sleep(0.5)
        dataloader.idle_usec()
        next(dataloader)
        assert dataloader.idle_usec() < 50_000


# Loops that keep batches in odd ways


@pytest.mark.parametrize("depth", [2, 3])
def test_enumerate_at_depth_two_comes_to_its_end(depth):
    with Dataloader(
        fill, numbers(100), depth=depth, end_at=("epoch", 1), timeout_sec=5
    ) as dataloader:
        for index, batch in enumerate(dataloader):
            assert batch.batch_num == index
    assert index == 19


def test_depth_one_works_when_each_batch_is_let_go():
    with Dataloader(
        fill, numbers(100), depth=1, loader_count=2, end_at=("epoch", 1), timeout_sec=5
    ) as dataloader:
        for batch in dataloader:
            assert batch.arrays["x"][:, 3].tolist() == list(batch.data)
            del batch


def test_a_big_depth_with_few_batches_works():
    with Dataloader(
        fill,
        numbers(100, shuffle_later="repeat"),
        depth=200,
        loader_count=3,
        end_at=("epoch", 3),
        timeout_sec=9,
    ) as dataloader:
        kept = list(dataloader)
    assert [batch.get_data(0) for batch in kept] == list(range(0, 100, 5)) * 3
    assert all(batch.arrays["x"][:, 0].tolist() == list(batch.data) for batch in kept)


# Shapes, and what the loader does not fill


def test_a_wrong_shape_is_an_error_with_descriptor_and_array():
    def load(number, arrays, seed):
        arrays["image"][:] = np.zeros((3, 4) if number == 7 else (4, 4))

    group = DataGroup(5, range(20), loader_arrays={"image": ((4, 4), np.float32, np.float32)})
    with Dataloader(load, group, timeout_sec=TIMEOUT_S) as dataloader:
        next(dataloader)
        with pytest.raises(LoaderError, match=r"item 7 \(7\).*") as caught:
            next(dataloader)
    assert "'image' float32 (4, 4)" in str(caught.value)
    assert "(3,4)" in str(caught.value)


@pytest.mark.parametrize("batched", [False, True])
def test_debug_finds_an_array_that_is_filled_now_and_then(batched):
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number % 7 != 6:
            arrays["y"][...] = number

    def load_run(run, arrays, seeds):
        for i, number in enumerate(run):
            load(number, {name: array[i] for name, array in arrays.items()}, None)

    specs = {"x": ((4,), np.float32, np.float32), "y": ((2,), np.int32, np.int32)}
    group = DataGroup(5, range(20), loader_arrays=specs)
    with Dataloader(
        load_run if batched else load, group, debug=True, batched=batched, timeout_sec=TIMEOUT_S
    ) as dataloader:
        assert next(dataloader).arrays["y"][:, 0].tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(LoaderError, match="array 'y'") as caught:
            next(dataloader)
    assert isinstance(caught.value.__cause__, UnwrittenArrayError)
    assert batched or caught.value.index == 6


ALL_DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "float32", "complex64", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e3m4", "float8_e8m0fnu", "int4", "uint4"),
]


def test_debug_finds_one_unwritten_element_of_every_dtype():
    specs = {name: ((3, 2), name, name) for name in ALL_DTYPES}
    specs |= {f"{name} scalar": ((), name, name) for name in ALL_DTYPES}
    specs["int64"] = ((3, 2), np.int64, np.int32)  # converted on its way
    names = list(specs)

    def load(left_out, arrays, seed):
        for name, array in arrays.items():
            if name != left_out:
                array[...] = 1
            elif array.ndim:
                array[:2] = 1
                array[2, 0] = 0

    group = DataGroup(1, ["none of them", *names], loader_arrays=specs)
    with Dataloader(load, group, debug=True, end_at=("epoch", 1), timeout_sec=20) as dataloader:
        next(dataloader)
        for name in names:
            with pytest.raises(LoaderError, match=f"array '{name}'") as caught:
                next(dataloader)
            assert caught.value.descriptor == name
            assert ("first at (2, 1)" in str(caught.value)) == ("scalar" not in name)


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_debug_takes_every_value_that_a_dtype_has(name):
    dtype = np.dtype(name)
    values = np.arange(256).astype(np.uint8)
    if name in ("bool", "int4", "uint4"):
        values = np.arange(2 if name == "bool" else 8, dtype=np.uint8)
        values = values.astype(dtype)
    elif dtype.itemsize > 1:
        values = np.repeat(values, dtype.itemsize).view(dtype)
    else:
        values = values.view(dtype)

    def load(index, arrays, seed):
        arrays["value"][...] = values[index]

    group = DataGroup(len(values), range(len(values)), loader_arrays={"value": ((), dtype, dtype)})
    with Dataloader(load, group, debug=True, end_at=("epoch", 1), timeout_sec=9) as dataloader:
        got = np.asarray(next(dataloader).arrays["value"])
    if name in ("int4", "uint4"):
        assert got.tolist() == values.tolist()
    else:
        assert got.tobytes() == values.tobytes()


def test_debug_takes_nan_and_changes_nothing():
    def load(number, arrays, seed):
        arrays["x"][:] = np.nan if number % 3 == 0 else number
        arrays["mask"][...] = number % 2 == 0
        return {"seed": seed}

    specs = {**SPECS, "mask": ((), np.bool_, np.bool_)}

    def run(debug):
        group = DataGroup(5, range(20), loader_arrays=specs)
        with Dataloader(
            load, group, debug=debug, end_at=("epoch", 2), timeout_sec=TIMEOUT_S
        ) as dataloader:
            return [
                (np.asarray(batch.arrays["x"]).tobytes(), batch.additional["seed"])
                for batch in dataloader
            ]

    assert run(True) == run(False)


def test_debug_can_be_switched_on_from_outside(monkeypatch):
    def forgets(number, arrays, seed):
        pass

    monkeypatch.setenv("HYDRAX_DEBUG", "1")
    with (
        Dataloader(forgets, numbers(), timeout_sec=9) as dataloader,
        pytest.raises(LoaderError, match="left 4 of 4 elements unwritten"),
    ):
        next(dataloader)
    monkeypatch.setenv("HYDRAX_DEBUG", "0")
    with Dataloader(forgets, numbers(), timeout_sec=9) as dataloader:
        next(dataloader)


def test_the_item_mapping_is_read_only_and_its_scalars_are_writable():
    def load(number, arrays, seed):
        arrays["label"][...] = number
        try:
            arrays["label"] = number
        except TypeError:
            return {"refused": True}

    group = DataGroup(5, range(20), loader_arrays={"label": ((), np.uint8, np.uint8)})
    with Dataloader(load, group, end_at=("epoch", 1), timeout_sec=9) as dataloader:
        for batch in dataloader:
            assert batch.arrays["label"].tolist() == list(batch.data)
            assert batch.additional["refused"] == [True] * 5
            del batch


# What loader processes know of the main process


class Curriculum:
    strength = 1.0


def test_changes_in_the_main_process_reach_the_loader_by_its_context():
    def load(number, arrays, seed):
        context = hydrax.loader_context()
        arrays["x"][:] = [
            Curriculum.strength,
            context.epoch,
            context.is_training,
            context.group_number,
        ]
        return {"worker": context.worker_index}

    validation = [numbers(6, 3), numbers(4, 2)]
    try:
        with Dataloader(
            load,
            [numbers(10), numbers(5)],
            validation=("epoch", 1, validation),
            end_at=("epoch", 2),
            loader_count=2,
            depth=1,
            timeout_sec=9,
        ) as dataloader:
            for batch in dataloader:
                Curriculum.strength += 1
                epoch = batch.epoch if batch.is_training else batch.validation_epoch
                expected = [1.0, epoch, batch.is_training, batch.group_number]
                assert batch.arrays["x"].tolist() == [expected] * len(batch)
                assert set(batch.additional["worker"]) <= {0, 1}
                del batch
    finally:
        Curriculum.strength = 1.0
    with pytest.raises(RuntimeError, match="loader_context"):
        hydrax.loader_context()


def test_in_process_the_context_has_no_worker():
    def load(number, arrays, seed):
        arrays["x"][:] = hydrax.loader_context().epoch
        return {"worker": hydrax.loader_context().worker_index}

    with Dataloader(load, numbers(), loader_count=0, end_at=("epoch", 2)) as dataloader:
        for batch in dataloader:
            assert batch.additional == {} or batch.additional["worker"] == [None] * 5
            assert float(batch.arrays["x"][0, 0]) == batch.epoch
            del batch
    with pytest.raises(RuntimeError, match="loader_context"):
        hydrax.loader_context()


# Small rows


@pytest.mark.parametrize(("depth", "loader_count"), [(3, 2), (2, 1), (3, 0)])
def test_a_batched_loader_is_called_once_per_batch(depth, loader_count):
    def load(indices, arrays, seeds):
        arrays["x"][:] = np.asarray(indices)[:, None]
        return {"length": [len(indices)] * len(indices)}

    group = numbers(10_240, 1024, shuffle_first=True)
    with Dataloader(
        load,
        group,
        batched=True,
        depth=depth,
        loader_count=loader_count,
        end_at=("epoch", 1),
        timeout_sec=TIMEOUT_S,
    ) as dataloader:
        for batch in dataloader:
            assert batch.additional["length"] == [1024] * 1024
            assert batch.arrays["x"][:, 0].tolist() == list(batch.data)
            del batch


def test_rows_of_100_bytes_come_at_a_third_of_the_rate_of_numpy_indexing_or_more():
    rows = np.random.default_rng(0).integers(0, 255, (200_000, 100), dtype=np.uint8)

    def load(indices, arrays, seeds):
        np.take(rows, indices, axis=0, out=arrays["row"], mode="clip")

    group = DataGroup(
        1024,
        range(len(rows)),
        loader_arrays={"row": ((100,), np.uint8, np.uint8)},
        shuffle_first=True,
    )
    order = np.random.default_rng(1).permutation(len(rows))

    def numpy_rate():
        start_s = time.perf_counter()
        for first in range(0, len(rows) - 1023, 1024):
            rows[order[first : first + 1024]]
        return 1 / (time.perf_counter() - start_s)

    ratios = []
    with Dataloader(load, group, batched=True, depth=4, end_at=("epoch", 8)) as dataloader:
        for _ in range(8):
            in_numpy = numpy_rate()
            start_s = time.perf_counter()
            for _ in range(dataloader.batches_per_epoch):
                batch = next(dataloader)
                del batch
            ratios.append(1 / (time.perf_counter() - start_s) / in_numpy)
    assert max(ratios) > 1 / 3, ratios


# The source


def test_working_in_place_in_the_loader_leaves_the_source_alone():
    source = np.arange(80, dtype=np.float32).reshape(20, 4)
    source.flags.writeable = False
    original = source.copy()

    def load(row, arrays, seed):
        arrays["x"][:] = row
        arrays["x"] /= 2  # what a user may well write

    def load_well(row, arrays, seed):
        x = arrays["x"]
        x[:] = row
        x /= 2

    group = numbers(data=source)
    with Dataloader(load_well, group, end_at=("epoch", 2), loader_count=0) as dataloader:
        for batch in dataloader:
            assert np.array_equal(batch.arrays["x"], original[list(batch.indices)] / 2)
            del batch
    with (
        Dataloader(load, group, end_at=("epoch", 1), timeout_sec=9) as dataloader,
        pytest.raises(LoaderError, match="TypeError"),
    ):
        next(dataloader)
    assert np.array_equal(source, original)


# Shapes and sizes at the edge


@pytest.mark.parametrize("debug", [False, True])
def test_arrays_without_elements_come_as_such(debug):
    specs = {
        "none": ((0,), np.float32, np.float32),
        "x": ((3,), np.uint8, np.uint8),
        "flat": ((3, 0), np.int32, np.float32),
        "deep": ((2, 0, 5), np.bool_, np.bool_),
    }

    def load(number, arrays, seed):
        assert arrays["deep"].shape == (2, 0, 5)
        arrays["x"][:] = number

    group = DataGroup(5, range(20), loader_arrays=specs)
    with Dataloader(load, group, debug=debug, end_at=("epoch", 1), timeout_sec=9) as dataloader:
        for batch in dataloader:
            shapes = {name: array.shape for name, array in batch.arrays.items()}
            assert shapes == {"none": (5, 0), "x": (5, 3), "flat": (5, 3, 0), "deep": (5, 2, 0, 5)}
            assert batch.arrays["x"][:, 2].tolist() == list(batch.data)
            assert batch.arrays["flat"].dtype == np.float32
            del batch


def test_a_batch_may_have_no_elements_at_all():
    group = DataGroup(5, range(20), loader_arrays={"none": ((0,), np.float32, np.float32)})
    with Dataloader(lambda *args: None, group, end_at=("epoch", 1), timeout_sec=9) as dataloader:
        assert [batch.arrays["none"].shape for batch in dataloader] == [(5, 0)] * 4


def test_batches_of_one_item_come_one_by_one():
    with Dataloader(
        fill, numbers(50, 1), loader_count=3, end_at=("epoch", 2), timeout_sec=9
    ) as dataloader:
        assert dataloader.batches_per_epoch == 50
        got = [(int(batch.arrays["x"][0, 0]), len(batch)) for batch in dataloader]
    assert got[:50] == [(number, 1) for number in range(50)]
    assert sorted(got[50:]) == got[:50]


@pytest.mark.parametrize("count", [10**12, 2**62])
@pytest.mark.parametrize("mode", ["itemwise", "batchwise"])
def test_data_of_any_length_is_shuffled_in_no_time(count, mode):
    def load(index, arrays, seed):
        arrays["high"][...] = index >> 31
        arrays["low"][...] = index & (2**31 - 1)

    specs = {"high": ((), np.int32, np.int32), "low": ((), np.int32, np.int32)}
    start_s = time.monotonic()
    group = DataGroup(8, range(count), loader_arrays=specs, shuffle_first=True, shuffle_later=mode)
    epochs = []
    for start_at in ((0, 0), (3, count // 8 - 1)):
        with Dataloader(
            load, group, start_at=start_at, loader_count=2, timeout_sec=9
        ) as dataloader:
            batch = next(dataloader)
            epochs.append(list(batch.indices))
            high, low = (np.asarray(batch.arrays[name], np.int64) for name in ("high", "low"))
            assert (high << 31 | low).tolist() == epochs[-1]
            del batch
    assert time.monotonic() - start_s < 3
    assert len(set(epochs[0] + epochs[1])) == 16
    assert max(epochs[0]) > count / 1000
    assert all(0 <= index < count for index in epochs[0] + epochs[1])


def test_data_that_is_slow_is_only_slow():
    class Slow:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            time.sleep(0.01)
            return index

    start_s = time.monotonic()
    with Dataloader(
        fill, numbers(data=Slow()), end_at=("epoch", 1), loader_count=2, timeout_sec=9
    ) as dataloader:
        assert firsts(dataloader) == [0, 5, 10, 15]
    assert time.monotonic() - start_s < 2


# Order


@pytest.mark.parametrize("loader_count", [1, 3])
def test_without_order_each_planned_batch_comes_exactly_once_and_whole(loader_count):
    def load(number, arrays, seed):
        time.sleep(0.01 if number % 10 == 0 else 0)
        arrays["x"][:] = number
        return {"seed": seed}

    with Dataloader(
        load,
        numbers(100, 5, shuffle_first=True),
        validation=("epoch", 1, numbers(10, 5)),
        deterministic=False,
        loader_count=loader_count,
        depth=4,
        end_at=("epoch", 3),
        timeout_sec=9,
    ) as dataloader:
        assert not dataloader.deterministic
        seen = []
        for batch in dataloader:
            assert batch.arrays["x"][:, 0].tolist() == list(batch.data)
            if batch.is_training:
                assert batch.additional["seed"] == list(batch.seeds)
                seen.append(batch.batch_num)
            else:
                seen.append(("validation", batch.validation_batch_num))
            del batch
    training = [number for number in seen if isinstance(number, int)]
    assert sorted(training) == list(range(60))
    assert sorted(set(seen) - set(training)) == [("validation", number) for number in range(6)]


def test_without_order_a_slow_batch_is_overtaken():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 0:
            time.sleep(0.5)

    with Dataloader(
        load,
        numbers(50, 1),
        deterministic=False,
        loader_count=2,
        depth=3,
        end_at=("epoch", 1),
        timeout_sec=9,
    ) as dataloader:
        order = [batch.get_data(0) for batch in dataloader]
    assert sorted(order) == list(range(50))
    assert order[0] != 0


# Attempts to make it hang or to spoil it


def outcome(load, **options):
    """What a run over 100 items ends in: the number of batches, or the type of the error."""
    with Dataloader(
        load, numbers(100), end_at=("epoch", 1), timeout_sec=5, **options
    ) as dataloader:
        try:
            count = 0
            for batch in dataloader:
                assert batch.arrays["x"][:, 1].tolist() == list(batch.data)
                count += 1
                del batch
        except HydraxError as error:
            return type(error)
    return count


def test_a_loader_that_closes_foreign_descriptors_gets_an_error_not_a_hang(capfd):
    def load(number, arrays, seed):
        arrays["x"][:] = number
        os.closerange(3, 200)

    assert outcome(load) in (20, WorkerDiedError, LoaderError)
    capfd.readouterr()


def test_a_loader_may_write_to_stdout_and_close_it(capfd):
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number % 2 == 0:
            print("item", number)
        if number == 50:
            sys.stdout.close()
            os.close(1)
            os.close(2)
        if number > 50 and number % 2 == 0:
            raise ValueError("no more printing")

    def careful(number, arrays, seed):
        arrays["x"][:] = number
        print("item", number)

    assert outcome(careful) == 20
    out = capfd.readouterr().out
    assert sorted(out.split("\n")[:-1]) == sorted(f"item {number}" for number in range(100))
    assert outcome(load) is LoaderError
    capfd.readouterr()


def test_a_loader_may_read_stdin_and_finds_its_end():
    def load(number, arrays, seed):
        assert sys.stdin.read() == ""
        arrays["x"][:] = number

    assert outcome(load) == 20


def test_a_loader_that_ignores_or_resets_signals_does_no_harm():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    assert outcome(load, loader_count=2) == 20


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_process_group_do_not_reach_loader_processes(signum):
    """As from Ctrl+C or kill of the group, while the main process handles them itself."""

    def load(number, arrays, seed):
        time.sleep(0.002)
        arrays["x"][:] = number

    before = signal.signal(signum, lambda *_: None)
    try:
        with Dataloader(
            load, numbers(200), loader_count=2, end_at=("epoch", 1), timeout_sec=20
        ) as dataloader:
            signal.signal(signum, lambda *_: None)
            groups = {os.getpgid(pid) for pid in dataloader._flow.loading.pool.pids}
            assert os.getpgid(0) not in groups
            count = 0
            for batch in dataloader:
                count += len(batch)
                del batch
        assert count == 200
    finally:
        signal.signal(signum, before)


def test_a_loader_process_that_is_ended_by_sigterm_is_reported_by_its_name():
    def load(number, arrays, seed):
        if number == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        arrays["x"][:] = number

    with (
        pytest.raises(WorkerDiedError, match="SIGTERM"),
        Dataloader(load, numbers(20), end_at=("epoch", 1), timeout_sec=20) as dataloader,
    ):
        for batch in dataloader:
            del batch


def test_signals_that_end_no_process_lose_no_items():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        for signum in (signal.SIGCHLD, signal.SIGWINCH, signal.SIGCONT, signal.SIGURG):
            os.kill(os.getpid(), signum)

    assert outcome(load, loader_count=2) == 20


def test_signals_to_the_main_process_do_not_disturb_the_waiting():
    hits = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: hits.append(signum))
    stop = threading.Event()

    def pester():
        while not stop.wait(0.001):
            os.kill(os.getpid(), signal.SIGUSR1)

    def load(number, arrays, seed):
        time.sleep(0.005)
        arrays["x"][:] = number

    thread = threading.Thread(target=pester)
    thread.start()
    try:
        assert outcome(load) == 20
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert len(hits) > 20


def test_a_signal_handler_that_raises_comes_out_of_next():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 5:
            time.sleep(1)

    def handler(signum, frame):
        raise InterruptedError("the user's own")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with Dataloader(load, numbers(), end_at=("epoch", 1), timeout_sec=9) as dataloader:
            next(dataloader)
            timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1])
            timer.start()
            with pytest.raises(InterruptedError, match="own"):
                next(dataloader)
            timer.join()
            assert firsts(dataloader) == [5, 10, 15]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_loader_that_keeps_its_arrays_keeps_only_views():
    kept = []

    def load(number, arrays, seed):
        arrays["x"][:] = number
        kept.append(arrays)

    assert outcome(load, loader_count=2) == 20
    assert kept == []  # they are of the loader processes


def test_a_loader_that_lowers_the_recursion_limit_is_an_error_not_a_hang():
    def load(number, arrays, seed):
        arrays["x"][:] = number
        if number == 7:
            sys.setrecursionlimit(40)
            raise ValueError("deep")

    assert outcome(load) in (LoaderError, WorkerDiedError)


def test_items_that_take_unequal_time_come_in_order_under_any_number_of_processes(rng):
    delays = rng.exponential(0.001, 100)

    def load(number, arrays, seed):
        time.sleep(delays[number])
        arrays["x"][:] = number

    for loader_count in (1, 2, 7):
        assert outcome(load, loader_count=loader_count, depth=2) == 20


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_let_go_on_other_threads_at_random_times_are_never_overwritten(depth, rng):
    wrong = []

    def check(arrays, expected, delay_s):
        time.sleep(delay_s)
        if np.asarray(arrays["x"])[:, 2].tolist() != expected:
            wrong.append(expected)

    threads = []
    with Dataloader(
        fill,
        numbers(1000, 5, shuffle_first=True),
        depth=depth,
        loader_count=2,
        end_at=("epoch", 1),
        timeout_sec=9,
    ) as dataloader:
        for batch in dataloader:
            arguments = (dict(batch.arrays), list(batch.data), float(rng.random() / 300))
            thread = threading.Thread(target=check, args=arguments)
            thread.start()
            threads.append(thread)
            del batch, arguments, thread
            if len(threads) > 20:
                threads.pop(0).join()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_jitted_step_on_each_batch_sees_its_own_data():
    step = jax.jit(lambda x: (x.sum(), x[0, 0]))
    with Dataloader(
        fill, numbers(500, 5), depth=2, loader_count=2, end_at=("epoch", 1), timeout_sec=9
    ) as dataloader:
        results = []
        for batch in dataloader:
            results.append(step(batch.arrays["x"]))
            del batch
    for index, (total, first) in enumerate(results):
        assert float(first) == 5 * index
        assert float(total) == 4 * (25 * index + 10)
