"""The disk cache under faults: killed jobs, damaged and vanished files, full disks, other jobs."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isolated import run as isolated

from hydrax import CacheError, CacheMissingError, DataGroup, Dataloader
from hydrax import cache as caches

SPECS = {"x": ((500,), np.float32, np.float32), "label": ((), np.int32, np.int32)}
BATCHES = 10


class Load:
    """A loader that notes in a file what it loads."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "loaded"

    def __call__(self, number: int, arrays: Any, seed: int | None) -> dict[str, Any]:
        with open(self.path, "ab") as file:
            file.write(number.to_bytes(4, "little"))
        arrays["x"][:] = np.arange(500) + number
        arrays["label"][...] = number
        return {"name": f"item {number}"}

    def taken(self) -> list[int]:
        """Batches of which an item was loaded since the last call."""
        if not self.path.exists():
            return []
        numbers = np.fromfile(self.path, "<i4").tolist()
        self.path.unlink()
        return sorted({number // 2 for number in numbers})


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return Load(tmp_path)


def make_group(folder: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {"loader_arrays": SPECS, "cache_location": folder / "cache"} | changes
    return DataGroup(2, range(2 * BATCHES), **options)


def is_right(batch: Any) -> bool:
    numbers = np.array(batch.data)
    return bool(
        (np.asarray(batch.arrays["x"]) == numbers[:, None] + np.arange(500)).all()
        and batch.arrays["label"].tolist() == numbers.tolist()
        and batch.additional == {"name": [f"item {number}" for number in numbers]}
    )


def right_batches(loader: Any, group: Any, **options: Any) -> int:
    """How many batches of an epoch, or of a given end, are what they should be."""
    with Dataloader(loader, group, **{"end_at": ("epoch", 1)} | options) as dataloader:
        return sum(map(is_right, dataloader))


def path_of(folder: Path, batch: int) -> Path:
    return folder / "cache" / f"e0-b{batch}.batch"


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        del data[len(data) // 2 :]
    elif how == "empty":
        data.clear()
    elif how == "longer":
        data += b"x"
    elif how == "zeros":
        data[128:] = bytes(len(data) - 128)
    else:
        data[{"magic": 0, "header": 40, "arrays": 1000, "additional": len(data) - 1}[how]] ^= 4
    path.write_bytes(data)


KINDS = ["truncated", "empty", "longer", "zeros", "magic", "header", "arrays", "additional"]


@pytest.mark.slow
def test_r92_jobs_killed_at_any_moment_leave_no_wrong_batch_and_lose_none_reported(
    tmp_path, test_seed
):
    result = isolated.run_script("cache_kills.py", str(tmp_path / "cache"), "30", str(test_seed))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["killed"] >= 15
    assert found["reported"] > 0
    assert found == found | {"lost": 0, "wrong": 0, "damaged": 0, "stale": 0, "complete": True}


@pytest.mark.parametrize("how", KINDS)
def test_r92_a_damaged_file_is_reported_with_its_path_and_loaded_again(load, tmp_path, caplog, how):
    group = make_group(tmp_path)
    assert right_batches(load, group) == BATCHES
    load.taken()
    damage(path_of(tmp_path, 3), how)
    (bad,) = caches.verify(tmp_path / "cache")
    assert bad.path == str(path_of(tmp_path, 3))
    assert right_batches(load, make_group(tmp_path, cache_readonly=True)) == BATCHES
    assert load.taken() == [3]
    assert right_batches(load, group) == BATCHES
    assert load.taken() == [3]
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert all(str(path_of(tmp_path, 3)) in text for text in warnings)
    assert bad.reason in warnings[0]
    assert right_batches(load, group) == BATCHES
    assert load.taken() == []
    assert list(caches.verify(tmp_path / "cache")) == []


@pytest.mark.parametrize("how", ["truncated", "longer", "arrays"])
@pytest.mark.parametrize("cacher_count", [0, 1])
def test_r92_what_is_damaged_after_it_was_verified_is_found_too(
    load, tmp_path, caplog, how, cacher_count
):
    group = make_group(tmp_path, shuffle_later="repeat")
    with Dataloader(load, group, end_at=("epoch", 3), cacher_count=cacher_count) as dataloader:
        assert sum(map(is_right, itertools.islice(dataloader, 2 * BATCHES))) == 2 * BATCHES
        assert load.taken() == list(range(BATCHES))
        damage(path_of(tmp_path, 7), how)  # in place, and not among those that are mapped ahead
        assert sum(map(is_right, dataloader)) == BATCHES
    assert load.taken() == [7]
    assert str(path_of(tmp_path, 7)) in caplog.text
    assert list(caches.verify(tmp_path / "cache")) == []


def test_r92_every_flipped_byte_is_found(load, tmp_path):
    specs = {"x": ((3,), np.uint8, np.uint8), "y": ((), np.int16, np.int16)}

    def fill(number, arrays, seed):
        arrays["x"][:] = number
        arrays["y"][...] = number
        return {"n": number}

    group = make_group(tmp_path, loader_arrays=specs)
    with Dataloader(fill, group, end_at=("epoch", 1)) as dataloader:
        assert sum(len(batch) for batch in dataloader) == 2 * BATCHES
    path = path_of(tmp_path, 0)
    for number in range(1, BATCHES):
        path_of(tmp_path, number).unlink()
    good = path.read_bytes()
    unused = {*range(80, 128), *range(128 + 6, 128 + 64)}  # of the header; between the arrays
    with open(path, "r+b", buffering=0) as file:
        for position in sorted(set(range(len(good))) - unused):
            os.pwrite(file.fileno(), bytes([good[position] ^ 1]), position)
            found = [bad.path for bad in caches.verify(tmp_path / "cache")]
            assert found == [str(path)], position
            os.pwrite(file.fileno(), good[position : position + 1], position)
    assert list(caches.verify(tmp_path / "cache")) == []


@pytest.mark.parametrize("loader_count", [0, 2])
def test_damage_among_batches_that_are_loaded_ahead_keeps_the_order(load, tmp_path, loader_count):
    group = make_group(tmp_path)
    assert right_batches(load, group) == BATCHES
    load.taken()
    for number in (1, 2, 5, 6, 8, 9):  # the workers fill all slots with these
        path_of(tmp_path, number).unlink()
    damage(path_of(tmp_path, 4), "arrays")
    damage(path_of(tmp_path, 7), "truncated")
    with Dataloader(
        load, group, end_at=("epoch", 1), loader_count=loader_count, depth=2
    ) as dataloader:
        order = []
        for batch in dataloader:
            assert is_right(batch)
            order.append(batch.indices[0] // 2)
            del batch
        assert dataloader.stats().batches_delivered == BATCHES
    assert order == list(range(BATCHES))
    assert load.taken() == [1, 2, 4, 5, 6, 7, 8, 9]
    assert list(caches.verify(tmp_path / "cache")) == []
    damage(path_of(tmp_path, 4), "arrays")
    path_of(tmp_path, 6).unlink()
    assert right_batches(load, group, deterministic=False, depth=2) == BATCHES


@pytest.mark.parametrize("cacher_count", [0, 2])
def test_r93_a_file_removed_between_index_and_read_is_loaded_again(
    load, tmp_path, caplog, cacher_count
):
    group = make_group(tmp_path)
    assert right_batches(load, group) == BATCHES
    load.taken()
    with Dataloader(
        load, group, end_at=("epoch", 1), cacher_count=cacher_count, depth=2
    ) as dataloader:
        assert is_right(next(dataloader))
        for number in (6, 7, 9):  # planned already, but not read
            path_of(tmp_path, number).unlink()
        assert sum(map(is_right, dataloader)) == BATCHES - 1
    assert load.taken() == [6, 7, 9]
    assert f"{path_of(tmp_path, 6)}: it is missing; the batch is loaded again" in caplog.text
    assert len(list((tmp_path / "cache").glob("*.batch"))) == BATCHES


def test_r93_a_folder_removed_while_it_is_used_ends_caching_and_nothing_else(
    load, tmp_path, caplog
):
    group = make_group(tmp_path)
    with Dataloader(load, group, end_at=("epoch", 3)) as dataloader:
        assert sum(map(is_right, itertools.islice(dataloader, 4))) == 4
        while (tmp_path / "cache").exists():  # files come while it is being removed
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        assert sum(map(is_right, dataloader)) == 3 * BATCHES - 4
    assert "takes no more batches in this run" in caplog.text


def test_r93_a_full_disk_ends_caching_with_path_and_bytes_and_training_goes_on(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=16m tmpfs {folder} && exec"
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*enter, f"{mount} true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this machine lets nobody mount a file system of 16 MB")
    script = Path(__file__).parent / "isolated" / "cache_full_disk.py"
    result = subprocess.run(
        [*enter, f"{mount} {sys.executable} {script} {folder}/cache"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    counts, *warnings = result.stdout.splitlines()
    right, cached, saved = map(int, counts.split())
    assert right == 128
    assert 8 <= saved == cached <= 16
    (warning,) = warnings
    assert str(folder / "cache") in warning
    assert "1048" in warning  # the bytes of a batch
    assert "No space left on device" in warning
    assert "are free" in warning


def test_a_missing_or_damaged_batch_that_cannot_be_loaded_is_an_error_with_its_path(load, tmp_path):
    with Dataloader(load, make_group(tmp_path, cache_arrays=SPECS), end_at=("epoch", 1)) as loading:
        for batch in loading:
            batch.cache(dict(batch.arrays), dict(batch.additional))
            del batch
    damage(path_of(tmp_path, 2), "arrays")
    path_of(tmp_path, 5).unlink()
    only = make_group(tmp_path, loader_arrays=None, cache_arrays=SPECS)
    errors = []
    right = 0
    with Dataloader(None, only, end_at=("epoch", 1)) as dataloader:
        while True:
            try:
                right += is_right(next(dataloader))
            except StopIteration:
                break
            except CacheMissingError as error:
                errors.append(error)
    assert right == BATCHES - 2
    assert [error.path for error in errors] == [
        str(path_of(tmp_path, 2)),
        str(path_of(tmp_path, 5)),
    ]
    assert "checksum" in str(errors[0])
    assert "missing" in str(errors[1])
    assert all(error.path in str(error) for error in errors)


@pytest.mark.slow
def test_jobs_that_share_a_cache_get_right_batches_and_leave_it_whole(tmp_path):
    script = str(Path(__file__).parent / "isolated" / "cache_two_jobs.py")
    jobs = [isolated.start(script, str(tmp_path / "cache")) for _ in range(3)]
    for result in map(isolated.finish, jobs):
        assert (result.returncode, result.stdout) == (0, "180\n"), result.stderr
    assert caches.info(tmp_path / "cache").batch_count == 60
    assert list(caches.verify(tmp_path / "cache")) == []
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".batch", ".json"}


def test_temporary_files_of_ended_jobs_go_and_those_in_use_stay(load, tmp_path):
    group = make_group(tmp_path)
    right_batches(load, group)
    folder = tmp_path / "cache"
    (folder / "left.tmp").write_bytes(b"half a ba")
    with open(folder / "used.tmp", "wb") as used:
        fcntl.flock(used, fcntl.LOCK_EX)
        assert right_batches(load, make_group(tmp_path, cache_readonly=True)) == BATCHES
        assert {path.name for path in folder.glob("*.tmp")} == {"left.tmp", "used.tmp"}
        assert right_batches(load, group) == BATCHES
        assert {path.name for path in folder.glob("*.tmp")} == {"used.tmp"}
    caches.clear(folder)
    assert list(folder.iterdir()) == []


def test_what_is_no_plain_file_is_reported_and_never_waited_for(load, tmp_path, caplog):
    group = make_group(tmp_path)
    right_batches(load, group)
    load.taken()
    for number in (1, 2, 3):
        path_of(tmp_path, number).unlink()
    os.mkfifo(path_of(tmp_path, 1))
    path_of(tmp_path, 2).symlink_to("/dev/zero")
    path_of(tmp_path, 3).symlink_to(path_of(tmp_path, 3))
    assert [file.path for file in caches.verify(tmp_path / "cache")] == [
        str(path_of(tmp_path, number)) for number in (1, 2, 3)
    ]
    assert caches.info(tmp_path / "cache").batch_count == BATCHES
    assert right_batches(load, make_group(tmp_path, cache_readonly=True)) == BATCHES
    assert load.taken() == [1, 2, 3]
    assert caplog.text.count("it is no plain file") == 2
    assert caches.clear(tmp_path / "cache") == BATCHES
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_descriptor_without_an_end_is_not_read_to_its_end(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cache.json").symlink_to("/dev/zero")
    with pytest.raises(CacheError, match=r"cache\.json"):
        caches.info(tmp_path / "cache")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', "[" * 100_000, "\xff"])
def test_a_damaged_descriptor_is_an_error_that_names_it(load, tmp_path, text):
    group = make_group(tmp_path)
    right_batches(load, group)
    descriptor = tmp_path / "cache" / "cache.json"
    descriptor.write_text(text, "latin-1")
    with pytest.raises(CacheError, match=str(descriptor)), Dataloader(load, group):
        pass
    assert caches.main(["verify", str(tmp_path / "cache")]) == 1
    assert caches.clear(tmp_path / "cache") == BATCHES
    assert right_batches(load, group) == BATCHES


def test_files_of_another_cache_are_not_taken(load, tmp_path):
    group = make_group(tmp_path)
    right_batches(load, group)
    other = make_group(tmp_path, cache_location=tmp_path / "other", cache_fingerprint="other")
    right_batches(load, other)
    load.taken()
    for number in range(3):
        shutil.copy(tmp_path / "other" / f"e0-b{number}.batch", path_of(tmp_path, number))
    shutil.copy(path_of(tmp_path, 5), path_of(tmp_path, 6))
    assert right_batches(load, group) == BATCHES
    assert load.taken() == [0, 1, 2, 6]


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(load, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OSError, match="cache"), Dataloader(load, make_group(tmp_path)):
        pass


def test_a_relative_location_stays_where_it_was_when_the_working_directory_changes(
    load, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    group = make_group(Path(), cache_location="cache/")
    with Dataloader(load, group, end_at=("epoch", 2)) as dataloader:
        assert is_right(next(dataloader))
        monkeypatch.chdir("/")
        assert sum(map(is_right, dataloader)) == 2 * BATCHES - 1
    assert load.taken() == list(range(BATCHES))
    assert len(list((tmp_path / "cache").iterdir())) == BATCHES + 1


def test_a_run_that_is_broken_off_keeps_what_it_has_saved(load, tmp_path):
    group = make_group(tmp_path)
    with pytest.raises(KeyError), Dataloader(load, group) as dataloader:
        for batch in dataloader:
            if batch.epoch_batch == 4:
                raise KeyError
            del batch
    load.taken()
    saved = Counter(path.suffix for path in (tmp_path / "cache").iterdir())
    assert saved == {".json": 1, ".batch": 5}
    assert list(caches.verify(tmp_path / "cache")) == []
    assert right_batches(load, group) == BATCHES
    assert load.taken() == [5, 6, 7, 8, 9]
