"""Data sets of other libraries, arrays in files, and what holds open files, as data of a group."""

from __future__ import annotations

import io
import pickle
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hydrax
from hydrax import DataGroup, Dataloader
from hydrax._sequences import dumps

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")

ROWS = np.arange(600 * 4, dtype=np.int32).reshape(600, 4)
ARRAYS = {"x": ((4,), np.int32, np.int32)}


def load(row: Any, arrays: Any, seed: Any) -> None:
    arrays["x"][:] = row


def load_many(rows: Any, arrays: Any, seeds: Any) -> None:
    arrays["x"][:] = rows


def check_loading(data: Any, expected: np.ndarray = ROWS, **options: Any) -> DataGroup[Any]:
    """All items arrive, each as often as it should and where the batch says that it is."""
    group = DataGroup(32, data, loader_arrays=ARRAYS, shuffle_first=True, remainder="short")
    options = {"loader_count": 3, "end_at": ("epoch", 1), **options}
    seen: list[int] = []
    with Dataloader(load_many if options.get("batched") else load, group, **options) as batches:
        for batch in batches:
            np.testing.assert_array_equal(batch.arrays["x"], expected[list(batch.indices)])
            np.testing.assert_array_equal(batch.data[0], expected[batch.indices[0]])
            seen += batch.indices
    assert sorted(seen) == list(range(len(expected)))
    return group


@pytest.fixture
def h5_file(tmp_path: Path) -> Iterator[Any]:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("group/rows", data=ROWS, chunks=(7, 4), compression="gzip")
    with h5py.File(tmp_path / "rows.h5", "r") as file:
        assert file["group/rows"][3].tolist() == ROWS[3].tolist()  # chunks are cached here
        yield file


MODES = [{"batched": False}, {"batched": True}, {"batched": True, "loader_count": 0}]
SPAWN = {"batched": True, "start_method": "spawn", "loader_count": 1}


@pytest.mark.parametrize("options", [*MODES, SPAWN])
def test_h5py_datasets_load_through_a_handle_of_each_process(h5_file: Any, options: Any) -> None:
    check_loading(h5_file["group/rows"], **options)


def test_h5py_datasets_are_never_read_through_the_inherited_handle(h5_file: Any) -> None:
    """Each process has the file open once more than it has inherited."""
    code = Path(__file__).parent / "isolated" / "h5_handles.py"
    done = subprocess.run(
        [sys.executable, str(code), h5_file.filename], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["{1}", "{1}"]


def test_h5py_datasets_that_cannot_be_opened_again_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        rows = file.create_dataset("rows", data=ROWS)
        with pytest.raises(TypeError, match="which is open for writing; close it"):
            DataGroup(1, rows, loader_arrays=ARRAYS)
        with pytest.raises(TypeError, match=r"data is an h5py\.File; give one of the datasets"):
            DataGroup(1, file, loader_arrays=ARRAYS)
        file["one"] = 1.0
        with pytest.raises(TypeError, match="'/one', which has no rows"):
            DataGroup(1, file["one"], loader_arrays=ARRAYS)
    with pytest.raises(TypeError, match=r"a closed h5py\.Dataset"):
        DataGroup(1, rows, loader_arrays=ARRAYS)
    with h5py.File("memory.h5", "w", driver="core", backing_store=False) as file:
        rows = file.create_dataset("rows", data=ROWS)
        with pytest.raises(TypeError, match=r"'memory\.h5', which is no file"):
            DataGroup(1, rows, loader_arrays=ARRAYS)


def test_h5py_files_that_became_another_are_an_error(h5_file: Any) -> None:
    group = DataGroup(1, h5_file["group/rows"], loader_arrays=ARRAYS)
    name = h5_file.filename
    h5_file.close()
    with h5py.File(name, "w") as file:
        file["group/rows"] = ROWS[:5]
    with pytest.raises(ValueError, match="has changed: '/group/rows' had 600 rows"):
        group[0]


@pytest.mark.parametrize("options", [*MODES, SPAWN])
def test_zarr_arrays_load(tmp_path: Path, options: Any) -> None:
    array = zarr.create_array(
        str(tmp_path / "rows.zarr"), shape=ROWS.shape, chunks=(50, 4), dtype="i4"
    )
    array[:] = ROWS
    assert array[3].tolist() == ROWS[3].tolist()  # starts what Zarr reads with in this process
    group = check_loading(array, **options)
    assert len(group) == 600
    assert [row.tolist() for row in group[1:3]] == ROWS[1:3].tolist()
    with pytest.raises(IndexError):
        group[600]


def test_zarr_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"data is a zarr\.Group; give one of the arrays"):
        DataGroup(1, zarr.create_group(str(tmp_path / "group.zarr")), loader_arrays=ARRAYS)


@pytest.fixture
def mapped(tmp_path: Path) -> np.memmap:
    ROWS.tofile(tmp_path / "rows.bin")
    return np.memmap(tmp_path / "rows.bin", np.int32, "r", shape=ROWS.shape)


@pytest.mark.parametrize("options", [*MODES, SPAWN])
def test_memory_maps_load(mapped: np.memmap, options: Any) -> None:
    check_loading(mapped, **options)


@pytest.mark.parametrize(
    "part",
    [
        lambda rows: rows,
        lambda rows: rows[5:300:3, 1:],
        lambda rows: rows.T,
        lambda rows: rows[10:20].reshape(-1, 8),
        lambda rows: rows[:0],
        lambda rows: rows[4:5],
    ],
)
def test_memory_maps_are_sent_to_new_processes_as_their_place(mapped: Any, part: Any) -> None:
    packed = dumps({"part": part(mapped)})
    assert len(packed) < 600
    again = pickle.loads(packed)["part"]
    np.testing.assert_array_equal(again, part(ROWS))
    assert again.strides == part(mapped).strides or again.size == 0


def test_memory_maps_that_were_changed_privately_are_sent_whole(mapped: np.memmap) -> None:
    private = np.memmap(mapped.filename, np.int32, "c", shape=ROWS.shape)
    private[0] = 7
    assert pickle.loads(dumps(private))[0].tolist() == [7] * 4
    backwards = pickle.loads(dumps(mapped[::-1]))
    np.testing.assert_array_equal(backwards, ROWS[::-1])


class MapStyle:
    """As map-style data sets of PyTorch are: plain integers in, no Sequence."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return ROWS[index]


class ManyAtOnce(MapStyle):
    """One that has several items at a time, and has each counted that is asked for alone."""

    alone = 0

    def __getitem__(self, index: int) -> Any:
        type(self).alone += 1
        return super().__getitem__(index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list
        return [ROWS[index] for index in indices]


@pytest.mark.parametrize("options", MODES)
def test_map_style_data_sets_load(options: Any) -> None:
    check_loading(MapStyle(), **options)


@pytest.mark.parametrize("batched", [False, True])
def test_many_items_are_had_at_once_where_that_is_offered(batched: bool) -> None:
    ManyAtOnce.alone = 0
    group = check_loading(ManyAtOnce(), batched=batched, loader_count=0)
    assert ManyAtOnce.alone == group.batch_count  # by the test, which looks at one of each batch


@pytest.mark.parametrize("batched", [False, True])
def test_many_items_of_a_share_and_of_buckets_are_had_at_once_too(batched: bool) -> None:
    data = ManyAtOnce()
    share = hydrax.process_share(data, process_index=1, process_count=2)
    check_loading(share, ROWS[1::2], batched=batched, loader_count=0)
    ManyAtOnce.alone = 0
    groups = hydrax.bucket_by_length(
        data, np.arange(600) % 9, [4, 8], 32, loader_arrays=lambda _: ARRAYS, remainder="short"
    )
    seen: list[int] = []
    loader = load_many if batched else load
    with Dataloader(
        loader, groups, batched=batched, loader_count=0, end_at=("epoch", 1)
    ) as batches:
        for batch in batches:
            seen += batch.arrays["x"][:, 0].tolist()
    assert ManyAtOnce.alone == 0
    assert sorted(seen) == ROWS[:, 0].tolist()


@pytest.mark.parametrize("options", MODES)
def test_shares_and_buckets_of_arrays_in_files_load(
    h5_file: Any, mapped: Any, options: Any
) -> None:
    for data in (h5_file["group/rows"], mapped):
        share = hydrax.process_share(data, process_index=1, process_count=2)
        check_loading(share, ROWS[1::2], **options)
        (bucket,) = hydrax.bucket_by_length(
            data, [3] * 600, [4], 32, loader_arrays=lambda _: ARRAYS, too_long="drop"
        )
        check_loading(bucket.data, **options)
        if isinstance(data, np.memmap):  # its rows stay in the file
            assert len(dumps(bucket.data)) < 10_000


def test_too_few_items_at_once_are_an_error() -> None:
    class TooFew(MapStyle):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [ROWS[index] for index in indices[1:]]

    with pytest.raises(hydrax.LoaderError, match="TooFew gave 0 items where 1 were asked for"):
        check_loading(TooFew(), loader_count=0)


def test_an_item_that_cannot_be_had_is_the_one_that_is_named() -> None:
    class Broken(MapStyle):
        def __getitem__(self, index: int) -> Any:
            if index == 17:
                raise OSError("disk on fire")
            return ROWS[index]

    group = DataGroup(32, Broken(), loader_arrays=ARRAYS)
    with Dataloader(load, group, loader_count=1) as batches:
        with pytest.raises(hydrax.LoaderError, match=r"item 17 .*disk on fire") as caught:
            next(batches)
        assert caught.value.index == 17


def test_grain_sources_load() -> None:
    grain = pytest.importorskip("grain", reason="Grain is not installed")

    class Source(grain.sources.RandomAccessDataSource):
        def __len__(self) -> int:
            return len(ROWS)

        def __getitem__(self, index: Any) -> Any:
            return ROWS[index]

    check_loading(Source())
    check_loading(grain.MapDataset.source(ROWS).map(lambda row: row + 0), batched=True)


def load_record(record: bytes, arrays: Any, seed: Any) -> None:
    arrays["x"][:] = np.frombuffer(record, np.int32)


def test_sources_of_array_record_are_refused_where_they_would_crash_and_load_elsewhere(
    tmp_path: Path,
) -> None:
    grain = pytest.importorskip("grain", reason="Grain is not installed")
    module = pytest.importorskip("array_record.python.array_record_module")
    path = str(tmp_path / "rows.array_record")
    writer = module.ArrayRecordWriter(path, "group_size:1")
    for row in ROWS:
        writer.write(row.tobytes())
    writer.close()
    source = grain.sources.ArrayRecordDataSource(path)
    assert source[3] == ROWS[3].tobytes()  # threads of native code have started in this process
    group = DataGroup(32, source, loader_arrays=ARRAYS, remainder="short")
    with pytest.raises(
        ValueError, match=r"data is array_record\..*; use start_method='forkserver'"
    ):
        Dataloader(load_record, group)
    for options in ({"loader_count": 0}, {"start_method": "forkserver"}):
        with Dataloader(load_record, group, end_at=("epoch", 1), **options) as batches:
            rows = [row for batch in batches for row in batch.arrays["x"].tolist()]
        assert rows == ROWS.tolist()


def test_torch_data_sets_load() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Source(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(ROWS)

        def __getitem__(self, index: Any) -> Any:
            return ROWS[index]

    check_loading(Source())
    check_loading(torch.utils.data.Subset(Source(), range(600)), batched=True)


class Holder(MapStyle):
    def __init__(self, held: Any) -> None:
        self.held = held


class SlotHolder(MapStyle):
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def test_what_holds_an_open_file_is_refused_by_name(tmp_path: Path, h5_file: Any) -> None:
    path = tmp_path / "file.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    with open(path, "rb") as file, zipfile.ZipFile(path) as archive:
        database = sqlite3.connect(tmp_path / "rows.db")
        for data, where in (
            (file, r"data is the open file '.*file\.zip'"),
            (Holder(file), r"data\.held is the open file '.*file\.zip'"),
            (SlotHolder(file), r"data\.held is the open file"),
            (Holder({"a": [file]}), r"data\.held\['a'\]\[0\] is the open file"),
            (Holder(Holder(archive)), r"data\.held\.held\.fp is the open file"),
            ([file, file], r"data\[0\] is the open file"),
            (Holder(h5_file), r"data\.held is of the open file '.*rows\.h5'"),
            (Holder(h5_file["group/rows"]), r"data\.held is of the open file '.*rows\.h5'"),
            (Holder(database), r"data\.held is an open database"),
        ):
            with pytest.raises(TypeError, match=where + ".*, which all loader processes would"):
                DataGroup(1, data, loader_arrays=ARRAYS)
        database.close()


def test_what_is_shared_without_harm_is_not_refused(tmp_path: Path, mapped: Any) -> None:
    path = tmp_path / "closed"
    with open(path, "w") as file:
        pass
    loop = Holder(None)
    loop.held = loop
    harmless = [file, io.BytesIO(b"x"), sys.stdout, mapped, path, loop, load, io, [1, 2], None]
    for held in harmless:
        DataGroup(1, Holder(held), loader_arrays=ARRAYS)
