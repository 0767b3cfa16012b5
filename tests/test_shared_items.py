"""Large lists of descriptors stay shared between loader processes."""

from __future__ import annotations

import gc
import logging
import pathlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrax import DataGroup, Dataloader, _core, _shared_items, process_share

ARRAYS = {"x": ((), np.int32, np.int32)}
COUNT = 200_000
WORKER_COUNT = 4

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.binary()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.binary(), inner)
    ),
    max_leaves=20,
)


def shape(value):
    """A value as text that tells types and NaNs apart."""
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({','.join(map(shape, value))})"
    if type(value) is dict:
        return f"dict({','.join(f'{shape(k)}:{shape(v)}' for k, v in value.items())})"
    return f"{type(value).__name__} {value!r}"


@pytest.mark.sanitize
@settings(max_examples=50, deadline=None)
@given(st.lists(values, min_size=1))
def test_items_are_equal_in_value_and_type(data):
    for sequence in (data, tuple(data)):
        items = _core.Items(sequence)
        assert len(items) == len(data)
        assert [shape(items[index]) for index in range(len(data))] == list(map(shape, data))


@pytest.mark.parametrize(
    "text", ["", "\ud83d\ude00", "\U0001f600", "\udc80", "a\0b", "é", "x" * 511, "é" * 5000]
)
def test_text_is_the_same_code_point_by_code_point(text):
    copy = _core.Items([text])[0]
    assert list(copy) == list(text)


@pytest.mark.sanitize
def test_what_is_copied_is_not_referred_to():
    data = [["a", f"text {number}", (number + 10**6, {"k": 1.5 + number})] for number in range(3)]
    counts = [sys.getrefcount(data[1]), sys.getrefcount(data[1][1]), sys.getrefcount(data[1][2])]
    copies = [_core.Items(data)[index] for index in range(3)]
    assert copies == data
    assert copies[1] is not data[1]
    assert copies[1][1] is not data[1][1]
    assert copies[1][2][1] is not data[1][2][1]
    assert counts == [
        sys.getrefcount(data[1]), sys.getrefcount(data[1][1]), sys.getrefcount(data[1][2])
    ]  # fmt: skip
    assert all(_core.Items(data).is_apart(index) for index in range(3))


class Text(str):
    pass


@pytest.mark.parametrize(
    "item",
    [
        object(),
        pathlib.Path("a"),
        Text("a"),
        np.int64(3),
        frozenset([1]),
        2**80,
        "a" * 10**6,
        b"a" * 10**6,
        list(range(5000)),
        {(1, 2): 3},
    ],
    ids=lambda item: type(item).__name__,
)
def test_what_has_no_plain_copy_is_handed_out_itself(item):
    items = _core.Items([item, [item]])
    assert items[0] is item
    assert items[1][0] is item
    assert not items.is_apart(0)
    assert not items.is_apart(1)


def test_what_all_items_share_stays_shared():
    shared = {"scale": 2.0}
    data = [(shared, number) for number in range(2000)]
    items = _core.Items(data)
    assert items[5][0] is shared
    assert items[5] is not data[5]
    assert items.is_apart(5)


def test_a_list_in_itself_ends():
    cycle: list[object] = []
    cycle.append(cycle)
    copy = _core.Items([cycle])[0]
    assert copy is not cycle
    del cycle[:]


def test_nothing_leaks_and_the_collector_stays_on():
    data = [(f"{number}", [number, 0.5], {"a": b"c"}, 2**70, "é" * 600) for number in range(100)]
    items = _core.Items(data)

    def read(rounds):
        for _ in range(rounds):
            for index in range(100):
                assert items[index] == data[index]
                items.is_apart(index)
        gc.collect()
        return sys.getallocatedblocks()

    read(2)
    blocks = read(1)
    assert read(20) < blocks + 100
    assert gc.isenabled()
    gc.disable()
    try:
        items[0]
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_no_list_or_index_is_refused():
    for wrong in (range(3), "abc", {1: 2}, type("List", (list,), {})()):
        with pytest.raises(TypeError):
            _core.Items(wrong)
    items = _core.Items((1, 2))
    assert items[-1] == 2
    for index in (2, -3):
        with pytest.raises(IndexError):
            items[index]


def paths(count=COUNT):
    return [f"/data/train/n{number % 1000:08d}/image_{number:08d}.jpeg" for number in range(count)]


def private_nbytes(pid):
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def growth_of_workers(data):
    """Bytes that workers come to hold alone while they touch each item once."""

    def load(descriptor, arrays, seed):
        arrays["x"][...] = hash(descriptor) & 255

    group = DataGroup(len(data) // 30, data, loader_arrays=ARRAYS)
    with Dataloader(
        load, group, loader_count=WORKER_COUNT, end_at=("epoch", 1), depth=4
    ) as dataloader:
        next(dataloader)
        pids = [worker.pid for worker in dataloader.stats().workers]
        before = sum(map(private_nbytes, pids))
        count = 1
        for batch in dataloader:
            del batch
            count += 1
            if count == group.batch_count - 1:
                after = sum(map(private_nbytes, pids))
    return after - before


class PlainList(list):
    """Read in the usual way."""


def test_workers_do_not_copy_a_large_list_of_strings_by_touching_it():
    data = paths(4 * COUNT)  # so that what else a worker touches does not count
    nbytes = sys.getsizeof(data) + sum(map(sys.getsizeof, data))
    assert growth_of_workers(data) < 0.2 * nbytes
    assert growth_of_workers(process_share(data, 0, 1)) < 0.2 * nbytes
    # Seen to fail: without the care that is taken, each page is copied.
    assert growth_of_workers(PlainList(data)) > 0.5 * nbytes


def test_workers_do_not_copy_a_large_list_of_records():
    data = [(path, number, {"weight": 0.5 * number}) for number, path in enumerate(paths(100_000))]
    nbytes = sum(sys.getsizeof(part) for item in data for part in (item, *item[:2], item[2]))

    def load(descriptor, arrays, seed):
        path, number, record = descriptor
        arrays["x"][...] = number + record["weight"] + len(path)

    group = DataGroup(10_000, data, loader_arrays=ARRAYS)
    with Dataloader(load, group, loader_count=2, end_at=("epoch", 2)) as dataloader:
        next(dataloader)
        pids = [worker.pid for worker in dataloader.stats().workers]
        before = sum(map(private_nbytes, pids))
        for batch in dataloader:
            if batch.batch_num == 18:
                after = sum(map(private_nbytes, pids))
            del batch
    assert after - before < 0.2 * nbytes


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
def test_loading_from_a_large_list_gives_what_the_list_holds(batched, start_method):
    data = [[number, -number] for number in range(100_000)]
    group = DataGroup(5_000, data, loader_arrays=ARRAYS, shuffle_first=True)
    assert group.data is data
    dataloader = Dataloader(
        load_run if batched else load_one,
        group,
        batched=batched,
        start_method=start_method,
        end_at=("batch", 3),
        loader_count=2,
    )
    with dataloader:
        for batch in dataloader:
            assert batch.arrays["x"].tolist() == [2 * index for index in batch.indices]
            assert batch.data[7] is data[batch.indices[7]]
            del batch


def load_one(descriptor, arrays, seed):
    arrays["x"][...] = descriptor[0] - descriptor[1]


def load_run(descriptors, arrays, seeds):
    arrays["x"][:] = [first - second for first, second in descriptors]


def test_a_large_list_that_will_be_copied_is_warned_of(monkeypatch, caplog):
    monkeypatch.setattr(_shared_items, "_WARNED_ITEMS", 50)

    def warnings(data, **options):
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "hydrax"),
            Dataloader(load_one, DataGroup(5, data, loader_arrays=ARRAYS), **options),
        ):
            return list(caplog.messages)

    folder = pathlib.Path("folder")
    some_paths = [folder / str(number) for number in range(50)]
    (message,) = warnings(some_paths)
    assert "PosixPath" in message
    assert "50 items" in message
    assert warnings(some_paths, loader_count=0) == []
    assert warnings(some_paths[1:]) == []
    assert warnings(list(map(str, some_paths))) == []
    assert warnings(range(50)) == []
