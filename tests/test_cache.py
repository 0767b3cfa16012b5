"""The disk cache: what was loaded once comes back the same, without a copy and without loading."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import pickle
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import hydrax
from hydrax import (
    Batch,
    CacheError,
    CacheMissingError,
    DataGroup,
    Dataloader,
    LoaderError,
    _core,
)
from hydrax import cache as caches
from hydrax._cache import CacheFolder, DamagedFileError, Key
from hydrax._cache_values import decode_additional, encode_additional
from hydrax._fingerprint import sample_fingerprint
from hydrax._specs import lay_out, parse_specs

SPECS = {"x": ((5,), np.float32, np.float32), "seed": ((), np.int32, np.int32)}


class Load:
    """A loader that notes what it loads, in a file, whatever process it runs in."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "loaded"

    def __call__(self, number: int, arrays: Any, seed: int | None) -> dict[str, Any]:
        with open(self.path, "ab") as file:
            file.write(number.to_bytes(4, "little"))
        arrays["x"][:] = np.arange(5) + 10 * number
        arrays["seed"][...] = -1 if seed is None else seed
        return {"name": f"item {number}", "raw": bytes([number]), "odd": np.int16(number)}

    def taken(self) -> Counter[int]:
        """What was loaded since the last call."""
        if not self.path.exists():
            return Counter()
        numbers = np.fromfile(self.path, "<i4").tolist()
        self.path.unlink()
        return Counter(numbers)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return Load(tmp_path)


def numbers(folder: Path | None, count: int = 12, batch_size: int = 3, **changes: Any) -> Any:
    location = None if folder is None else folder / "cache"
    changes = {"loader_arrays": SPECS, "cache_location": location} | changes
    return DataGroup(batch_size, range(count), **changes)


def content(batch: Batch[Any]) -> Any:
    place = (
        (batch.epoch, batch.epoch_batch, batch.batch_num, batch.seed, list(batch.seeds))
        if batch.is_training
        else (batch.validation_epoch, batch.validation_epoch_batch)
    )
    arrays = {name: (a.dtype.name, np.asarray(a).tolist()) for name, a in batch.arrays.items()}
    items = (batch.group_number, list(batch.indices), batch.mask.tolist(), len(batch))
    return type(batch).__name__, place, items, arrays, dict(batch.additional)


def run(dataloader: Dataloader[Any], count: int | None = None) -> list[Any]:
    """Contents of the batches, each given back before the next."""
    return list(map(content, itertools.islice(dataloader, count)))


def run_all(loader: Any, groups: Any, **options: Any) -> list[Any]:
    with Dataloader(loader, groups, **{"end_at": ("epoch", 3)} | options) as dataloader:
        return run(dataloader)


def cache_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache").glob("*.batch"))


# What is loaded, and what comes back


@pytest.mark.parametrize("loader_count", [0, 2])
@pytest.mark.parametrize("remainder", ["drop", "pad", "short"])
@pytest.mark.parametrize("later", ["repeat", "batchwise", "reseed", "itemwise"])
def test_a_cached_run_equals_one_without_cache_and_loads_each_content_once(
    load, tmp_path, later, remainder, loader_count
):
    options = {"shuffle_later": later, "remainder": remainder, "shuffle_first": True, "count": 11}
    expected = run_all(load, numbers(None, **options), loader_count=0)
    load.taken()
    group = numbers(tmp_path, **options)
    assert run_all(load, group, loader_count=loader_count) == expected
    loaded = load.taken()
    if later in ("repeat", "batchwise"):
        repeated = 1 if remainder == "pad" else 0
        assert sum(loaded.values()) == 3 * (11 // 3) + {"drop": 0, "short": 2, "pad": 3}[remainder]
        assert sorted(loaded.values())[-1] == 1 + repeated
    assert run_all(load, group, loader_count=loader_count) == expected
    assert not load.taken()
    assert list(caches.verify(tmp_path / "cache")) == []


def test_default_shuffling_with_a_cache_keeps_batches_together(tmp_path):
    assert numbers(tmp_path).shuffle_later == "batchwise"
    assert numbers(None).shuffle_later == "itemwise"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_epochs_shorter_than_what_is_planned_ahead_are_loaded_once(load, tmp_path, count):
    group = numbers(tmp_path, count=3 * count)
    with Dataloader(load, group, depth=6, end_at=("epoch", 5)) as dataloader:
        assert len(run(dataloader)) == 5 * count
        stats = dataloader.stats()
    assert load.taken() == Counter(range(3 * count))
    assert (stats.batches_cached, stats.batches_saved) == (4 * count, count)
    assert stats.batches_delivered == 5 * count


def test_training_and_validation_have_caches_of_their_own(load, tmp_path):
    def groups(location):
        training = [
            numbers(location and location / "a", seed=1),
            numbers(location and location / "b", count=7, batch_size=2, remainder="short"),
        ]
        held_out = numbers(location and location / "c", count=5, batch_size=2, remainder="pad")
        return training, ("batch", 3, held_out)

    def go(location, **options):
        training, validation = groups(location)
        for group in training:
            group._shuffle_later = "batchwise"
        return run_all(load, training, validation=validation, **options)

    expected = go(None, loader_count=0)
    load.taken()
    assert go(tmp_path) == expected
    assert load.taken().total() == 12 + 7 + 6
    assert go(tmp_path, loader_count=0) == expected
    assert not load.taken()


@pytest.mark.parametrize("later", ["batchwise", "reseed", "itemwise"])
def test_groups_that_are_mixed_by_weight_are_cached_by_their_own_passes(load, tmp_path, later):
    def groups(location):
        return [
            numbers(location and location / str(size), count=size, shuffle_later=later)
            for size in (6, 15)
        ]

    options = {"weights": (0.7, 0.3), "end_at": ("batch", 40), "loader_count": 0}
    expected = run_all(load, groups(None), **options)
    assert run_all(load, groups(tmp_path), **options) == expected
    load.taken()
    assert run_all(load, groups(tmp_path), **options) == expected
    assert not load.taken()


def test_a_cached_run_goes_on_from_a_state_and_from_start_at(load, tmp_path):
    group = numbers(tmp_path)
    expected = run_all(load, group)
    for done in (0, 1, 4, 7, 11):
        with Dataloader(load, group, end_at=("epoch", 3)) as dataloader:
            assert run(dataloader, done) == expected[:done]
            state = dataloader.get_state()
            run(dataloader, 1)
            dataloader.set_state(state)
            assert run(dataloader, 2) == expected[done : done + 2]
        fresh = Dataloader(load, group, end_at=("epoch", 3))
        fresh.set_state(state)
        with fresh:
            assert run(fresh) == expected[done:]
    assert run_all(load, group, start_at=(1, 2)) == expected[6:]
    assert load.taken() == Counter(range(12))


def test_a_state_set_while_batches_are_being_cached_loses_none(load, tmp_path):
    group = numbers(tmp_path)
    with Dataloader(load, group, end_at=("epoch", 2)) as dataloader:
        start = dataloader.get_state()
        first = run(dataloader, 3)
        dataloader.set_state(start)
        assert run(dataloader, 3) == first
        assert len(run(dataloader)) == 5
    assert cache_files(tmp_path) == [f"e0-b{number}.batch" for number in range(4)]


def test_what_is_missing_from_a_cache_is_loaded_and_the_rest_is_not(load, tmp_path):
    group = numbers(tmp_path, count=60)
    expected = run_all(load, group, end_at=("epoch", 2))
    load.taken()
    for number in (0, 4, 5, 11, 19):
        (tmp_path / "cache" / f"e0-b{number}.batch").unlink()
    assert run_all(load, group, end_at=("epoch", 2), loader_count=2) == expected
    assert load.taken() == Counter(3 * n + i for n in (0, 4, 5, 11, 19) for i in range(3))


def test_out_of_order_delivery_delivers_everything_once_an_epoch(load, tmp_path):
    group = numbers(tmp_path, count=60)
    expected = sorted(run_all(load, group, end_at=("epoch", 1)), key=str)
    for number in range(0, 20, 3):
        (tmp_path / "cache" / f"e0-b{number}.batch").unlink()
    options = {"deterministic": False, "loader_count": 2, "end_at": ("epoch", 1)}
    assert sorted(run_all(load, group, **options), key=str) == expected
    assert sorted(run_all(load, group, **options), key=str) == expected


@pytest.mark.parametrize("cacher_count", [0, 1, 3])
def test_any_number_of_reading_threads_gives_the_same(load, tmp_path, cacher_count):
    group = numbers(tmp_path)
    expected = run_all(load, group)
    assert run_all(load, group, cacher_count=cacher_count, depth=1) == expected


@pytest.mark.slow
def test_spawned_workers_fill_a_cache(load, tmp_path):
    group = numbers(tmp_path)
    expected = run_all(load, numbers(None, shuffle_later="batchwise"), loader_count=0)
    assert run_all(load, group, start_method="spawn") == expected


def test_a_batch_with_a_failed_item_is_not_cached(load, tmp_path):
    def load_most(number, arrays, seed):
        if number == 4:
            raise ValueError("not this one")
        return load(number, arrays, seed)

    group = numbers(tmp_path)
    for _ in range(2):
        assert len(run_all(load_most, group, on_error="drop_batch")) == 9
    assert cache_files(tmp_path) == ["e0-b0.batch", "e0-b2.batch", "e0-b3.batch"]
    with Dataloader(load_most, group) as dataloader:
        run(dataloader, 1)
        with pytest.raises(LoaderError, match="not this one"):
            next(dataloader)
        assert len(run(dataloader, 2)) == 2


def test_a_batch_without_an_item_that_was_skipped_is_not_cached(load, tmp_path):
    def load_most(number, arrays, seed):
        if number == 4:
            raise ValueError("not this time")
        return load(number, arrays, seed)

    group = numbers(tmp_path)
    options = {"on_error": "skip_item", "end_at": ("epoch", 1)}
    with Dataloader(load_most, group, **options) as dataloader:
        assert [(batch.uncached, batch.valid_count) for batch in dataloader] == [
            (False, 3), (True, 2), (False, 3), (False, 3),
        ]  # fmt: skip
    assert cache_files(tmp_path) == ["e0-b0.batch", "e0-b2.batch", "e0-b3.batch"]
    assert len(run_all(load, group, **options)) == len(cache_files(tmp_path)) == 4


# Without a copy


DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"),
    *("bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2"),
]


def mapped_ranges(folder: Path) -> list[range]:
    """Addresses in this process at which files of a cache are mapped."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            start, end = line.split()[0].split("-")
            found.append(range(int(start, 16), int(end, 16)))
    return found


def test_cached_arrays_are_the_mapped_file_for_every_dtype(tmp_path):
    dtypes = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in DTYPES}
    specs = {name: ((7, 3), dtype, dtype) for name, dtype in dtypes.items()}
    specs["scalar"] = ((), np.uint8, np.uint8)

    def fill(number, arrays, seed):
        for name, array in arrays.items():
            array[...] = np.full(array.shape, number % 2 if name == "bool" else number)

    group = numbers(tmp_path, count=6, loader_arrays=specs)
    with Dataloader(fill, group, end_at=("epoch", 2)) as dataloader:
        for batch in dataloader:
            if batch.epoch == 0:
                continue
            mapped = mapped_ranges(tmp_path)
            for name, array in batch.arrays.items():
                pointer = array.unsafe_buffer_pointer()
                assert pointer % 64 == 0
                assert any(pointer in part for part in mapped), name
                wanted = [number % 2 if name == "bool" else number for number in batch.data]
                assert np.asarray(array).reshape(3, -1)[:, 0].tolist() == wanted
            assert batch.is_zero_copy
            assert not batch.copy().is_zero_copy


def test_packed_dtypes_come_back_by_a_copy(tmp_path):
    specs = {"x": ((5,), ml_dtypes.int4, ml_dtypes.int4)}

    def fill(number, arrays, seed):
        arrays["x"][:] = number - 3

    group = numbers(tmp_path, count=6, loader_arrays=specs)
    for batch in run_all(fill, group, end_at=("epoch", 2)):
        assert batch[3]["x"] == ("int4", [[number - 3] * 5 for number in batch[2][1]])


@pytest.mark.sanitize
def test_a_file_is_mapped_as_long_as_an_array_of_it_lives(load, tmp_path):
    group = numbers(tmp_path)
    run_all(load, group, end_at=("epoch", 1))
    with Dataloader(load, group, end_at=("epoch", 1)) as dataloader:
        kept = [batch.arrays["x"] for batch in dataloader]  # more than depth
    assert len(mapped_ranges(tmp_path)) == 4
    caches.clear(tmp_path / "cache")
    values = [np.asarray(array)[:, 0].tolist() for array in kept]
    assert values == [[10.0 * (3 * batch + item) for item in range(3)] for batch in range(4)]
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(kept.pop())
    assert doubled[0, 0] == 180
    del kept[1:]
    gc.collect()
    assert len(mapped_ranges(tmp_path)) == 1
    del kept
    gc.collect()
    assert mapped_ranges(tmp_path) == []


def test_cached_batches_take_no_slots(load, tmp_path):
    group = numbers(tmp_path, count=60)
    run_all(load, group, end_at=("epoch", 1))
    with Dataloader(load, group, depth=1, end_at=("epoch", 2), timeout_sec=5) as dataloader:
        assert len(list(dataloader)) == 40


# Batches that the user caches


MADE = {"mean": ((), np.float32, np.float32), "wide": ((3,), np.float32, np.float32)}


def make(batch: Batch[Any]) -> None:
    x = batch.arrays["x"]
    batch.cache({"wide": x[:, :3] * 2, "mean": x.mean(axis=1)}, {"from": list(batch.indices)})


def test_a_batch_that_the_user_has_cached_comes_back_as_such(load, tmp_path):
    group = numbers(tmp_path, cache_arrays=MADE)
    assert group.cache_layouts["wide"][:4] == ((3, 3), np.float32, np.float32, 64)
    assert group.cache_size == 64 + 36
    seen = []
    for _ in range(2):
        with Dataloader(load, group, end_at=("epoch", 2)) as dataloader:
            for batch in dataloader:
                if batch.uncached:
                    assert list(batch.layouts) == ["x", "seed"]
                    make(batch)
                assert not batch.uncached
                assert batch.layouts is group.cache_layouts
                assert batch.arrays["mean"].tolist() == [10 * i + 2 for i in batch.indices]
                assert batch.arrays["wide"][:, 1].tolist() == [20 * i + 2 for i in batch.indices]
                assert batch.additional == {"from": list(batch.indices)}
                with pytest.raises(RuntimeError, match="cached already"):
                    batch.cache({})
                seen.append(batch.epoch)
        assert load.taken() == (Counter(range(12)) if len(seen) == 8 else Counter())


@pytest.mark.parametrize("loader", [None, "never called"])
def test_without_loader_arrays_everything_comes_from_the_cache(load, tmp_path, loader):
    group = numbers(tmp_path, cache_arrays=MADE)
    with Dataloader(load, group, end_at=("epoch", 1)) as dataloader:
        for batch in dataloader:
            make(batch)
    load.taken()
    only = numbers(tmp_path, loader_arrays=None, cache_arrays=MADE, cache_readonly=True)
    assert only.loader_layouts is only.loader_size is None
    with Dataloader(loader and load, only, end_at=("epoch", 2), loader_count=2) as dataloader:
        found = [batch.arrays["mean"].tolist() for batch in dataloader]
        assert not dataloader.stats().workers
    expected = [[10 * (3 * batch + item) + 2 for item in range(3)] for batch in range(4)]
    assert found[:4] == expected
    assert sorted(found[4:]) == expected
    assert not load.taken()


def test_a_batch_cached_in_memory_only_is_loaded_again(load, tmp_path):
    for group in (
        numbers(tmp_path, cache_arrays=MADE),
        numbers(None, cache_arrays=MADE, shuffle_later="batchwise"),
    ):
        with Dataloader(load, group, end_at=("epoch", 2)) as dataloader:
            for batch in dataloader:
                assert batch.uncached
                x = batch.arrays["x"]
                batch.cache({"mean": x.sum(axis=1), "wide": x[:, :3]}, persist=False)
                assert set(batch.arrays) == {"mean", "wide"}
                assert list(batch.additional) == ["name", "raw", "odd"]
                del x, batch
        assert load.taken() == Counter(dict.fromkeys(range(12), 2))
    assert cache_files(tmp_path) == []


def test_what_cannot_be_cached_is_refused_by_name(load, tmp_path):
    mean, wide = jnp.zeros(3), jnp.zeros((3, 3))
    good = {"mean": mean, "wide": wide}
    bad: list[tuple[Any, Any, type[Exception], str]] = [
        ({"mean": mean}, None, ValueError, "'wide'.*missing"),
        (good | {"other": mean}, None, ValueError, "'other'"),
        (good | {"mean": jnp.zeros(4)}, None, ValueError, r"'mean'.*\(4,\).*\(3,\)"),
        (good | {"mean": jnp.zeros(3, int)}, None, ValueError, "'mean'.*int32.*float32"),
        (good | {"mean": np.zeros(3, np.float32)}, None, TypeError, "'mean'.*ndarray"),
        (good, {"k": [1, 2]}, ValueError, "'k'"),
        (good, {"k": [1, 2, {3}]}, TypeError, "'k' of item 2.*set"),
        (good, {"k": [1, 2, np.array([None])]}, TypeError, "'k' of item 2.*object"),
        (good, {1: [1, 2, 3]}, TypeError, "key 1"),
    ]
    with Dataloader(load, numbers(tmp_path, cache_arrays=MADE)) as dataloader:
        batch = next(dataloader)
        for arrays, additional, kind, match in bad:
            with pytest.raises(kind, match=match):
                batch.cache(arrays, additional)
        assert batch.uncached
        batch.cache(good)
        last = next(dataloader)
    with pytest.raises(RuntimeError, match="block has been left"):
        last.cache(good)
    assert cache_files(tmp_path) == ["e0-b0.batch"]
    with Dataloader(load, numbers(None)) as dataloader:
        batch = next(dataloader)
        assert batch.uncached
        with pytest.raises(RuntimeError, match="no cache_arrays"):
            batch.cache({})


def test_arrays_that_are_donated_too_early_are_not_cached_and_it_is_said(load, tmp_path, caplog):
    group = numbers(tmp_path, count=3, cache_arrays={"x": SPECS["x"]})
    with Dataloader(load, group, end_at=("epoch", 1)) as dataloader:
        (batch,) = dataloader
        made = batch.arrays["x"] + 1
        made.delete()  # as donation does
        batch.cache({"x": made})
    assert cache_files(tmp_path) == []
    assert "e0-b0.batch is not cached" in caplog.text


def test_a_loaders_result_that_cannot_be_kept_is_refused_by_name(tmp_path):
    def fill(number, arrays, seed):
        arrays["x"][:] = number
        return {"kind": object() if number == 4 else "plain"}

    group = numbers(tmp_path, loader_arrays={"x": SPECS["x"]})
    with Dataloader(fill, group, end_at=("epoch", 1)) as dataloader:
        next(dataloader)
        with pytest.raises(CacheError, match="'kind' of item 1 is or holds object"):
            next(dataloader)
        assert len(list(dataloader)) == 2
    assert len(cache_files(tmp_path)) == 3


# Which cache is used, and how much of it


def test_a_cache_made_under_other_parameters_is_refused_by_name(load, tmp_path):
    run_all(load, numbers(tmp_path), end_at=("epoch", 1))
    others = {
        "batch_size": {"batch_size": 4},
        "item count": {"count": 13},
        "seed": {"seed": 1},
        "shuffle_first": {"shuffle_first": True},
        "shuffle_later": {"shuffle_later": "itemwise"},
        "remainder": {"remainder": "short"},
        "arrays": {"loader_arrays": SPECS | {"x": ((5,), np.float32, np.float16)}},
        "made by": {"cache_arrays": SPECS},
        "cache_fingerprint": {"cache_fingerprint": "v2"},
    }
    for name, changes in others.items():
        with (
            pytest.raises(CacheError, match=name) as caught,
            Dataloader(load, numbers(tmp_path, **changes)),
        ):
            pass
        assert isinstance(caught.value, RuntimeError)
    swapped = dict(reversed(SPECS.items()))
    with (
        pytest.raises(CacheError, match="arrays"),
        Dataloader(load, numbers(tmp_path, loader_arrays=swapped)),
    ):
        pass
    other_data = DataGroup(
        3, range(100, 112), loader_arrays=SPECS, cache_location=tmp_path / "cache"
    )
    with pytest.raises(CacheError, match="sample of the data"), Dataloader(load, other_data):
        pass
    plain = numbers(None)
    with (
        pytest.raises(CacheError, match="kind was 'training' and is 'validation'"),
        Dataloader(load, plain, validation=("epoch", 1, numbers(tmp_path))),
    ):
        pass
    with (
        pytest.raises(CacheError, match="place among"),
        Dataloader(load, [plain, numbers(tmp_path)]),
    ):
        pass
    load.taken()
    assert len(run_all(load, numbers(tmp_path))) == 12
    assert not load.taken()


def test_a_given_fingerprint_stands_for_the_data(load, tmp_path):
    run_all(load, numbers(tmp_path, cache_fingerprint=7), end_at=("epoch", 1))
    load.taken()
    moved = DataGroup(
        3,
        range(100, 112),
        loader_arrays=SPECS,
        cache_location=tmp_path / "cache",
        cache_fingerprint=7,
    )
    assert len(run_all(load, moved)) == 12
    assert not load.taken()


def test_a_sample_of_the_data_tells_data_sets_apart():
    class Thing:
        pass

    words = [f"{number}.jpg" for number in range(1000)]
    base = sample_fingerprint(words)
    assert base == sample_fingerprint(tuple(words)) == "b3708a562614dc93"
    others: list[Any] = [words[:-1], [*words[:-1], "other"], [word.encode() for word in words]]
    assert base not in map(sample_fingerprint, others)
    for kind in (
        [{"path": Path("a"), "box": (1, 2.5)}],
        [np.arange(3)],
        np.arange(12).reshape(3, 4),
    ):
        assert sample_fingerprint(kind) == sample_fingerprint(kind) is not None
    assert sample_fingerprint([np.arange(3)]) != sample_fingerprint([np.arange(3.0)])
    assert sample_fingerprint([Thing()]) is sample_fingerprint([np.array([Thing()])]) is None


def test_data_that_no_sample_tells_apart_are_said_to_need_a_fingerprint(load, tmp_path, caplog):
    class Plain:
        def __init__(self, number):
            self.number = number

    def load_plain(thing, arrays, seed):
        return load(getattr(thing, "number", thing), arrays, seed)

    for data, fingerprint in (
        ([Plain(number) for number in range(12)], None),
        ([Plain(number) for number in range(12)], "things"),
        (range(12), None),
    ):
        caplog.clear()
        group = DataGroup(
            3,
            data,
            loader_arrays=SPECS,
            cache_location=tmp_path / f"{type(data).__name__}{fingerprint}",
            cache_fingerprint=fingerprint,
        )
        assert len(run_all(load_plain, group, end_at=("epoch", 1))) == 4
        is_said = "give the DataGroup a cache_fingerprint" in caplog.text
        assert is_said == (fingerprint is None and data != range(12))


def test_a_readonly_cache_is_read_and_never_written(load, tmp_path):
    group = numbers(tmp_path)
    expected = run_all(load, group)
    (tmp_path / "cache" / "e0-b2.batch").unlink()
    load.taken()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    readonly = numbers(tmp_path, cache_readonly=True)
    assert run_all(load, readonly) == expected
    assert load.taken() == Counter({6: 3, 7: 3, 8: 3})
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert before == after
    with Dataloader(load, readonly, end_at=("epoch", 1)) as dataloader:
        assert [batch.uncached for batch in dataloader] == [False, False, True, False]


@pytest.mark.parametrize(
    "changes",
    [{"cache_readonly": True}, {"loader_arrays": None, "cache_arrays": SPECS}],
    ids=["readonly", "without loader_arrays"],
)
def test_a_cache_that_must_be_there_and_is_not_is_an_error_with_its_path(load, tmp_path, changes):
    with (
        pytest.raises(CacheMissingError, match="no cache") as caught,
        Dataloader(load, numbers(tmp_path, **changes)),
    ):
        pass
    assert caught.value.path == str(tmp_path / "cache" / "cache.json")
    assert isinstance(caught.value, FileNotFoundError)
    assert not (tmp_path / "cache").exists()


def test_a_cache_grows_to_its_limit_and_what_is_there_stays(load, tmp_path):
    group = numbers(tmp_path)
    expected = run_all(load, group)
    load.taken()
    size = (tmp_path / "cache" / "e0-b0.batch").stat().st_size
    caches.clear(tmp_path / "cache")
    limited = numbers(tmp_path, cache_bytes=2 * size + 50)
    for _ in range(2):
        assert run_all(load, limited) == expected
        assert cache_files(tmp_path) == ["e0-b0.batch", "e0-b1.batch"]
    assert load.taken() == Counter(range(6)) + Counter(dict.fromkeys(range(6, 12), 6))
    assert run_all(load, numbers(tmp_path, cache_bytes=0)) == expected


def test_a_placement_function_gets_cached_arrays_and_cannot_change_the_cache(load, tmp_path):
    seen = []

    def place(arrays, layouts, additional, group):
        seen.append((*sorted(arrays), layouts == group.cache_layouts))
        arrays["x"][:] += 1
        assert arrays["x"].dtype == np.float16
        return {"x": jnp.asarray(arrays["x"], jnp.float32), "seed": jnp.array(arrays["seed"])}

    specs = SPECS | {"x": ((5,), np.float16, np.float32)}
    group = numbers(tmp_path, loader_arrays=specs)
    for epochs in (1, 2):
        for batch in run_all(load, group, placement_func=place, end_at=("epoch", epochs)):
            first = [row[0] for row in batch[3]["x"][1]]
            assert first == [10 * index + 1 for index in batch[2][1]]
    assert load.taken() == Counter(range(12))
    assert set(seen) == {("seed", "x", True)}
    # Without it the cache would hold what JAX gets, which is something else.
    with pytest.raises(CacheError, match="arrays"), Dataloader(load, group):
        pass


# Files


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9)
    | npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, min_side=0, max_side=3))
    | npst.scalar_dtypes().flatmap(lambda dtype: npst.arrays(dtype, ())).map(lambda a: a[()]),
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.sampled_from(["$", "of", "at", "é", ""]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), st.lists(json_values, min_size=2, max_size=2), max_size=2))
def test_additional_results_come_back_equal_in_value_and_type(additional):
    decoded = decode_additional(encode_additional(additional)) or {}
    assert same(decoded, additional)


@given(st.binary(max_size=64), st.integers(0, 63), st.integers(1, 255))
def test_damaged_additional_results_are_refused_or_read_never_run(junk, position, change):
    encoded = bytearray(encode_additional({"k": [np.arange(4), b"abc", ("t", 1.5)]}))
    encoded[position] ^= change
    for data in (junk, bytes(encoded)):
        with contextlib.suppress(ValueError):
            decode_additional(data)


@pytest.mark.parametrize(
    "tree",
    [
        *([1], [[]], {"k": 3}, {"k": [{"$": "code"}]}, {"k": [{"$": "tuple"}]}),
        {"k": [{"$": "bytes", "at": 64, "nbytes": 1}]},
        *(
            {"k": [{"$": "array", "at": 0, "dtype": dtype, "shape": shape}]}
            for dtype, shape in [
                *(("O", [1]), ("i4,O", [1]), ({"names": ["a"], "formats": ["O"]}, [1])),
                *(("i1", [-1]), ("i1", [-1, -1]), ("i1", [2**40]), ("U0", [2**62, 4])),
                *(("i1", [0, 10**30]), ("i1", ["a"]), ("V1", [1])),
            ]
        ),
    ],
    ids=str,
)
def test_forged_additional_results_are_refused(tree):
    text = json.dumps(tree).encode()
    with pytest.raises(ValueError, match="additional results"):
        decode_additional(struct.pack("<Q", len(text)) + text + bytes(64))


def test_a_pickle_in_a_cache_is_damage(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    layouts, _ = lay_out(parse_specs("arrays", {"x": ((4,), "u1", "u1")}), 2)
    folder = CacheFolder(str(tmp_path), {"batch_size": 2}, layouts, is_readonly=False)
    folder.open()
    file = folder.write(Key(0, 3), 2, memoryview(bytes(8)), pickle.dumps({"k": [Bomb()]}))
    assert folder.commit([file]) == [Key(0, 3)]
    with pytest.raises(DamagedFileError, match="additional results"):
        folder.read(Key(0, 3), 2)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.sanitize
def test_the_checksum_is_xxh64():
    assert _core.checksum(b"", 0) == 0xEF46DB3751D8E999
    assert _core.checksum(b"a", 0) == 0xD24EC4F1A98C6E5B
    assert _core.checksum(b"abc", 0) == 0x44BC2CF5AD770999
    data = bytearray(range(256)) * 100
    whole = _core.checksum(data, 0)
    assert whole == _core.checksum(bytes(data), 0) != _core.checksum(data, 1)
    for position in (0, 31, 32, 12345, len(data) - 1):
        data[position] ^= 1
        assert _core.checksum(data, 0) != whole
        data[position] ^= 1


@pytest.mark.sanitize
def test_a_mapping_refuses_what_lies_outside(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    with open(path, "rb") as file:
        mapping = _core.Mapping(file.fileno(), 200, 64)
        with pytest.raises(ValueError, match="mapping"):
            _core.Mapping(file.fileno(), 0, 0)
        with pytest.raises(ValueError, match="mapping"):
            _core.Mapping(file.fileno(), 10, 11)
        with pytest.raises(OSError, match="descriptor"):
            _core.Mapping(-1, 10, 0)
    assert mapping.nbytes == 136
    assert bytes(memoryview(mapping)[:3]) == b"\x40\x41\x42"
    for offset, shape in ((0, (137,)), (136, (1,)), (1 << 63, (1,)), (0, (-1,)), (0, (2**62, 8))):
        with pytest.raises((ValueError, OverflowError)):
            mapping.capsule(offset, shape, 1, 8)
    memoryview(mapping)[0] = 7  # a copy of the page; the file stays
    assert path.read_bytes()[64] == 64
    os.truncate(path, 0)
    with open(path, "rb") as file:
        fresh = _core.Mapping(file.fileno(), 200, 0)
    with pytest.raises(OSError, match="Bad address"):  # not a bus error
        fresh.populate()


@pytest.mark.sanitize
def test_a_mapping_is_opened_again_only_if_the_file_is_the_same(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    status = path.stat()
    stamp = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    for may_wait in (True, False):
        mapping = _core.Mapping.reopen(str(path), stamp, 200, 64, may_wait)
        if mapping is None:
            assert not may_wait  # a kernel or a file system that does not tell what is in memory
        else:
            assert bytes(mapping) == bytes(range(64, 200))
        assert _core.Mapping.reopen(str(path), stamp, 199, 64, may_wait) is None
        assert _core.Mapping.reopen(f"{path}x", stamp, 200, 64, may_wait) is None
        for part in range(4):
            other = (*stamp[:part], stamp[part] + 1, *stamp[part + 1 :])
            assert _core.Mapping.reopen(str(path), other, 200, 64, may_wait) is None
    for nbytes, offset in ((0, 0), (10, 11)):
        with pytest.raises(ValueError, match="mapping"):
            _core.Mapping.reopen(str(path), stamp, nbytes, offset, True)
    with pytest.raises(TypeError):
        _core.Mapping.reopen(str(path), stamp[:3], 200, 64, True)


def evict(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_told_in_memory(path: Path) -> bool:
    status = path.stat()
    stamp = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    return _core.Mapping.reopen(str(path), stamp, status.st_size, 0, False) is not None


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hydrax-cache-read"]


def test_a_thread_reads_ahead_what_is_not_in_memory_and_nothing_else(load, tmp_path):
    group = numbers(tmp_path, count=30, shuffle_later="repeat")
    with Dataloader(load, group, end_at=("epoch", 3)) as dataloader:
        expected = [batch[3] for batch in run(dataloader, 10)]
        assert [batch[3] for batch in run(dataloader, 10)] == expected
        files = [tmp_path / "cache" / name for name in cache_files(tmp_path)]
        if not all(map(is_told_in_memory, files)):
            pytest.skip("this machine does not tell what of a file is in memory")
        assert not reading_threads()
        for path in files:
            evict(path)
        if all(map(is_told_in_memory, files)):  # those that are mapped ahead stay
            pytest.skip("this file system keeps its files in memory")
        assert [batch[3] for batch in run(dataloader)] == expected
        assert reading_threads()
    assert load.taken() == Counter(range(30))


def test_the_program_shows_checks_and_clears(load, tmp_path, capsys):
    group = numbers(tmp_path)
    run_all(load, group, end_at=("epoch", 1))
    folder = tmp_path / "cache"
    (folder / "notes.txt").write_text("mine")
    found = caches.info(folder)
    assert (found.batch_count, found.batches_per_epoch) == (4, 4)
    assert found.nbytes == sum(path.stat().st_size for path in folder.glob("*.batch"))
    assert found.facts["item count"] == 12
    assert caches.main(["info", str(folder)]) == 0
    assert "4 batches" in capsys.readouterr().out
    assert caches.main(["verify", str(folder)]) == 0
    damaged = folder / "e0-b1.batch"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (folder / "strange.batch").write_bytes(b"")
    assert caches.main(["verify", str(folder)]) == 1
    output = capsys.readouterr().out
    assert f"{damaged}: it has" in output
    assert "strange.batch: its name" in output
    assert caches.main(["clear", str(folder)]) == 0
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    for command in ("info", "verify", "clear"):
        assert caches.main([command, str(folder)]) == 1
        assert "is no cache" in capsys.readouterr().err


def test_cache_arguments_are_checked_at_the_door(tmp_path):
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"loader_arrays": None}, ValueError, "loader_arrays"),
        ({"loader_arrays": None, "cache_arrays": SPECS, "cache_location": None}, ValueError,
         "cache_location"),
        ({"cache_arrays": {}}, ValueError, "cache_arrays"),
        ({"cache_location": 3}, TypeError, "cache_location"),
        ({"cache_location": b"x"}, TypeError, "cache_location"),
        ({"cache_bytes": -1}, ValueError, "cache_bytes"),
        ({"cache_bytes": 1.5}, TypeError, "cache_bytes"),
        ({"cache_fingerprint": [1]}, TypeError, "cache_fingerprint"),
    ]  # fmt: skip
    for changes, kind, match in bad:
        with pytest.raises(kind, match=match):
            numbers(tmp_path, **changes)
    with pytest.raises(TypeError, match="loader_func"):
        Dataloader(None, numbers(tmp_path))
    group = numbers(tmp_path)
    assert group.cache_location == str(tmp_path / "cache")
    assert group.cache_layouts == group.loader_layouts
    assert hydrax.CacheError is CacheError
