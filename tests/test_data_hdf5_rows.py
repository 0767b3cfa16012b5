"""Rows of HDF5 files: found, checked and read, without any loader process."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hydrax.data import _hdf5
from hydrax.data._hdf5 import RowReader, find_data_sets

COUNT = 1000
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": (64, 3, 4)},
    "single": {"chunks": (1, 3, 4)},
    "split": {"chunks": (32, 2, 4)},
    "gzip": {"chunks": (64, 3, 4), "compression": "gzip", "shuffle": True},
    "checked": {"chunks": (50, 3, 4), "fletcher32": True},
    "growing": {"maxshape": (None, 3, 4), "chunks": True},
}
DTYPES = [
    "float32",
    "float64",
    "float16",
    "int8",
    "uint16",
    "int64",
    "bool",
    "complex64",
    ">f4",
    ">i2",
]


@pytest.fixture(scope="module")
def whole() -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).integers(0, 100, (COUNT, 3, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, whole: np.ndarray[Any, Any]) -> str:
    name = tmp_path_factory.mktemp("hdf5") / "layouts.h5"
    with h5py.File(name, "w", userblock_size=512) as file:
        for layout, options in LAYOUTS.items():
            file.create_dataset(layout, data=whole, **options)
        for dtype in DTYPES:
            file.create_dataset(f"types/{dtype}", data=whole.astype(dtype))
        file["scalars"] = np.arange(COUNT)
        file["compact"] = whole[:, 0, 0]
        file.create_dataset("unwritten", (COUNT, 2), "f4", fillvalue=7)
        half = file.create_dataset("half", (COUNT, 2), "f4", chunks=(100, 2), fillvalue=7)
        half[:500] = 1
        empty = file.create_dataset("empty_rows", (COUNT, 0), "f4")
        assert empty.shape == (COUNT, 0)
    return str(name)


def read(reader: RowReader, rows: Any) -> list[np.ndarray[Any, Any]]:
    rows = np.asarray(rows, np.int64)
    arrays = [np.full((len(rows), *s.shape), 99).astype(s.dtype) for s in reader.specs]
    reader.read(rows, arrays)
    return arrays


def some_rows(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    return {
        "in order": np.arange(100, 420),
        "at random": rng.integers(0, COUNT, 300),
        "repeated": rng.integers(0, 3, 50),
        "all of them": rng.permutation(COUNT),
        "backwards": np.arange(200)[::-1],
        "padded": np.r_[990:1000, 0:10],
        "first and last": np.array([999, 0]),
        "one": np.array([517]),
        "none": np.array([], np.int64),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_read_in_the_order_that_is_asked_for(
    path: str, whole: np.ndarray[Any, Any], layout: str, rng: np.random.Generator
) -> None:
    reader = RowReader(path, ["/" + layout])
    reader.open()
    try:
        for name, rows in some_rows(rng).items():
            (array,) = read(reader, rows)
            np.testing.assert_array_equal(array, whole[rows], err_msg=name)
    finally:
        reader.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_numbers_are_kept(
    path: str, whole: np.ndarray[Any, Any], dtype: str, rng: np.random.Generator
) -> None:
    reader = RowReader(path, [f"/types/{dtype}"])
    assert reader.specs[0].dtype == np.dtype(dtype).newbyteorder("=")
    for rows in some_rows(rng).values():
        (array,) = read(reader, rows)
        np.testing.assert_array_equal(array, whole.astype(dtype)[rows])


def test_data_sets_of_any_row_shape_are_read_together(
    path: str, whole: np.ndarray[Any, Any], rng: np.random.Generator
) -> None:
    reader = RowReader(
        path, ["/scalars", "/chunked", "/compact", "/unwritten", "/half", "/empty_rows"]
    )
    assert reader.row_count == COUNT
    assert [spec.shape for spec in reader.specs] == [(), (3, 4), (), (2,), (2,), (0,)]
    for rows in some_rows(rng).values():
        scalars, chunked, compact, unwritten, half, _ = read(reader, rows)
        np.testing.assert_array_equal(scalars, rows)
        np.testing.assert_array_equal(chunked, whole[rows])
        np.testing.assert_array_equal(compact, whole[rows, 0, 0])
        np.testing.assert_array_equal(unwritten, np.full((len(rows), 2), 7))
        np.testing.assert_array_equal(half[:, 0], np.where(rows < 500, 1, 7))


def test_a_compressed_chunk_is_decompressed_once_for_all_its_rows(
    path: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RowReader(path, ["/gzip"])
    starts: list[int] = []
    plain = _hdf5._Rows._read_run

    def counting(self: Any, start: int, array: np.ndarray[Any, Any]) -> None:
        starts.append(start)
        plain(self, start, array)

    monkeypatch.setattr(_hdf5._Rows, "_read_run", counting)
    read(reader, rng.permutation(COUNT))
    assert starts == list(range(0, COUNT, 64))


@pytest.mark.filterwarnings("ignore:.*fork")  # the children touch nothing of JAX
def test_a_fork_reads_with_handles_of_its_own(
    path: str, whole: np.ndarray[Any, Any], rng: np.random.Generator
) -> None:
    """The child reads while the parent does, both after the file was open in the parent."""
    with h5py.File(path) as shared:
        assert shared["gzip"][0, 0, 0] == whole[0, 0, 0]
        reader = RowReader(path, ["/gzip", "/contiguous"])
        reader.open()
        read(reader, [1, 2])
        pids = []
        for _ in range(3):
            seed = int(rng.integers(2**32))
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    reader.open()
                    own = np.random.default_rng(seed)
                    good = True
                    for _ in range(20):
                        rows = own.integers(0, COUNT, 50)
                        for array in read(reader, rows):
                            good &= bool((array == whole[rows]).all())
                    code = 0 if good else 2
                finally:
                    os._exit(code)
            pids.append(pid)
        for _ in range(20):
            rows = rng.integers(0, COUNT, 50)
            np.testing.assert_array_equal(shared["gzip"][np.unique(rows)], whole[np.unique(rows)])
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]


def test_two_threads_read_with_one_reader(
    path: str, whole: np.ndarray[Any, Any], rng: np.random.Generator
) -> None:
    reader = RowReader(path, ["/gzip", "/contiguous"])
    wrong: list[Any] = []

    def work(seed: int) -> None:
        own = np.random.default_rng(seed)
        for _ in range(20):
            rows = own.integers(0, COUNT, 30)
            wrong.extend(a for a in read(reader, rows) if not (a == whole[rows]).all())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in rng.integers(2**32, size=2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_is_gone_or_replaced_is_named_with_its_rows(
    tmp_path: Path, is_open: bool
) -> None:
    name = tmp_path / "x.h5"
    for _ in range(2):  # a second file, so that the numbers of the first are not used again
        with h5py.File(tmp_path / f"{_}.h5", "w") as file:
            file["x"] = np.arange(10)
    (tmp_path / "0.h5").rename(name)
    reader = RowReader(str(name), ["/x"])
    if is_open:
        reader.open()
    assert read(reader, [3])[0] == [3]
    kept = name.rename(tmp_path / "kept.h5")
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"rows 2 to 9 cannot be read.*x\.h5"):
            read(reader, [9, 2])
    (tmp_path / "1.h5").rename(name)
    if is_open:
        with pytest.raises(OSError, match=r"x\.h5 was replaced.*row 4"):
            read(reader, [4])
    kept.rename(name)
    assert read(reader, [3])[0] == [3]
    reader.close()


def test_a_file_that_is_cut_off_is_an_error_that_names_the_rows(tmp_path: Path) -> None:
    name = tmp_path / "x.h5"
    with h5py.File(name, "w") as file:
        file["x"] = np.zeros((1000, 100))
    reader = RowReader(str(name), ["/x"])
    reader.open()
    os.truncate(name, name.stat().st_size // 2)
    with pytest.raises(OSError, match=r"rows 999 to 999 of /x in .*x\.h5.*the file ends before"):
        read(reader, [999])
    assert (read(reader, [1])[0] == 0).all()
    reader.close()


def test_a_damaged_chunk_is_an_error_that_names_the_rows(tmp_path: Path) -> None:
    name = tmp_path / "x.h5"
    with h5py.File(name, "w") as file:
        data_set = file.create_dataset("x", data=np.arange(100), chunks=(10,), compression="gzip")
        damaged = data_set.id.get_chunk_info_by_coord((20,))
    with open(name, "r+b") as raw:
        raw.seek(damaged.byte_offset)
        raw.write(b"\xff" * damaged.size)
    reader = RowReader(str(name), ["/x"])
    with pytest.raises(OSError, match=r"rows 23 to 25 of /x in .*x\.h5 cannot be read: OSError"):
        read(reader, [25, 23])
    assert read(reader, [15])[0] == [15]


def test_closing_gives_back_every_descriptor(path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = RowReader(path, ["/gzip"])
    reader.open()
    assert len(os.listdir("/proc/self/fd")) > before
    reader.open()
    reader.close()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
    reader.open()
    del reader  # nobody closed it
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_names_are_found_sorted_on_each_level(tmp_path: Path) -> None:
    name = str(tmp_path / "x.h5")
    with h5py.File(name, "w", track_order=True) as file:
        for part in ("b/z", "a-b", "b/list_element_2", "b/list_element_10", "a/x", "B"):
            file[part] = np.arange(3)
        file.create_group("nothing")
        file["type"] = np.dtype("f4")
    assert find_data_sets(name, "/") == {
        "B": "/B",
        "a": {"x": "/a/x"},
        "a-b": "/a-b",
        "b": {
            "list_element_10": "/b/list_element_10",
            "list_element_2": "/b/list_element_2",
            "z": "/b/z",
        },
    }
    assert list(find_data_sets(name, "/")) == ["B", "a", "a-b", "b"]
    assert find_data_sets(name, "b/z/") == "/b/z"
    with pytest.raises(ValueError, match="no data set below '/nothing'"):
        find_data_sets(name, "/nothing")
    with pytest.raises(KeyError, match=r"no '/c'.*nothing"):
        find_data_sets(name, "/c")
    with pytest.raises(FileNotFoundError, match=r"y\.h5"):
        find_data_sets(str(tmp_path / "y.h5"), "/")


def test_data_sets_that_do_not_fit_are_refused_with_their_numbers(tmp_path: Path) -> None:
    name = str(tmp_path / "x.h5")
    with h5py.File(name, "w") as file:
        file["ten"], file["nine"], file["none"] = np.zeros(10), np.zeros((9, 2)), np.zeros(0)
        file["single"], file["text"] = 3.0, ["a", "b"]
    with pytest.raises(ValueError, match=r"/ten has 10, /nine has 9"):
        RowReader(name, ["/ten", "/nine"])
    with pytest.raises(ValueError, match="/none has 0"):
        RowReader(name, ["/none"])
    with pytest.raises(ValueError, match=r"'/single'.*single value"):
        RowReader(name, ["/single"])
    with pytest.raises(TypeError, match=r"'/text'.*expected numbers"):
        RowReader(name, ["/text"])
    with pytest.raises(KeyError, match="no data set '/other'"):
        RowReader(name, ["/other"])


def test_memory_for_reading_stays_small_whatever_is_read_at_once(tmp_path: Path) -> None:
    """256 MB of rows that lie close together are not all read to pick some of them."""
    import tracemalloc

    name = str(tmp_path / "sparse.h5")
    with h5py.File(name, "w") as file:
        data_set = file.create_dataset("x", (2**26,), "f4")
        data_set[-1] = 5  # only now the space is there; it has holes
    reader = RowReader(name, ["/x"])
    rows = np.arange(0, 2**26, 2**11)
    array = np.empty(len(rows), np.float32)
    tracemalloc.start()
    try:
        reader.read(rows, [array])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not array.any()
    assert peak < 2**25


def test_a_link_to_another_file_is_followed(tmp_path: Path) -> None:
    name, other = str(tmp_path / "links.h5"), str(tmp_path / "other.h5")
    values = np.arange(1000, dtype=np.float64)
    with h5py.File(other, "w") as file:
        file["x"] = values
        file.create_dataset("chunked", data=values, chunks=(100,))
    with h5py.File(name, "w") as file:
        file["own"] = -values  # as large as the other, so that its places exist in both
        file["chunked"] = h5py.ExternalLink(other, "/chunked")
        file["x"] = h5py.ExternalLink(other, "/x")
        file["group"] = h5py.ExternalLink(other, "/")
    assert find_data_sets(name, "/")["group"] == {"chunked": "/group/chunked", "x": "/group/x"}
    names = ["/x", "/chunked", "/group/x", "/own"]
    rows = np.array([5, 3, 999])
    arrays = [np.zeros(3) for _ in names]
    RowReader(name, names).read(rows, arrays)
    assert [array.tolist() for array in arrays] == [[5, 3, 999]] * 3 + [[-5, -3, -999]]


def test_links_that_lead_nowhere_or_back_are_named(tmp_path: Path) -> None:
    name = str(tmp_path / "links.h5")
    with h5py.File(name, "w") as file:
        file["back/x"] = np.arange(3)
        file["back/up"] = h5py.SoftLink("/")
        file["lost/x"] = h5py.SoftLink("/nothing")
        file["fine/x"] = h5py.SoftLink("/back/x")
    with pytest.raises(ValueError, match=r"a link leads from '/back/up' of .* back to"):
        find_data_sets(name, "/")
    with pytest.raises(KeyError, match=r"the link /lost/x of .* leads nowhere"):
        find_data_sets(name, "lost")
    assert find_data_sets(name, "fine") == {"x": "/fine/x"}
